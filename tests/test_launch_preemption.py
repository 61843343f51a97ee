"""Preemption of a local run: a file tells the roles, they leave with their own exit code, and the status records the result."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from toy_run import FOREVER, RUN_DIR, Run, starting, toy

BEGINS = """
    import sys, time
    from pathlib import Path
    from rlx.metrics import MetricsWriter
    MetricsWriter(Path(sys.argv[1]) / "metrics.jsonl", "orchestrator").write(0, {})
    print("working", flush=True)
"""
LEAVES = f"""{BEGINS}
    while not (Path(sys.argv[1]) / "preempt").exists(): time.sleep(0.02)
    print("checkpoint written", flush=True)
    sys.exit(75)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    yield from starting(tmp_path)


@pytest.mark.slow
def test_roles_that_leave_with_their_checkpoint_make_the_run_preempted(start: Callable[..., Run]) -> None:
    run = start([toy("inference", FOREVER, service=True), toy("orchestrator", LEAVES, arguments=(RUN_DIR,))])
    run.until_started()
    os.kill(run.status().supervisor["pid"], signal.SIGUSR2)  # type: ignore[index]
    status = run.wait()
    assert (status.state, status.exit_code, status.cause) == ("preempted", 75, None)
    assert "checkpoint written" in run.log("orchestrator")
    run.assert_nothing_left()


@pytest.mark.slow
def test_the_file_alone_asks_the_run_to_give_way(start: Callable[..., Run]) -> None:
    run = start([toy("inference", FOREVER, service=True), toy("orchestrator", LEAVES, arguments=(RUN_DIR,))])
    run.until_started()  # by now the supervisor has deleted the file of an earlier attempt
    run.paths.preempt.touch()
    status = run.wait()
    assert (status.state, status.exit_code, status.cause) == ("preempted", 75, None)


@pytest.mark.slow
def test_a_role_that_fails_while_it_leaves_is_a_failure(start: Callable[..., Run]) -> None:
    run = start([toy("trainer", LEAVES.replace("sys.exit(75)", "sys.exit(3)"), arguments=(RUN_DIR,))])
    run.until_started()
    os.kill(run.status().supervisor["pid"], signal.SIGUSR2)  # type: ignore[index]
    status = run.wait()
    assert (status.state, status.exit_code) == ("failed", 1)
    assert status.cause.returncode == 3


@pytest.mark.slow
def test_a_role_that_leaves_without_being_asked_is_a_failure(start: Callable[..., Run]) -> None:
    run = start([toy("trainer", "import sys; sys.exit(75)")])
    assert run.wait().state == "failed"


@pytest.mark.slow
def test_roles_that_do_not_leave_are_stopped_when_their_time_is_up(start: Callable[..., Run]) -> None:
    run = start([toy("trainer", f"{BEGINS}\n    time.sleep(600)", arguments=(RUN_DIR,))], preempt_grace=0.5)
    run.until_started()
    os.kill(run.status().supervisor["pid"], signal.SIGUSR2)  # type: ignore[index]
    status = run.wait()
    assert status.state == "preempted"
    assert "trainer did not leave in 0.5 s" in run.log("launcher")
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_run_that_has_begun_no_step_has_nothing_to_wait_for(start: Callable[..., Run]) -> None:
    run = start([toy("trainer", FOREVER)], preempt_grace=600)
    run.until_started()
    os.kill(run.status().supervisor["pid"], signal.SIGUSR2)  # type: ignore[index]
    status = run.wait()
    assert (status.state, status.exit_code) == ("preempted", 75)
    run.assert_nothing_left()
