"""Waiting with a deadline: every wait between processes uses `wait_for`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SHARE = 0.01  # pause before the next poll, as a share of the time waited so far
MAX_PAUSE_SECONDS = 0.1  # longest pause, in seconds


class WaitTimeout(TimeoutError):
    """Something did not happen in time; the message says what and where to look."""


LEFT = 75  # exit code of a preempted run, and of the roles that left because of the preemption (EX_TEMPFAIL)


class Preempted(Exception):
    """The run must write a checkpoint and leave. Raised from a wait by its `tick`, or wherever a role notices the preemption."""


class Pause:
    """How long to sleep between two polls: 1 % of the time waited so far, so a wait ends at most 1 % late.

    The pause is at least `quick` seconds and at most 100 ms, which it reaches after ten seconds.
    """

    def __init__(self, quick: float) -> None:
        self.quick, self.began = quick, time.monotonic()

    def seconds(self) -> float:
        """The next pause."""
        return max(self.quick, min(SHARE * (time.monotonic() - self.began), MAX_PAUSE_SECONDS))


def wait_for(
    probe: Callable[[], T | None],
    what: str,
    timeout: float,
    poll: float = 0.005,
    tick: Callable[[], None] | None = None,
    excused: Callable[[], bool] | None = None,
) -> T:
    """Call `probe` until it returns a true value, and return that value.

    `timeout` and `poll` are seconds; the pause starts at `poll` and grows (`Pause`). `tick` is called at every poll (a heartbeat).
    The timeout restarts whenever `excused` returns true. Raises WaitTimeout, which names `what`.
    """
    deadline, pause = time.monotonic() + timeout, Pause(poll)
    while True:
        found = probe()
        if found:
            return found
        if excused is not None and excused():
            deadline = time.monotonic() + timeout
        if time.monotonic() > deadline:
            raise WaitTimeout(f"waited {timeout:.0f} s for {what}")
        if tick is not None:
            tick()
        time.sleep(pause.seconds())
