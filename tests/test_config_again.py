"""A run's `config.yaml` is literal: whoever composes it again, or takes values from it, gets exactly what the run had."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from rlx.config.load import compose, load_run, to_yaml
from rlx.config.roots import EVAL
from rlx.config.run_config import escaped, text_of
from rlx.config.sweeps import is_sweep
from rlx.config.yaml_files import Loader

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
