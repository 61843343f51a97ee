"""A sweep that is started again: with nothing left to do it is recognized without composing any of its runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlx.cli import main
from rlx.cli import sweep as cli
from rlx.paths import RunPaths
from rlx.runs.status import Status

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("known_environments")]


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


def test_an_array_that_slurm_would_refuse_is_refused_before_any_directory_is_made(
    started: Callable[..., list[int]], tmp_path: Path, capsys
) -> None:
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho 'MaxArraySize            = 1'\n")
    argv = ["train", "-m", "seed=1,2", "launcher=slurm", "slurm=dev", "hardware=cpu", f"run.dir={tmp_path / 'out'}"]
    assert main(argv) == 2
    assert "would have 2 jobs, and this cluster takes at most 1 (MaxArraySize" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("seed=*"))
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho 'MaxArraySize            = 2'\n")
    started()


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


@pytest.mark.parametrize(
    "kind", ["a group is a link", "a file is a link", "a folder that a defaults list names", "a new file before another"]
)
def test_a_change_is_seen_in_every_file_that_composition_reads(started: Callable[..., list[int]], tmp_path: Path, kind: str) -> None:
    conf, elsewhere = tmp_path / "conf", tmp_path / "elsewhere"
    for folder in (conf, elsewhere, conf / "common"):
        folder.mkdir()
    changing = elsewhere / "mine.yaml"
    match kind:
        case "a group is a link":
            (conf / "launcher").symlink_to(elsewhere)
        case "a file is a link":
            (conf / "launcher").mkdir()
            (conf / "launcher" / "mine.yaml").symlink_to(changing)
        case _:
            (conf / "launcher").mkdir()
            first = "defaults: [slurm, /common/more@_global_]\n" if "defaults" in kind else "defaults: [slurm]\n"
            (conf / "launcher" / "mine.yaml").write_text(first)
            changing = conf / "common" / "more.yaml" if "defaults" in kind else conf / "launcher" / "slurm.yaml"
    if "hides" not in kind:
        changing.write_text("launcher: {grace: 6}\n" if "defaults" in kind else "name: slurm\ngrace: 6\n")
    argv = ["--config-dir", str(conf), "launcher=mine"]
    started(*argv)
    assert started(*argv) == [2]
    changing.write_text("launcher: {grace: 7}\n" if "defaults" in kind else "name: slurm\ngrace: 7\n")
    assert started(*argv) == [2, 2]


def test_what_lies_beside_the_configuration_neither_ends_a_sweep_nor_counts(started: Callable[..., list[int]], tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "a.yaml").mkdir(parents=True)
    (model / ".#b.yaml").symlink_to("me@host.1234:5678")  # Emacs's lock
    (model / "around").symlink_to(model)
    (tmp_path / "of_another_program.yaml").write_text("defaults: 5\n")
    packages = tmp_path / ".venv" / "lib"
    packages.mkdir(parents=True)
    for number in range(300):
        (packages / f"{number}.yaml").touch()
    started("--config-dir", ".")
    (packages / "0.yaml").write_text("a: 1\n")
    assert (tmp_path / "out" / "seed=1" / "config.yaml").is_file(), "in the directory of the configuration, too"
    assert started("--config-dir", ".") == [2]


def test_what_cannot_be_read_is_composed_again(started: Callable[..., list[int]], tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    unread = tmp_path / "conf" / "model" / "theirs.yaml"
    unread.write_text("name: x\n")
    unread.chmod(0)
    if os.access(unread, os.R_OK):  # of root, who may read all: a name that leads nowhere but is no link
        unread.unlink()
        (tmp_path / "conf" / "model" / "loop.yaml").write_text("defaults: ['${which}/x']\n")
    argv = ["--config-dir", str(tmp_path / "conf")]
    assert started(*argv) == [2]
    assert started(*argv) == [2, 2]
