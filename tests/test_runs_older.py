"""Run directories that an older version made: they are listed, watched, compared and resumed like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from launch_configs import config

from rlx.cli import main
from rlx.config.load import load_command
from rlx.config.schema import Config, RunConfig
from rlx.paths import RunPaths
from rlx.plan.make import make_plan
from rlx.runs.claim import create
from rlx.runs.status import Status

LATER = ("hf_home", "offline", "prefix")  # keys of `slurm` that the older version did not have


def older(root: Path, container: str) -> Config:
    """A run whose `slurm.container` was a list of words; its configuration."""
    cfg = replace(config("cpu"), run=RunConfig(name=root.name, dir=str(root)))
    paths, lock = create(cfg, [], make_plan(cfg, root))
    lock.close()
    lines = [line for line in paths.config.read_text().splitlines() if not line.strip().startswith(tuple(f"{key}:" for key in LATER))]
    text = "\n".join(lines).replace("  container: null", f"  container: {container}")
    assert container in text
    paths.config.write_text(text + "\n")
    status = Status(max_steps=3, step=3)
    status.finish("completed")
    status.write(paths)
    return cfg


def test_a_run_of_an_older_version_is_listed_watched_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = older(tmp_path / "run", "[]")
    assert load_command(tmp_path / "run") == cfg
    assert main(["runs", str(tmp_path)]) == 0
    assert "completed" in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "run")]) == 0
    assert main(["diff", str(tmp_path / "run"), str(tmp_path / "run")]) == 0
    paths, lock = create(replace(cfg, resume="latest"), [], make_plan(cfg, tmp_path / "run"))
    lock.close()
    assert "container: null" in RunPaths(paths.root).config.read_text()


def test_keys_that_are_gone_are_not_read(tmp_path: Path) -> None:
    cfg = older(tmp_path / "run", "[]")
    file = RunPaths(tmp_path / "run").config
    text = file.read_text().replace("weight_broadcast:\n", "weight_broadcast:\n  keep_kv: false\n  drain_tokens: 16\n  in_turn: true\n")
    text = text.replace("hardware:\n", "hardware:\n  data_parallel: 1\n  data_parallel_local: null\n")
    file.write_text(text.replace("  type: filesystem", "  type: gloo"))
    assert all(word in file.read_text() for word in ("keep_kv", "data_parallel_local", "gloo"))
    assert load_command(tmp_path / "run") == cfg


def test_the_words_of_an_older_run_are_the_prefix_now(tmp_path: Path) -> None:
    older(tmp_path / "run", "[apptainer, exec, a.sif]")
    slurm = load_command(tmp_path / "run").slurm
    assert (slurm.prefix, slurm.container) == (["apptainer", "exec", "a.sif"], None)
