"""A broken file of the user's is a mistake in the configuration; tests/test_config_errors.py has the texts of most."""

from __future__ import annotations

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
