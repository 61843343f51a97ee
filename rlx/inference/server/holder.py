"""Which run may change a server's weights: one at a time. A second one would play with weights that are not its own, unnoticed if the
numbers of their versions are equal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlx.inference.protocol import HELD, LEFT


class Holder:
    """The run that claimed the server last. It must be heard from every `HELD` seconds, else the server is free.

    The connections of a killed run close at once. A run that had some and has none is free after `LEFT` seconds of silence: a living
    one claims again every few seconds, even while its connection is broken.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.run = ""  # "" while the server is free
        self._now = now
        self._heard = 0.0
        self._open: Counter[str] = Counter()  # connections by run
        self._had_one = False  # the run that holds the server had a connection

    @contextmanager
    def connection(self, run: str) -> Iterator[None]:
        """An open connection of `run`, for as long as it is open."""
        self._open[run] += 1
        self._had_one |= run == self.run
        try:
            yield
        finally:
            self._open[run] -= 1

    def claim(self, run: str, *, keep: bool = True) -> str | None:
        """`run` is here: it claims the server if that is free, and leaves it without `keep`. "": a run without a name; it claims nothing.

        Returns None, or why this run may not change the weights.
        """
        silent = self._now() - self._heard
        limit = LEFT if self._had_one and not self._open[self.run] else HELD
        if self.run and run != self.run and silent < limit:
            return (
                f"the weights belong to the run {self.run}, which was heard from {silent:.0f} s ago. "
                f"Stop that run, or name other servers (inference.base_url). A server is free {limit:g} s after its run is gone"
            )
        if run != self.run:
            self._had_one = self._open[run] > 0
        self.run, self._heard = run if keep else "", self._now()
        return None
