"""Where a configuration's values come from: the command line, files, environment variables, group defaults, a run directory."""

from __future__ import annotations

import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from rlx.config.composition import Kept, compose_tree
from rlx.config.errors import ConfigError
from rlx.config.load import compose, load_run, to_yaml
from rlx.config.nested import RENAMED
from rlx.config.roots import EVAL, ROOTS, TRAIN, has_key

pytestmark = pytest.mark.slow

MINE = """\
defaults:
  - train
  - override /loss: cispo
max_steps: 11
seq_len: 81
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A user's own configuration directory."""
    write(tmp_path / "env" / "riddles.yaml", "# @package envs.riddles\nid: rlx-sums\nargs: {level: 2}\n")
    write(
        tmp_path / "experiment" / "first.yaml",
        "# @package _global_\ndefaults:\n  - override /loss: gspo\nmax_steps: 3\nseq_len: 83\nsampling: {max_tokens: 13}\n",
    )
    write(tmp_path / "mine.yaml", MINE)
    return tmp_path


def test_the_command_line_beats_files_which_beat_variables_which_beat_group_defaults(mine: Path):
    argv = ["--config-dir", str(mine), "experiment=first", "max_steps=2"]
    environ = {
        "RLX_MAX_STEPS": "4",
        "RLX_SEQ_LEN": "84",
        "RLX_MODEL__DTYPE": "bfloat16",
        "RLX_LOSS": "cispo",
        "RLX_ADVANTAGE": "group_mean",
    }
    composed = compose(argv, environ)
    cfg = composed.cfg
    assert cfg.max_steps == 2, "set in all four places: the command line wins"
    assert cfg.seq_len == 83, "set by the experiment, a variable and model=tiny: the experiment wins"
    assert cfg.model.dtype == "bfloat16", "set by a variable and model=tiny: the variable wins"
    assert cfg.sampling.max_tokens == 13
    assert cfg.model.context_length == 256, "set by model=tiny alone"
    assert composed.choices["loss"] == "gspo", "chosen by the experiment, a variable and train.yaml: the experiment wins"
    assert composed.choices["advantage"] == "group_mean", "chosen by a variable and by the loss: the variable wins"
    assert compose([*argv, "loss=reinforce"], environ).choices["loss"] == "reinforce"
    origins = [composed.origins.find(key) for key in ("max_steps", "seq_len", "model.dtype", "model.context_length")]
    assert origins == ["command line", str(mine / "experiment/first.yaml"), "RLX_MODEL__DTYPE", "conf/model/tiny.yaml"]


def test_a_file_of_the_users_own_beats_variables(mine: Path):
    cfg = compose(["--config-dir", str(mine), "--config-name", "mine"], {"RLX_MAX_STEPS": "4", "RLX_LOSS": "gspo", "RLX_SEED": "5"})
    assert (cfg.cfg.max_steps, cfg.cfg.seq_len, cfg.cfg.seed, cfg.choices["loss"]) == (11, 81, 5, "cispo")


def test_a_variable_chooses_an_experiment_and_a_list_of_options(mine: Path):
    environ = {"RLX_EXPERIMENT": "first", "RLX_ENV": "[sums,reverse_text]", "RLX_CONFIG_DIR": str(mine), "RLX_RUN__NAME": "a b=c"}
    composed = compose([], environ)
    assert (composed.cfg.seq_len, list(composed.cfg.envs), composed.cfg.run.name) == (83, ["sums", "reverse_text"], "a b=c")
    assert compose(["experiment=null"], environ).cfg.seq_len == 64
    assert compose(["+experiment=sums_tiny"], environ).cfg.seq_len == 64


@pytest.mark.parametrize("how", ["option", "variable", "hydra"])
def test_a_users_directory_adds_options_to_any_group(mine: Path, how: str):
    argv = {"option": ["--config-dir", str(mine)], "variable": [], "hydra": [f"hydra.searchpath=[file://{mine}]"]}[how]
    environ = {"RLX_CONFIG_DIR": str(mine)} if how == "variable" else {}
    composed = compose([*argv, "env=[riddles,reverse_text]"], environ)
    assert [env.id for env in composed.cfg.envs.values()] == ["rlx-sums", "rlx-reverse-text"]
    assert composed.label == "riddles+reverse_text-tiny-grpo"


def test_a_users_directory_may_have_a_space_in_its_name_and_a_changed_file_is_read_again(tmp_path: Path):
    mine = tmp_path / "my files % of today"
    for length in (83, 84):  # of the same size, within the resolution of a file's time
        write(mine / "experiment" / "first.yaml", f"# @package _global_\nseq_len: {length}\n")
        assert compose(["--config-dir", str(mine), "experiment=first"], {}).cfg.seq_len == length


def test_environments_merge_into_one_mix():
    composed = compose(["env=[sums,reverse_text]", "envs.sums.weight=3", "envs.sums.args.level=2"], {})
    cfg = composed.cfg
    assert composed.origins.find("envs.sums.args.level") == "command line"
    assert composed.origins.find("envs.sums.id") == "conf/env/sums.yaml"
    assert {name: (env.id, env.weight) for name, env in cfg.envs.items()} == {
        "sums": ("rlx-sums", 3.0),
        "reverse_text": ("rlx-reverse-text", 1.0),
    }
    assert cfg.envs["sums"].args["level"] == 2


def test_env_dot_key_means_the_only_environment():
    assert compose(["env=sums", "env.args.level=3"], {}).cfg.envs["sums"].args["level"] == 3
    assert compose(["env.id=rlx_sums", "env.args.level=3"], {}).cfg.envs["custom"].args == {"level": 3}
    with pytest.raises(ConfigError, match=r"envs\.<name>\.weight="):
        compose(["env=[sums,reverse_text]", "env.weight=2"], {})


def test_two_loggers():
    cfg = compose(["logger=[wandb_offline,tensorboard]", "logger.wandb.project=p", "dry_run=true"], {}).cfg
    assert cfg.logger.tensorboard is not None
    assert (cfg.logger.wandb.project, cfg.logger.wandb.mode) == ("p", "offline")
    assert compose([], {}).cfg.logger.wandb is None


def test_keys_of_open_nodes_are_added_and_removed_without_ceremony():
    cfg = compose(["loss.entropy_coef=0.01", "~loss.eps_low", "inference.vllm.block_size=16"], {}).cfg
    assert cfg.loss["entropy_coef"] == 0.01
    assert "eps_low" not in cfg.loss
    assert cfg.inference.vllm == {"block_size": 16}


@pytest.mark.parametrize(
    ("gpus", "has_build", "layout", "text"),
    [
        (0, True, "cpu", "no GPU visible, chose cpu"),
        (1, True, "gpu1_shared", "1 GPU visible, chose gpu1_shared"),
        (2, True, "gpu2", "2 GPUs visible, chose gpu2"),
        (3, True, "gpu2", "3 GPUs visible, chose gpu2, which uses 2"),
        (8, True, "node8", "8 GPUs visible, chose node8"),
        (1, False, "cpu", "1 GPU visible, but the CPU build of vLLM is installed (the extra `gpu` installs the GPU build), chose cpu"),
    ],
)
def test_auto_hardware_takes_the_layout_that_fits_and_says_so(monkeypatch, gpus: int, has_build: bool, layout: str, text: str):
    monkeypatch.setattr("rlx.config.gpus.installed_gpus", lambda: gpus)
    monkeypatch.setattr("rlx.config.gpus.has_gpu_build", lambda: has_build)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    composed = compose(["inference.gpu_memory_utilization=0.3", "hardware.cpu_threads=2"], {})
    assert composed.cfg.hardware.name == layout
    assert composed.notes == [f"hardware=auto: {text}"]
    assert composed.cfg.inference.gpu_memory_utilization == 0.3, "what the user sets is kept"
    assert composed.cfg.hardware.cpu_threads == 2


@pytest.mark.parametrize(("per_node", "layout"), [(8, "node8"), (4, "gpu4"), (0, "cpu")])
def test_auto_hardware_of_a_job_goes_by_the_cluster_and_not_by_the_machine_that_submits_it(monkeypatch, per_node: int, layout: str):
    monkeypatch.setattr("rlx.config.gpus.installed_gpus", lambda: 1)
    monkeypatch.setattr("rlx.config.gpus.has_gpu_build", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    line = ["launcher=slurm", "slurm=example", f"slurm.gpus_per_node={per_node}", "dry_run=true"]
    composed = compose(line, {})
    assert composed.cfg.hardware.name == layout
    assert composed.notes == [f"hardware=auto: slurm.gpus_per_node={per_node}, chose {layout}"]
    assert compose([*line, "hardware=cpu_3nodes"], {}).cfg.hardware.name == "cpu_3nodes"
    assert compose(["launcher=local", *line[1:]], {}).cfg.hardware.name == "gpu1_shared"
    named = compose(["launcher=slurm", "slurm=example", "slurm.layout=gpu2", "dry_run=true"], {})
    assert (named.cfg.hardware.name, named.notes) == ("gpu2", ["hardware=auto: slurm.layout=gpu2"])
    assert compose(["launcher=slurm", "slurm=dev", "dry_run=true"], {}).cfg.hardware.name == "cpu", "its GPUs are not real"
    with pytest.raises(ConfigError, match=r"hardware=auto does not know the nodes of the cluster: slurm.gpus_per_node=null"):
        compose(["launcher=slurm", "dry_run=true"], {})


@pytest.mark.parametrize("per_node", ['"8"', "${oc.env:GPN}"])
def test_auto_hardware_of_a_job_takes_a_decimal_text_and_an_interpolation(monkeypatch, tmp_path: Path, per_node: str):
    monkeypatch.setenv("GPN", "8")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "mine.yaml").write_text(f"gpus_per_node: {per_node}\n")
    line = ["launcher=slurm", "--config-dir", str(tmp_path), "slurm=mine", "dry_run=true"]
    composed = compose(line, {})
    assert (composed.cfg.hardware.name, composed.cfg.slurm.gpus_per_node) == ("node8", 8)
    for wrong, said in (("GPN", "slurm.gpus_per_node"), ("2.5", "slurm.gpus_per_node"), ("${oc.env:NO_GPN}", "cannot be resolved")):
        with pytest.raises(ConfigError) as caught:
            compose([*line, f"slurm.gpus_per_node={wrong}"], {})
        assert said in str(caught.value)
        assert "hardware=auto" not in str(caught.value)


@pytest.mark.parametrize(("chosen", "count"), [("", 0), ("0", 1), ("1,3", 2), ("0,9,1", 1), ("-1", 0), ("GPU-8f1,GPU-8f2", 2)])
def test_cuda_visible_devices_narrows_the_gpus(monkeypatch, chosen: str, count: int):
    from rlx.config import gpus

    monkeypatch.setattr(gpus, "installed_gpus", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert gpus.visible_gpus() == count


def test_a_runs_config_file_is_the_configuration_again(tmp_path: Path):
    first = compose(["env=[sums,reverse_text]", "loss=gspo", "logger=wandb_offline", "optim.lr=1e-5", "seed=3", "dry_run=true"], {})
    write(tmp_path / "config.yaml", first.yaml)
    assert load_run(tmp_path) == first.cfg
    argv = ["--config-dir", str(tmp_path), "--config-name", "config"]
    again = compose(argv, {"RLX_SEED": "9", "RLX_LOSS": "grpo"})
    assert again.cfg == first.cfg, "variables do not change a resolved configuration"
    assert again.label == "sums+reverse_text-tiny-gspo"
    assert compose([*argv, "seed=4", "loss.eps_low=0.1"], {}).cfg.loss["eps_low"] == 0.1


def test_a_run_directory_with_a_wrong_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="is no run directory"):
        load_run(tmp_path)
    write(tmp_path / "config.yaml", "seed: 1\nmax_steps: many\nmodel: {nme: x}\n")
    with pytest.raises(ConfigError) as caught:
        load_run(tmp_path)
    text = str(caught.value)
    for part in (
        "`max_steps` must be an integer: max_steps=many",
        "unknown key `model.nme`",
        "no value: model.name, model.context_length",
        "no value: seq_len",
    ):
        assert part in text


def test_composing_writes_nothing_and_stays_where_it_is(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compose(["loss=gspo"], {})
    assert list(tmp_path.iterdir()) == []
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import rlx.config.schema, rlx.config.validate, rlx.config.checks", ("hydra", "omegaconf", "torch", "vllm", "verifiers")),
        ("import rlx.config.load as load; load.load_run(sys.argv[1])", ("hydra", "omegaconf", "torch", "vllm", "verifiers")),
        ("import rlx.config.load as load; load.compose(['loss=gspo', 'env=math'], {})", ("torch", "vllm", "verifiers")),
        pytest.param(
            "from rlx.train.trial import check_built; from rlx.config.load import load_run; check_built(load_run(sys.argv[1]))",
            ("torch._dynamo",),
            marks=pytest.mark.long,
        ),
    ],
    ids=["rules", "load_run", "compose", "build"],
)
def test_heavy_packages_stay_out(tmp_path: Path, code: str, absent: tuple[str, ...]):
    write(tmp_path / "config.yaml", compose([], {}).yaml)
    check = f"import sys; {code}; print([name for name in {absent!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", check, str(tmp_path)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_composition_changes_nothing_that_a_later_one_reads():
    """Files and schema are read once in a process; each composition gets nodes of its own."""
    before = compose([], {}).yaml
    changed = compose(["optim.lr=0.5", "loss=gspo", "env=[sums,reverse_text]", "model.name=other", "+envs.sums.args.level=2"], {}).yaml
    assert changed != before
    assert compose([], {}).yaml == before


@pytest.mark.long
def test_compositions_that_share_files_are_what_each_is_alone(tmp_path: Path):
    """Values, choices, origins and problems: whatever the runs of a sweep have in common, and whatever tells them apart."""
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "mine.yaml").write_text("partition: a\ngpus_per_node: 8\n")
    job = ["--config-dir", str(tmp_path), "launcher=slurm", "slurm=mine", "hardware=auto", "model=qwen3_0_6b"]
    lines = [
        ["loss=grpo", "seed=1"],
        ["loss=grpo", "seed=2", "optim.lr=1e-4"],
        ["loss=gspo", "seed=1", "~loss.clip_low"],
        ["env=[sums,reverse_text]", "seed=1"],
        ["env=[sums,reverse_text]", "envs.sums.weight=2"],
        ["env.args.max_value=5", "env=sums"],
        ["env=sums", "optim={lr: 1e-3}"],
        ["experiment=sums_tiny"],
        ["experiment=sums_tiny", "logger=null", "optim=sgd"],
        ["logger=tensorboard", "run.name=x"],
        job,
        [*job, "slurm.partition=b", "slurm.options={mem: null}"],
    ]

    def made(argv: list[str], environ: dict[str, str], *kept: Kept) -> object:
        try:
            return compose(argv, environ, TRAIN, *kept)
        except ConfigError as error:
            return error.problems

    kept: Kept = {}
    for environ in ({}, {"RLX_OPTIM_LR": "0.5"}, {"RLX_LOSS": "cispo"}):
        for argv in [*lines, *reversed(lines)]:
            assert made(argv, environ, kept) == made(argv, environ)
    assert len(kept) < 3 * len(lines), "some are shared"


@pytest.mark.parametrize(
    ("value", "expected"), [("${seed}", 7), ("${optim.lr}", 0.5), ("${${run.name}}", 7), ("${oc.select:model.nothing,3}", 3)]
)
def test_a_value_may_refer_to_another_section(value: str, expected: float):
    """Only sections that refer, or are referred to, go through OmegaConf."""
    found = compose_tree([f"loss.eps_high='{value}'", "seed=7", "optim.lr=0.5", "run.name=seed"], {})
    assert found.data["loss"]["eps_high"] == expected


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("orchestrator.group_size", "orchestrator.rollouts_per_example", 4),
        ("max_off_policy_steps", "max_async_level", 3),
        ("eval.share", "eval.capacity_fraction", 0.5),
    ],
)
def test_another_name_of_a_key_is_accepted_wherever_the_key_is(tmp_path: Path, name: str, key: str, value: float):
    def found(argv: list[str], environ: dict[str, str] | None = None) -> object:
        return attrgetter(key)(compose(argv, environ or {}).cfg)

    two = value / 2 if isinstance(value, float) else 2
    write(tmp_path / "experiment" / "mine.yaml", f"# @package _global_\n{name.replace('.', ': {')}: {value}{'}' * name.count('.')}\n")
    mine = ["--config-dir", str(tmp_path), "experiment=mine"]
    assert found([f"{name}={value}"]) == found(mine) == found([], {"RLX_" + name.upper().replace(".", "__"): str(value)}) == value
    assert found([*mine, f"{key}={two}"]) == two, "the command line wins over a file's synonym"
    assert found([*mine, f"{name}={two}"]) == two


def test_a_renamed_key_is_taken_by_its_old_name_for_each_environment_and_the_new_one_is_said(tmp_path: Path):
    write(tmp_path / "experiment" / "mine.yaml", "# @package _global_\nenvs: {sums: {reward_raises: zero}}\nhardware: {shared: false}\n")
    composed = compose(["--config-dir", str(tmp_path), "experiment=mine", "env=[sums,math]", "envs.math.reward_raises=zero"], {})
    assert [env.on_reward_error for env in composed.cfg.envs.values()] == ["zero", "zero"]
    new = ("envs.sums.on_reward_error", "envs.math.on_reward_error", "hardware.colocate")
    assert all(any(f"is called `{key}` now" in note for note in composed.notes) for key in new)


@pytest.mark.parametrize(
    ("argv", "environ", "said"),
    [
        (["env.reward_raises=zero"], {}, True),
        (["envs.sums={reward_raises: zero}"], {}, True),
        (["envs={sums: {reward_raises: zero}}"], {}, True),
        ([], {"RLX_ENVS__SUMS__REWARD_RAISES": "zero"}, True),
        ([], {"RLX_ENVS__SUMS": "{reward_raises: zero}"}, False),
    ],
)
def test_an_older_name_counts_within_a_section_and_in_a_variable_too(argv: list[str], environ: dict[str, str], said: bool):
    composed = compose(["env=sums", *argv], environ)
    assert composed.cfg.envs["sums"].on_reward_error == "zero"
    assert said == any("is called `envs.sums.on_reward_error` now" in note for note in composed.notes)


def test_the_configuration_of_a_run_with_older_names_is_started_again_forked_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    text = to_yaml(compose(["env=sums", "envs.sums.on_reward_error=zero", "run.name=old"], {}).cfg)
    for new, old in (("supports_tp", "divides_heads"), ("colocate", "shared"), ("on_reward_error", "reward_raises")):
        assert new in text
        text = text.replace(f" {new}:", f" {old}:")
    write(tmp_path / "outputs" / "old" / "config.yaml", text)
    (tmp_path / "outputs" / "old" / "weights" / "step_1").mkdir(parents=True)
    again = compose(["--config-dir", "outputs/old", "--config-name", "config"], {})
    fork = compose(["run.name=branch", "resume=outputs/old"], {})
    scored = compose(["weights_dir=outputs/old"], {}, EVAL)
    assert [each.cfg.envs["sums"].on_reward_error for each in (again, fork, scored)] == ["zero"] * 3


def test_a_section_of_another_name_may_stand_beside_one_that_is_off(tmp_path: Path):
    write(tmp_path / "experiment" / "mine.yaml", "# @package _global_\nmonitors: {wandb: {project: mine, mode: offline}}\nlogger: null\n")
    assert compose(["--config-dir", str(tmp_path), "experiment=mine", "dry_run=true"], {}).cfg.logger.wandb.project == "mine"


def test_names_of_environments_need_not_be_words(tmp_path: Path):
    write(tmp_path / "experiment" / "mine.yaml", "# @package _global_\nenvs: {1: {id: rlx_sums, reward_raises: zero}}\n")
    assert compose(["--config-dir", str(tmp_path), "experiment=mine"], {}).cfg.envs["1"].on_reward_error == "zero"


@pytest.mark.parametrize("key", RENAMED.values())
def test_the_new_name_of_a_renamed_key_is_a_key(key: str):
    assert any(has_key(root.schema, key.replace("*", "math")) for root in ROOTS)


def test_two_names_of_one_key_in_one_file_are_refused(tmp_path: Path):
    write(tmp_path / "experiment" / "both.yaml", "# @package _global_\norchestrator: {group_size: 4, rollouts_per_example: 8}\n")
    with pytest.raises(ConfigError, match=r"both\.yaml: .*are two names of one key"):
        compose(["--config-dir", str(tmp_path), "experiment=both"], {})


def test_an_interpolation_of_an_older_name_says_the_new_one():
    with pytest.raises(ConfigError, match=r"'hardware\.shared' not found .* `hardware\.shared` is called `hardware\.colocate` now"):
        compose(["run.name='a-${hardware.shared}'"], {})


def test_a_section_of_another_name_is_the_keys_section(tmp_path: Path):
    write(tmp_path / "experiment" / "mine.yaml", "# @package _global_\nmonitors: {wandb: {project: mine, mode: offline}}\n")
    for line in (["--config-dir", str(tmp_path), "experiment=mine"], ["logger=wandb_offline", "monitors.wandb.project=mine"]):
        assert compose([*line, "dry_run=true"], {}).cfg.logger.wandb.project == "mine"
