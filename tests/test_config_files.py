"""A broken file of the user's is a mistake in the configuration; tests/test_config_errors.py has the texts of most."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose, load_run


@pytest.mark.parametrize("argv", [["loss=mine"], ["envs.reverse_text.loss=mine"], ["--config-name", "mine"]])
def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_conf" / "loss").mkdir(parents=True)
    (tmp_path / "my_conf" / "loss" / "mine.yaml").write_bytes(b"a: 1\nb: \xff\n")
    if argv[0] == "--config-name":
        (tmp_path / "my_conf" / "loss" / "mine.yaml").rename(tmp_path / "my_conf" / "mine.yaml")
    with pytest.raises(ConfigError, match=r"my_conf/.*mine\.yaml: .* can't decode byte 0xff"):
        compose(["--config-dir", "my_conf", *argv], {})


def test_an_alias_of_itself_is_a_short_message(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("a: &a [*a]\n")
    with pytest.raises(ConfigError) as caught:
        compose(["--config-dir", str(tmp_path), "--config-name", "mine"], {})
    assert str(tmp_path / "mine.yaml") in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_an_empty_file_sets_nothing(tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\n# nothing yet\n")
    assert compose(["--config-dir", str(tmp_path), "experiment=mine"], {}).cfg == compose([], {}).cfg


def test_a_runs_broken_file_is_named_with_its_line(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("seed: 1\nmodel: [\n")
    with pytest.raises(ConfigError, match=r"config\.yaml, line 3: "):
        load_run(tmp_path)


def test_the_command_line_ends_with_2_and_without_a_traceback(tmp_path: Path):
    (tmp_path / "loss").mkdir()
    (tmp_path / "loss" / "mine.yaml").write_text("a: 1\n b: 2\n")
    argv = [sys.executable, "-m", "rlx.cli", "train", "--config-dir", str(tmp_path), "loss=mine", "dry_run=true"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2
    assert "mine.yaml, line 2: " in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_text_in_a_list_stays_as_a_file_has_it(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [train, _self_]\n"
        "slurm:\n  prefix: &words [taskset, 0x0f]\n  setup: *words\n"
        "  container: {runtime: apptainer, image: /i.sif, python: python3, mounts: [/data], options: [007, 8]}\n"
    )
    argv = ["--config-dir", str(tmp_path), "--config-name", "mine"]
    slurm = compose(argv, {}).cfg.slurm
    assert (slurm.prefix, slurm.setup) == (["taskset", "0x0f"], ["taskset", "0x0f"])
    assert slurm.container.options == ["007", "8"]
    assert compose([*argv, "slurm.prefix=[a,3]"], {}).cfg.slurm.prefix == ["a", "3"], "set later, as a whole"
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\noptim: {betas: [9e-1, 0.999]}\n")
    assert compose(argv, {}).cfg.optim["betas"] == [0.9, 0.999], "no key of text"


def test_environments_that_are_null_are_a_problem_with_its_file(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [train, _self_]\nenvs: null\noptim: {lr: '1e-5'}\n")
    with pytest.raises(ConfigError) as caught:
        compose(["--config-dir", str(tmp_path), "--config-name", "mine"], {})
    assert f"`envs` must be a section of keys: envs=null ({file})." in str(caught.value)
    (tmp_path / "config.yaml").write_text(compose([], {}).yaml.replace("\nenvs:", "\nenvs: null\nother:"))
    with pytest.raises(ConfigError, match="`envs` must be a section of keys"):
        load_run(tmp_path)


def test_a_null_in_place_of_a_choice_is_told_the_choices(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [train, _self_]\ntrainer: {reshard_after_forward: null}\n")
    key = "trainer.reshard_after_forward"
    with pytest.raises(ConfigError) as caught:
        compose(["--config-dir", str(tmp_path), "--config-name", "mine"], {})
    assert f"`{key}` must be one of auto, true, false: {key}=null ({file})." in str(caught.value)


def test_text_of_one_key_stays_as_a_file_has_it(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\nrun:\n  name: 1.10\nseq_len: 0x40\nslurm: {partition: 007}\n")
    argv = ["--config-dir", str(tmp_path), "--config-name", "mine"]
    cfg = compose(argv, {}).cfg
    assert (cfg.run.name, cfg.seq_len, cfg.slurm.partition) == ("1.10", 64, "007")
    assert compose([*argv, "run.name=2"], {}).cfg.run.name == "2"
