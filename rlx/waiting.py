"""Waiting with a deadline, saying for what: every wait between processes goes through here. And for several tasks of one loop.

Knows time only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

SHARE = 0.01  # of what was waited so far is the pause before the next poll,
LONGEST = 0.1  # but at most so many seconds


class WaitTimeout(TimeoutError):
    """Something did not happen in time; the message says what and where to look."""


LEFT = 75  # exit code of a run that gave way to a preemption, and of the roles that left for it (EX_TEMPFAIL)


class Preempted(Exception):
    """The run is to give way: raised out of a wait by its `tick`, or where a role notices it."""


class Pause:
    """How long to sleep between two polls: 1 % of what was waited so far, so a wait is late by at most 1 %.

    At first `quick` seconds, from a wait of ten seconds on 100 ms.
    """

    def __init__(self, quick: float) -> None:
        self.quick, self.began = quick, time.monotonic()

    def seconds(self) -> float:
        """The next pause."""
        return max(self.quick, min(SHARE * (time.monotonic() - self.began), LONGEST))


def wait_for(
    probe: Callable[[], T | None],
    what: str,
    timeout: float,
    poll: float = 0.005,
    tick: Callable[[], None] | None = None,
    excused: Callable[[], bool] | None = None,
) -> T:
    """Call `probe` until it returns something true and return that.

    `timeout` and `poll` are seconds: `poll` at first, then the pause grows (`Pause`). `tick` is called at every poll (a heartbeat). While
    `excused` holds, the time does not count: it begins anew when that ends.
    Raises WaitTimeout naming `what`.
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


async def first_failure(*parts: Coroutine[Any, Any, None], forever: Sequence[Coroutine[Any, Any, None]] = ()) -> None:
    """Run all; return when `parts` are done, raise what the first of all to fail raises. Nothing is left running."""
    needed = {asyncio.ensure_future(part) for part in parts}
    tasks = needed | {asyncio.ensure_future(part) for part in forever}
    try:
        while needed:
            done, _ = await asyncio.wait(needed | {task for task in tasks if not task.done()}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            needed -= done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
