"""A sweep that is started again: with nothing left to do it is recognized without composing any of its runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlx.cli import main
from rlx.cli import sweep as cli
from rlx.paths import RunPaths
from rlx.runs.status import Status

pytestmark = pytest.mark.usefixtures("known_environments")


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """`started(*argv)` starts a sweep of two runs on stand-ins for SLURM; returns how many runs were composed each time so far."""
    composed: list[int] = []
    checked = cli.checked
    monkeypatch.setattr(cli, "checked", lambda lines, *rest: composed.append(len(lines)) or checked(lines, *rest))
    (tmp_path / "bin").mkdir()
    states(tmp_path, "12_0|RUNNING", "12_1|PENDING")
    for name in ("sbatch", "srun", "scontrol"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\necho Submitted batch job 12\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)

    def start(*argv: str) -> list[int]:
        assert main(["train", "-m", "seed=1,2", "launcher=slurm", "slurm=dev", "hardware=cpu", f"run.dir={tmp_path / 'out'}", *argv]) == 0
        return composed

    return start


def states(folder: Path, *lines: str) -> None:
    text = "\n".join(lines)
    (folder / "bin" / "squeue").write_text(f"#!/bin/sh\ncat <<'X'\n{text}\nX\n")
    (folder / "bin" / "squeue").chmod(0o755)


def finish(paths: RunPaths, state: str = "completed", steps: int = 100) -> None:
    status = Status(max_steps=steps, step=steps)
    status.finish(state)
    status.write(paths)


def test_a_sweep_with_nothing_left_is_not_composed_again(started: Callable[..., list[int]], tmp_path: Path, capsys) -> None:
    assert started() == [2]
    capsys.readouterr()
    assert started() == [2]
    out = tmp_path / "out"
    assert capsys.readouterr().out == (
        f"2 runs in {out} (2 already queued or running)\n  12_0       {out / 'seed=1'}\n  12_1       {out / 'seed=2'}\n"
    )
    for seed in (1, 2):
        finish(RunPaths(out / f"seed={seed}"))
    assert started() == [2]
    assert "(2 already completed)" in capsys.readouterr().out
    assert started("max_steps=200") == [2, 2], "another command line"


@pytest.mark.parametrize("change", ["a job failed", "a run was extended", "a variable", "a file", "the record is gone", "clean"])
def test_a_sweep_is_composed_if_anything_that_it_depends_on_has_changed(
    started: Callable[..., list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    conf = tmp_path / "conf"
    (conf / "model").mkdir(parents=True)
    argv = ["--config-dir", str(conf), *(["clean=true"] if change == "clean" else [])]
    if change == "clean":
        states(tmp_path)
    started(*argv)
    match change:
        case "a job failed":
            states(tmp_path, "12_0|FAILED", "12_1|RUNNING")
            finish(RunPaths(tmp_path / "out" / "seed=1"), "failed")
        case "a run was extended":
            config = tmp_path / "out" / "seed=1" / "config.yaml"
            config.write_text(config.read_text().replace("max_steps: ", "max_steps: 1"))
        case "a variable":
            monkeypatch.setenv("RLX_LAUNCHER__GRACE", "6")
        case "a file":
            (conf / "model" / "mine.yaml").write_text("# @package _global_\nmodel: {name: x}\n")
        case "the record is gone":
            (tmp_path / "out" / ".sweep.json").unlink()
    assert len(started(*argv)) == 2
