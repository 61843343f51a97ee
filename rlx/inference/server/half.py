"""Half of a version: what a transfer that broke midway leaves in an engine, and for how long.

broke(why, 600)   the engine stays paused, and its time runs   →   over, if no other version comes: `end`
stop()            it stands still, because another version is on its way, or a trainer that lives makes the server wait
run()             none came: the time begins anew
whole()           another version was loaded
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Half:
    """Whether the model is partly old and partly new. Made and used on one running event loop."""

    def __init__(self, end: Callable[[str], None]) -> None:
        """`end` is called with the reason when the time is over."""
        self.partly = False
        self._end = end
        self._why = "a transfer broke"
        self._timer: asyncio.TimerHandle | None = None

    def broke(self, why: str, seconds: float) -> None:
        """`seconds`: for which a server may stay without a whole version."""
        self._why = why
        self.run(seconds)

    def run(self, seconds: float) -> None:
        if self.partly and self._timer is None:
            why = f"{self._why}. No version came in the next {seconds:g} s (weight_broadcast.timeout)"
            self._timer = asyncio.get_running_loop().call_later(seconds, self._end, why)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def whole(self) -> None:
        self.stop()
        self.partly = False
