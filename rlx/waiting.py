"""Waiting with a deadline, saying for what. Every wait between processes goes through here.

Knows time only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class WaitTimeout(TimeoutError):
    """Something did not happen in time; the message says what and where to look."""


def wait_for(probe: Callable[[], T | None], what: str, timeout: float, poll: float = 0.005, tick: Callable[[], None] | None = None) -> T:
    """Call `probe` until it returns something true and return that.

    `timeout` and `poll` are seconds; `tick` is called at every poll (a heartbeat).
    Raises WaitTimeout naming `what`.
    """
    deadline = time.monotonic() + timeout
    while True:
        found = probe()
        if found:
            return found
        if time.monotonic() > deadline:
            raise WaitTimeout(f"waited {timeout:.0f} s for {what}")
        if tick is not None:
            tick()
        time.sleep(poll)
