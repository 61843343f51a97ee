"""Brings new policy versions from the trainer to the servers while rollouts are in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from rlx.paths import RunPaths
from rlx.types import WeightVersion
from rlx.waiting import Pause
from rlx.weights.publish import Subscriber

POLL = 0.01  # seconds between the first checks for a new version


class Updatable(Protocol):
    """Serves the policy: the fleet of inference servers, or a stand-in."""

    async def update(self, weights: WeightVersion, timeout: float) -> None:
        """Returns when every server has the version. Raises after `timeout` seconds."""
        ...


class WeightUpdates:
    """Updates every server to the newest version as soon as that version is complete."""

    def __init__(self, paths: RunPaths, fleet: Updatable, timeout: float, last: int, reached: Callable[[int], None]) -> None:
        """`timeout`: seconds for one update. `last`: the last version. `reached`: called with each version that all servers have."""
        self.published = Subscriber(paths)
        self.fleet = fleet
        self.timeout = timeout
        self.last = last
        self.reached = reached
        self.version = 0
        self.seconds = 0.0  # of the latest update

    async def reach(self, version: int) -> None:
        """Returns when the servers have `version` or a newer one. Raises the fleet's errors."""
        pause = Pause(POLL)
        while self.version < version:
            newest = self.published.latest()
            if newest is None or newest.version < version:
                await asyncio.sleep(pause.seconds())
                continue
            began = time.monotonic()
            await self.fleet.update(newest, self.timeout)
            self.seconds = time.monotonic() - began
            self.version = newest.version
            self.reached(newest.version)

    async def follow(self) -> None:
        """Runs until the last version is served. Raises the fleet's errors."""
        while self.version < self.last:
            await self.reach(self.version + 1)
