"""The servers of a run as its orchestrator has them: a fleet, and a sampler that is told what the fleet has reached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlx.inference.endpoints import Endpoint
from rlx.inference.fleet import LOOK, Fleet
from rlx.inference.protocol import RESTART
from rlx.inference.sampler import Sampler
from rlx.inference.telling import AT_ONCE, Manner
from rlx.types import Turn
from rlx.weights.subscribe import version_at


class Servers:
    """An async context manager."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        request_timeout: float = 120,
        restart_timeout: float = RESTART,
        manner: Manner = AT_ONCE,
        look: float = LOOK,
        **fleet: Any,
    ) -> None:
        self.fleet = Fleet(endpoints, restart_timeout, manner, look, **fleet)
        self.sampler = Sampler(endpoints, request_timeout, restart_timeout, restore=self.fleet.restore, run=fleet.get("run", ""))
        self.fleet.on_change = self.sampler.use

    async def __aenter__(self) -> Servers:
        await self.fleet.__aenter__()
        await self.sampler.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.sampler.__aexit__(*exception)
        await self.fleet.__aexit__(*exception)

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any], request_id: str, affinity: int = 0) -> Turn:
        return await self.sampler.generate(prompt_ids, sampling, request_id, affinity)

    async def update(self, folder: Path, version: int, timeout: float = 600.0) -> None:
        await self.fleet.update(version_at(folder, version), timeout)
        self.sampler.version = version
