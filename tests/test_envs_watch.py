"""When a worker is ended, and whom the verdict names."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from rlx.envs.marks import Mark
from rlx.envs.watch import GRACE, Worker

LIMIT = 20.0  # seconds for a rollout


def worker_in(*calls: Mark) -> Worker:
    """A worker with a request that computes nothing for rollouts in its event loop and has these calls in threads."""
    marks = SimpleNamespace(step=lambda: None, calls=lambda: list(calls))
    child: Any = SimpleNamespace(marks=marks)
    return Worker(child, 0, playing={7: None})  # type: ignore[dict-item]


def test_a_call_that_holds_the_interpreter_is_named_and_not_judged_before_its_time() -> None:
    """It began after the worker's last word. The worker is silent longer than the call has taken."""
    now = time.monotonic()
    call = Mark(7, 0, now, 99)
    worker = worker_in(call)
    worker.alive = now - 4.0
    assert worker.overdue(LIMIT, LIMIT, now + LIMIT - 2.0) is None, "the call may still end in time"
    verdict = worker.overdue(LIMIT, LIMIT, now + LIMIT + GRACE)
    assert verdict is not None
    assert (verdict.cause, verdict.mark) == ("timeout", call)


def test_time_in_which_the_looker_was_stopped_itself_is_not_a_workers_silence() -> None:
    worker = worker_in()
    worker.playing.clear()
    worker.cancelled.add(7)
    now = time.monotonic()
    for sign in (now, now + 3599.0):  # the second worker wrote something meanwhile
        worker.alive = sign
        worker.forgive(3600.0, now + 3600.0)
        assert worker.overdue(LIMIT, LIMIT, now + 3600.0 + LIMIT) is None
        assert worker.overdue(LIMIT, LIMIT, now + 3600.0 + LIMIT + GRACE + 0.1) is not None


def test_a_silent_worker_without_a_call_is_ended_and_nobody_is_named() -> None:
    worker = worker_in()
    worker.alive = time.monotonic()
    assert worker.overdue(LIMIT, LIMIT, worker.alive + LIMIT) is None
    verdict = worker.overdue(LIMIT, LIMIT, worker.alive + LIMIT + GRACE + 0.1)
    assert verdict is not None
    assert verdict.mark is None
