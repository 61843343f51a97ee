"""What the orchestrator's heartbeat says while it waits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from policy_stand_in import load, tiny_chat
from test_orchestrator_run import StandInServers, StandInTrainer, config_of

from rlx.concurrent import first_failure
from rlx.envs.load import give_policy
from rlx.heartbeat import Heartbeat, read_heartbeats
from rlx.paths import RunPaths
from rlx.roles.orchestrator import Orchestrator
from rlx.trace import Turn


def test_the_heartbeat_says_who_waits_for_what(tmp_path: Path) -> None:
    said = asyncio.Event()

    class Waiting(StandInServers):
        async def generate(self, *asked: Any) -> Turn:
            await said.wait()
            return await super().generate(*asked)

    class Slow(StandInTrainer):
        async def run(self) -> None:
            for phase in ("rollouts 0/8", "waiting for weights 1"):
                while read_heartbeats(self.paths).get("orchestrator", {}).get("phase") != phase:
                    await asyncio.sleep(0.05)
                said.set()
            await super().run()

    config = config_of(max_steps=2)
    paths = RunPaths(tmp_path)
    envs = {"e": load("rlx_reverse_text", sampling={"max_tokens": 12, "temperature": 1.0})}
    served: Any = Waiting()
    give_policy(envs, config, tiny_chat(), served)

    async def main() -> None:
        orchestrator = Orchestrator(config, paths, envs, served, served, Heartbeat(paths, "orchestrator"))
        await asyncio.wait_for(first_failure(orchestrator.run(), Slow(paths, config).run()), 120)

    asyncio.run(main())
