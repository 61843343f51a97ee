"""What a run has in memory is deleted when its processes have ended, whoever of them was killed. With toy processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from toy_run import FOREVER, Run, starting, toy

from rlx.weights import tmpfs

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    yield from starting(tmp_path)


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
    assert supervisor is not None
    pids = {"trainer": lambda: run.pid("trainer"), "supervisor": lambda: supervisor["pid"], "launcher": lambda: run.launcher.pid}
    os.kill(pids[killed](), signal.SIGKILL)
    run.launcher.wait(60)
    run.assert_nothing_left()
    run.until(lambda: run.status().state == "failed" and not list(shm.iterdir()))
    run.until(lambda: not list(run.paths.weights.iterdir()))
