"""Brings new policy versions from the trainer to the servers while rollouts are in flight."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable

from rlx.inference.fleet import Fleet
from rlx.inference.wire import WeightsGone
from rlx.paths import RunPaths
from rlx.polling import Pause
from rlx.rollout.evaluate import Evaluations
from rlx.weights.subscribe import Subscriber

POLL_SECONDS = 0.01  # seconds between the first checks for a new version


class WeightUpdates:
    """Updates every server to the newest version as soon as that version is complete and the servers may leave theirs."""

    def __init__(
        self, paths: RunPaths, fleet: Fleet, timeout: float, last: int, reached: Callable[[int], None], stops: Evaluations
    ) -> None:
        """`timeout`: seconds for one update. `last`: the last version. `reached`: called with each version that all servers have.

        `stops`: keep the servers at some versions for a while."""
        self.paths, self.stops = paths, stops
        self.published = Subscriber(paths)
        self.fleet = fleet
        self.timeout = timeout
        self.last = last
        self.reached = reached
        self.version = 0
        self.seconds = 0.0  # of the latest update

    async def reach(self, version: int) -> None:
        """Returns when the servers have `version` or a newer one. Raises the fleet's errors."""
        pause, deadline, offered = Pause(POLL_SECONDS), math.inf, -1
        while self.version < version:
            newest = self.published.latest()
            if newest is None or newest.version < version:
                await asyncio.sleep(pause.seconds())
                continue
            stop = self.stops.next_stop(self.version, newest.version)
            await self.stops.leave(stop)
            newest = self.published.latest() or newest
            if self.stops.next_stop(self.version, newest.version) != stop:
                continue  # a newer one has appeared meanwhile, which may be one to wait for
            target = self.published.at(stop)
            if target is None:  # not written yet, or the trainer has just offered another
                if stop < newest.version:  # the newest one may have gone from memory to files since it was seen
                    self.published.check_offered(stop)
                await asyncio.sleep(pause.seconds())
                continue
            began = time.monotonic()
            try:
                await self.fleet.update(target, self.timeout)
            except WeightsGone:  # the trainer has a newer version now, or a transfer broke
                newest = self.published.latest() or newest
                if newest.version > offered:  # the trainer gets on, however long its steps take
                    offered, deadline = newest.version, time.monotonic() + self.timeout
                elif time.monotonic() > deadline:
                    raise
                await asyncio.sleep(pause.seconds())
                continue
            self.seconds = time.monotonic() - began
            span = {"version": target.version, "began": time.time() - self.seconds, "seconds": self.seconds}
            with contextlib.suppress(OSError), self.paths.updates.open("a") as file:  # a full disk ends a run elsewhere
                file.write(json.dumps(span) + "\n")
            self.version = target.version
            self.reached(target.version)

    async def follow(self) -> None:
        """Runs until the last version is served and no longer needed. Raises the fleet's errors."""
        while self.version < self.last:
            await self.reach(self.version + 1)
        await self.stops.finish()
