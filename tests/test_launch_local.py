"""What a launch on this machine gives to its processes, and what it removes at the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from toy_run import FOREVER, Run, starting, toy

from rlx.paths import RunPaths
from rlx.runs.jobs import job_of, note_job
from rlx.weights import tmpfs

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    yield from starting(tmp_path)


@pytest.mark.parametrize(("visible", "seen"), [(None, "1"), ("5,GPU-7f", "GPU-7f")])
def test_a_process_sees_its_gpus_of_those_that_the_launcher_sees(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: str
) -> None:
    """submitit starts its jobs with an empty CUDA_VISIBLE_DEVICES."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run = start([replace(toy("trainer", "import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])"), gpus=(1,))])
    status = run.wait()
    assert (status.state, status.cause) == ("completed", None)
    assert run.log("trainer") == f"{seen}\n"


def test_a_run_that_goes_on_here_forgets_the_job_of_its_earlier_attempt(start: Callable[..., Run], tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    note_job(paths, "12")
    run = start([toy("trainer", "print('steps')")])
    assert run.wait().state == "completed"
    assert job_of(paths) is None


def begun(run: Run, shm: Path) -> None:
    """Let the run have a version in memory."""
    shm.mkdir()
    run.until_started()
    own = tmpfs.make(run.paths.weights, shm, 0)
    run.paths.weights_of(1).symlink_to(tmpfs.fresh(run.paths.weights, "step_1"))
    assert list(shm.iterdir()) == [own]


@pytest.mark.parametrize("killed", ["trainer", "supervisor", "launcher"])
def test_whoever_is_killed_nothing_stays_in_memory(start: Callable[..., Run], tmp_path: Path, killed: str) -> None:
    run, shm = start([toy("inference", FOREVER, service=True), toy("trainer", FOREVER)]), tmp_path / "shm"
    begun(run, shm)
    supervisor = run.status().supervisor
    pids = {"trainer": lambda: run.pid("trainer"), "supervisor": lambda: supervisor["pid"], "launcher": lambda: run.launcher.pid}
    os.kill(pids[killed](), signal.SIGKILL)
    run.launcher.wait(60)
    run.assert_nothing_left()
    run.until(lambda: run.status().state == "failed" and not list(shm.iterdir()))
    run.until(lambda: not list(run.paths.weights.iterdir()))
