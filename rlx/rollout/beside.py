"""Evaluations beside supervised training: brings the versions that are due to the servers, one after the other, and evaluates each.

    the trainer publishes version v  →  the servers load it and compare its checksums  →  its evaluation  →  its record  →  the next

The trainer never waits for it: it keeps the weights of versions that have no record yet (`rlx.checkpoints.best.not_evaluated`). A killed
run evaluates what is missing, after its checkpoint is loaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from rlx.checkpoints import folders
from rlx.concurrent import at_most, first_failure
from rlx.config.schema import SftRoot
from rlx.envs.base import Local
from rlx.envs.pools import away
from rlx.heartbeat import INTERVAL, Heartbeat
from rlx.inference.fleet import Fleet
from rlx.inference.sampler import Sampler
from rlx.paths import RunPaths, listed
from rlx.policy.chat import Chat
from rlx.rollout.evaluate import Evaluations
from rlx.rollout.models import connect_servers
from rlx.rollout.stalls import explainer
from rlx.rollout.updates import WeightUpdates
from rlx.stacks import explain_with
from rlx.waiting import Preempted

log = logging.getLogger("rlx.evaluator")


class Beside:
    """The main loop."""

    def __init__(
        self, config: SftRoot, paths: RunPaths, envs: Mapping[str, Local], fleet: Fleet, sampler: Sampler, heartbeat: Heartbeat
    ) -> None:
        self.config, self.paths, self.envs, self.heartbeat = config, paths, envs, heartbeat
        self.fleet, self.sampler = fleet, sampler
        start = folders.read_start(paths)
        first = start.step if start else 0
        self.evaluations = Evaluations(
            config, paths, envs, first, away=lambda: away(sampler, envs), oldest=forked_at(config.resume), servers=lambda: fleet.size
        )
        self.updates = WeightUpdates(paths, fleet, config.weight_broadcast.timeout, config.max_steps, self._reached, stops=self.evaluations)

    def _reached(self, version: int) -> None:
        self.sampler.version = version
        self.evaluations.begin(version)

    async def run(self) -> None:
        """Evaluate all versions that are due, up to the last. Raises the first error of any part, and Preempted."""
        explain_with(explainer(self.evaluations.waiting, self.envs, asyncio.get_running_loop()))
        try:
            await first_failure(self._work(), forever=[self._beat(), self.fleet.held()])
        finally:
            await at_most(None, self.evaluations.close())
            await at_most(None, *(env.close() for env in self.envs.values()))

    async def _work(self) -> None:
        self.evaluations.begin(0)
        await self.evaluations.leave()  # its record is not to wait for the next version, which may be hours away
        while self.updates.version < self.config.max_steps:
            await self.updates.reach(self.evaluations.next_stop(self.updates.version, self.config.max_steps))
            await self.evaluations.leave()
        protect = [step for step, _ in folders.being_written(self.paths)]  # before the others: one may be completed meanwhile
        protect += folders.steps(self.paths)
        await asyncio.to_thread(self.updates.published.prune, self.config.versions_kept, protect)  # as the trainer does

    async def _beat(self) -> None:
        """Report the phase; leave when the run is preempted."""
        while not listed(self.paths.preempt):
            wanted = self.evaluations.next_stop(self.updates.version, self.config.max_steps)
            self.heartbeat.progress = self.evaluations.played
            self.heartbeat.beat(self.evaluations.instead_of(f"waiting for weights {wanted}"), step=self.updates.version)
            await asyncio.sleep(INTERVAL / 2)
        raise Preempted


def forked_at(resume: str | None) -> int:
    """The step of the checkpoint from which this run was forked, 0 for other runs. The other run has evaluated its earlier versions.

    `resume`: as settled, so a fork has the path of the other run's checkpoint, `/run/checkpoints/step_4`, at every later attempt too.
    """
    name = Path(resume or "").name
    return int(name.removeprefix("step_")) if name.startswith("step_") else 0


async def evaluate_beside(config: SftRoot, paths: RunPaths, envs: Mapping[str, Local], chat: Chat, heartbeat: Heartbeat) -> None:
    """Connect to the run's servers and evaluate to the end of the run."""
    async with connect_servers(config, paths, envs, chat, heartbeat.beat) as (fleet, sampler):
        await Beside(config, paths, envs, fleet, sampler, heartbeat).run()
