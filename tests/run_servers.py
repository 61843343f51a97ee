"""The servers of a run as its orchestrator has them: a fleet, and a sampler that uses the servers that the fleet found ready."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlx.inference.endpoints import Endpoint
from rlx.inference.fleet import Fleet
from rlx.inference.sampler import RESTART, Sampler
from rlx.trace import Turn
from rlx.weights.subscribe import version_at

RUN = "0a1b2c3d"
SAMPLING = {"max_tokens": 3}


class Servers:
    """An async context manager. It is made inside an event loop. Call `ready` before anything else."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        request_timeout: float = 120,
        restart_timeout: float = RESTART,
        adopt: bool = False,
        run: str = RUN,
        **fleet: Any,
    ) -> None:
        self.fleet = Fleet(endpoints, restart_timeout, run=run, adopt=adopt, **fleet)
        self.sampler = Sampler(endpoints, request_timeout, restart_timeout, restore=self.fleet.restore, run=None if adopt else run)
        self.fleet.on_change = self.sampler.change
        self._conversations = itertools.count(1)

    async def __aenter__(self) -> Servers:
        await self.fleet.__aenter__()
        await self.sampler.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.sampler.__aexit__(*exception)
        await self.fleet.__aexit__(*exception)

    async def ready(self, timeout: float = 300) -> Servers:
        """Wait for the servers and make them the run's. The sampler then begins with the version that they have."""
        await self.fleet.wait_ready(timeout)
        return self

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any], request_id: str, affinity: int = 0) -> Turn:
        return await self.sampler.generate(prompt_ids, sampling, request_id, affinity)

    def many(self, count: int = 8) -> list[asyncio.Task[Turn]]:
        """Requests of so many conversations, other ones at each call."""
        asked = (self.generate([1, 2], SAMPLING, "a", next(self._conversations)) for _ in range(count))
        return [asyncio.create_task(one) for one in asked]

    async def update(self, folder: Path, version: int, timeout: float = 600.0) -> None:
        await self.fleet.update(version_at(folder, version), timeout)
