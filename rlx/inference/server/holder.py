"""Which run may change a server's weights: one at a time. A second one would play with weights that are not its own, unnoticed if the
numbers of their versions are equal."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlx.inference.protocol import HELD


class Holder:
    """The run that claimed the server last. It must be heard from every `HELD` seconds, else the server is free."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.run = ""  # "" while the server is free
        self._now = now
        self._heard = 0.0

    def claim(self, run: str, *, keep: bool = True) -> str | None:
        """`run` is here: it claims the server if that is free, and leaves it without `keep`. "": whoever says no name; it claims nothing.

        Returns None, or why this run may not change the weights.
        """
        silent = self._now() - self._heard
        if self.run and run != self.run and silent < HELD:
            return (
                f"the weights belong to the run {self.run}, which was heard from {silent:.0f} s ago. "
                f"Stop that run, or name other servers (inference.base_url). A server is free {HELD:g} s after its run is gone"
            )
        self.run, self._heard = run if keep else "", self._now()
        return None
