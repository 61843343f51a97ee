"""Files, command lines and roots: what they say is what a configuration has, also when a run is composed again from its own file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from rlx.config import composition, roots
from rlx.config.errors import ConfigError
from rlx.config.keys import MISSING, key, section
from rlx.config.load import compose, load_run, to_yaml
from rlx.config.overrides import COMBINED
from rlx.config.presets import shipped_groups
from rlx.config.roots import EVAL, ROOTS, TRAIN, Root
from rlx.config.run_config import escaped, text_of
from rlx.config.schema import EnvConfig, InferenceConfig, ModelConfig, RunConfig, SamplingConfig
from rlx.config.sweeps import expand, is_sweep
from rlx.config.yaml_files import Loader


@pytest.mark.parametrize("argv", [["loss=mine"], ["envs.reverse_text.loss=mine"], ["--config-name", "mine"]])
def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_conf" / "loss").mkdir(parents=True)
    (tmp_path / "my_conf" / "loss" / "mine.yaml").write_bytes(b"a: 1\nb: \xff\n")
    if argv[0] == "--config-name":
        (tmp_path / "my_conf" / "loss" / "mine.yaml").rename(tmp_path / "my_conf" / "mine.yaml")
    with pytest.raises(ConfigError, match=r"my_conf/.*mine\.yaml: .* can't decode byte 0xff"):
        compose(["--config-dir", "my_conf", *argv], {})


def test_an_empty_file_sets_nothing(tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\n# nothing yet\n")
    assert compose(["--config-dir", str(tmp_path), "experiment=mine"], {}).cfg == compose([], {}).cfg


def test_a_runs_broken_file_is_named_with_its_line(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("seed: 1\nmodel: [\n")
    with pytest.raises(ConfigError, match=r"config\.yaml, line 3: "):
        load_run(tmp_path)


def test_text_stays_as_a_file_has_it(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [train, _self_]\nrun: {name: 12:30:00}\n"
        "slurm:\n  partition: 007\n  qos: 2024_06_01\n  prefix: &words [taskset, 0x0f]\n  setup: *words\n"
        "  container: {runtime: apptainer, image: /i.sif, python: python3, mounts: [/data], options: [007, 8]}\n"
    )
    argv = ["--config-dir", str(tmp_path), "--config-name", "mine"]
    cfg = compose(argv, {}).cfg
    slurm = cfg.slurm
    assert (cfg.run.name, slurm.partition, slurm.qos) == ("12:30:00", "007", "2024_06_01")
    assert (slurm.prefix, slurm.setup) == (["taskset", "0x0f"], ["taskset", "0x0f"])
    assert slurm.container.options == ["007", "8"]
    assert compose([*argv, "slurm.prefix=[a,3]"], {}).cfg.slurm.prefix == ["a", "3"], "set later, as a whole"
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\noptim: {betas: [9e-1, 0.999]}\n")
    assert compose(argv, {}).cfg.optim["betas"] == [0.9, 0.999], "no key of text"


def test_environments_that_are_null_are_a_problem_with_its_file(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [train, _self_]\nenvs: null\noptim: {lr: '1e-5'}\n")
    with pytest.raises(ConfigError, match=re.escape(f"`envs` must be a section of keys: envs=null ({file}).")):
        compose(["--config-dir", str(tmp_path), "--config-name", "mine"], {})
    (tmp_path / "config.yaml").write_text(compose([], {}).yaml.replace("\nenvs:", "\nenvs: null\nother:"))
    with pytest.raises(ConfigError, match="`envs` must be a section of keys"):
        load_run(tmp_path)


def test_a_null_in_place_of_a_choice_is_told_the_choices(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [train, _self_]\ntrainer: {reshard_after_forward: null}\n")
    key = "trainer.reshard_after_forward"
    with pytest.raises(ConfigError, match=re.escape(f"`{key}` must be one of auto, true, false: {key}=null ({file}).")):
        compose(["--config-dir", str(tmp_path), "--config-name", "mine"], {})


def test_the_combined_groups_exist():
    assert set(COMBINED) < set(shipped_groups())


def test_groups_that_combine_take_a_list():
    composed = compose(["env=[sums,reverse_text]", "experiment=[sums_tiny,reverse_text_lora]", "logger=[tensorboard]", "loss=[gspo]"], {})
    assert composed.choices["env"] == "sums+reverse_text"
    assert composed.choices["experiment"] == "sums_tiny+reverse_text_lora"
    assert composed.choices["loss"] == "gspo", "a list of one is one option"


def test_a_group_of_the_users_own_takes_a_list(tmp_path: Path):
    (tmp_path / "part").mkdir()
    for name, value in (("a", "seed: 5"), ("b", "max_steps: 7")):
        (tmp_path / "part" / f"{name}.yaml").write_text(f"# @package _global_\n{value}\n")
    cfg = compose(["--config-dir", str(tmp_path), "+part=[a,b]"], {}).cfg
    assert (cfg.seed, cfg.max_steps) == (5, 7)


@pytest.mark.parametrize("key", ["loss", "optim", "hardware", "model", "advantage", "launcher", "slurm"])
def test_other_groups_take_one_option(key: str):
    options = [path.stem for path in sorted(shipped_groups()[key].glob("*.yaml"))][:2]
    with pytest.raises(ConfigError) as caught:
        compose([f"{key}=[{','.join(options)}]"], {})
    (problem,) = caught.value.problems
    assert f"a configuration has one {key}, not {' and '.join(options)}. For one run per value: -m {key}=" in problem
    with pytest.raises(ConfigError, match=f"a configuration has one {key}"):
        compose([], {f"RLX_{key.upper()}": f"[{','.join(options)}]"})


def test_a_path_with_a_comma_or_letters_of_other_languages_needs_no_quotes_if_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = "outputs/läufe/loss=grpo,seed=1"
    with pytest.raises(ConfigError, match="cannot be parsed"):
        compose([f"resume={folder}", "dry_run=true"], {})
    Path(folder).mkdir(parents=True)
    found = expand([f"resume='{folder}'", f"run.dir='{folder}'", "seed=1,2", "dry_run=true"], {})
    assert found.directory == folder
    assert [compose(element.argv, {}).cfg.resume for element in found.elements] == [folder] * 2
    shown = f"./{folder}"  # another text, as parsed lines are kept
    swept = expand([f"run.dir={shown}", "seed=1,2", "dry_run=true"], {})
    assert (swept.directory, len(swept.elements)) == (shown, 2)
    assert compose([f"run.dir=./{folder}", "dry_run=true"], {}).cfg.run.dir == f"./{folder}"


@pytest.mark.parametrize("text", ["2024_06_01", "1e3", "007", "0x10"])
def test_a_key_of_text_keeps_what_looks_like_a_number(text: str):
    composed = compose([f"run.name={text}", f"+slurm.partition={text}", "launcher=slurm", "hardware=cpu", "dry_run=true"], {})
    assert (composed.cfg.run.name, composed.cfg.slurm.partition) == (text, text)
    assert composed.overrides[0] == f"run.name={text}", "as it was written"
    assert compose(["optim.lr=1e-3", "max_steps=1_0"], {}).cfg.max_steps == 10


def test_the_advice_for_a_text_with_a_comma_works():
    lines = ['slurm.partition="gpu,preemptible"', "launcher=slurm", "hardware=cpu", "dry_run=true"]
    assert compose(lines, {}).cfg.slurm.partition == "gpu,preemptible"


TEXTS = ("Shell: echo ${seed}", "${foo}", r"a \${seed} \\${x} \ end\\", "${", "1e-5", "1e3", "+2E7", "1_0e2", ".5e-3", "1:30.5", ".inf")
# Another Python has the environment, so nothing is known here of its arguments.
CUSTOM = ("env=custom", "env.id=shell", f"env.python={sys.executable}", "launcher.check_envs=false", "dry_run=true", "model=qwen3_0_6b")


def made(tmp_path: Path, name: str = "run") -> tuple[Path, dict[str, str]]:
    """The directory of a run whose environment has these texts as arguments, and the arguments."""
    given = {f"text_{number}": text for number, text in enumerate(TEXTS)}
    cfg = compose([*CUSTOM, "env.args={" + ",".join(f"{key}: ''" for key in given) + "}"], {}).cfg
    cfg.envs["custom"].args.update(given, numbers=[1e-5, 1e20, 3], listed=["${seed}", "1e-5"])
    (tmp_path / name / "weights" / "step_1").mkdir(parents=True)
    (tmp_path / name / "config.yaml").write_text(to_yaml(cfg))
    return tmp_path / name, cfg.envs["custom"].args


def again(run: Path) -> list[str]:
    return ["--config-dir", str(run), "--config-name", "config"]


def test_a_run_again_and_an_evaluation_have_the_arguments_of_the_first(tmp_path: Path):
    run, args = made(tmp_path)
    assert load_run(run).envs["custom"].args == args
    composed = compose(again(run), {})
    assert composed.cfg == load_run(run)
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "config.yaml").write_text(composed.yaml)
    assert compose(again(tmp_path / "second"), {}).cfg == composed.cfg, "and so has each after it"
    assert compose([f"weights_dir={run}", "dry_run=true"], {}, EVAL).cfg.envs["custom"].args == args


def test_an_escaped_reference_of_the_command_line_stays_text(tmp_path: Path):
    first = compose([*CUSTOM, r"env.args.prompt='Shell: echo \${seed}'"], {})
    assert first.cfg.envs["custom"].args["prompt"] == "Shell: echo ${seed}"
    (tmp_path / "config.yaml").write_text(first.yaml)
    assert compose(again(tmp_path), {}).cfg.envs["custom"].args["prompt"] == "Shell: echo ${seed}"


def test_an_edited_file_reads_numbers_as_any_file_does(tmp_path: Path):
    run, _ = made(tmp_path)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("text_1: ${foo}", "text_1: 1e-6"))
    for cfg in (compose(again(run), {}).cfg, load_run(run)):
        assert cfg.envs["custom"].args["text_1"] == 1e-6


def test_a_file_of_the_users_own_has_references(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\nseed: 7\nseq_len: ${oc.decode:'64'}\nmax_steps: ${seed}\n")
    cfg = compose(["--config-dir", str(tmp_path), "--config-name", "mine"], {}).cfg
    assert (cfg.seq_len, cfg.max_steps) == (64, 7)


@pytest.mark.parametrize("text", [*TEXTS, "", "a", "1", "yes", "null", "~", "2024-01-01", "0x1f", "007", "- a", "a: b", "1e", "größe"])
def test_what_is_written_is_read_the_same_with_the_numbers_of_either_version_of_yaml(text: str):
    written = text_of({"key": text, "list": [text], text: 1}, "train", "rlx_schema")
    for loader in (yaml.SafeLoader, Loader):
        data = yaml.load(written, Loader=loader)
        assert (data["key"], data["list"], data[text]) == (text, [text], 1)
    assert OmegaConf.to_container(OmegaConf.create(escaped({"key": text})), resolve=True) == {"key": text}


def test_a_variable_has_no_effect_on_a_run_again_and_a_note_says_so(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(compose(["seed=3"], {}).yaml)
    environ = {"RLX_EXPERIMENT": "sums_tiny", "RLX_SWEEPS": "seeds", "RLX_LOSS": "gspo", "RLX_INFERENCE__API_KEY": "sesame"}
    composed = compose(again(tmp_path), environ)
    assert composed.cfg == load_run(tmp_path)
    assert [note.partition(": ")[0] for note in composed.notes] == [f"{name} has no effect" for name in sorted(environ)]
    assert not any("sesame" in note for note in composed.notes)
    assert not is_sweep(again(tmp_path), environ)
    assert is_sweep([], environ)


# ruff: noqa: RUF009  (key and section return dataclass fields)


@dataclass
class ProbeConfig:
    """Some sections of the schema and one key of its own, without trainer, loss and sample length."""

    rollouts: int = key(MISSING, "rollouts of each example", low=1)
    seed: int = key(0, "seed of sampling")
    dry_run: bool = key(False, "start nothing")
    run: RunConfig = section(RunConfig)
    model: ModelConfig = section(ModelConfig)
    envs: dict[str, EnvConfig] = key({}, "the environments by name")
    sampling: SamplingConfig = section(SamplingConfig)
    inference: InferenceConfig = section(InferenceConfig)


PROBE = Root("probe", ProbeConfig)
PRIMARY = """
defaults:
  - rlx_schema
  - _self_
  - env: [sums]
  - model: tiny
  - rlx_variables
  - optional experiment: null
rollouts: 4
"""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the root's primary file; the root is registered as a command's root would be."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "probe.yaml").write_text(PRIMARY)
    assert composition.ROOTS is ROOTS  # imported before the replacement, or the whole session would keep it
    monkeypatch.setattr(roots, "ROOTS", (TRAIN, PROBE))
    yield tmp_path / "conf"
    ConfigStore.instance().repo.pop(f"{PROBE.schema_name}.yaml", None)  # a later test lists what can be chosen


def test_groups_variables_and_the_command_line_reach_another_root(conf: Path):
    environ = {"RLX_CONFIG_DIR": str(conf), "RLX_ENV": "reverse_text", "RLX_SAMPLING__MAX_TOKENS": "7"}
    composed = compose(["rollouts=2", "inference.max_num_seqs=9"], environ, PROBE)
    cfg = composed.cfg
    assert isinstance(cfg, ProbeConfig)
    assert (cfg.rollouts, list(cfg.envs), cfg.sampling.max_tokens, cfg.inference.max_num_seqs) == (2, ["reverse_text"], 7, 9)
    assert cfg.model.name == "tiny"
    assert composed.label == "reverse_text-tiny"


def test_what_files_and_variables_hold_for_another_command_is_passed_over(conf: Path):
    environ = {"RLX_CONFIG_DIR": str(conf), "RLX_MAX_STEPS": "3", "RLX_LOSS": "gspo", "RLX_TRAINER__COMPILE": "true"}
    assert compose([], environ, PROBE).cfg.rollouts == 4, "model=tiny sets optim.lr, the environment max_steps"
    with pytest.raises(ConfigError, match="RLX_MAX_STEP sets no configuration key"):
        compose([], environ | {"RLX_MAX_STEP": "3"}, PROBE)


def test_all_mistakes_of_a_command_line_are_found_by_the_roots_own_schema(conf: Path):
    with pytest.raises(ConfigError) as caught:
        compose(["rolouts=3", "optim.lr=1", "sampling.top_p=7", "seed=x", "model.nme=y"], {"RLX_CONFIG_DIR": str(conf)}, PROBE)
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    for part in (
        "unknown key `rolouts` (command line). Did you mean `rollouts`?",
        "unknown key `optim.lr` (command line). It is a key of `rlx train`.",
        "`sampling.top_p` must be above 0 and at most 1: sampling.top_p=7.0 (command line).",
        "`seed` must be an integer: seed=x (command line).",
        "unknown key `model.nme` (command line). Did you mean `model.name`",
    ):
        assert part in text, text
    with pytest.raises(ConfigError, match=r"unknown key `loss` \(command line\). It is a key of `rlx train`"):
        compose(["loss=gspo"], {"RLX_CONFIG_DIR": str(conf)}, PROBE)


def test_a_file_of_the_roots_configuration_is_the_configuration_again(conf: Path, tmp_path: Path):
    composed = compose(["rollouts=3"], {"RLX_CONFIG_DIR": str(conf)}, PROBE)
    (tmp_path / "config.yaml").write_text(composed.yaml)
    assert load_run(tmp_path, PROBE) == composed.cfg
    assert set(yaml.safe_load(composed.yaml)) == {"defaults", *ProbeConfig.__dataclass_fields__}
