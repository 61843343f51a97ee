"""The synthesizer role: plays environments with a model and writes what is worth learning as supervised data.

    for job in what is not finished:
        play it with the model, keep its transcripts and rewards        rollouts/finished.jsonl
    choose among all finished rollouts, write rows                      data/train.parquet, data/metadata.json

With play=false only the last line. It is one asyncio loop. The model answers on servers of the run, on others, or at an endpoint.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping

from rlx.concurrent import first_failure
from rlx.config.load import load_run
from rlx.config.roots import SYNTHESIZE
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.envs.base import Local
from rlx.heartbeat import INTERVAL, Heartbeat
from rlx.paths import RunPaths, listed, write_text
from rlx.policy.base import PolicyError
from rlx.policy.chat import Chat
from rlx.rollout.failures import Failures
from rlx.rollout.models import Model, connected
from rlx.rollout.play import Hopeless, Job, NothingWorks, Player
from rlx.rollout.role import begin, end, load, run_until_stopped
from rlx.rollout.stalls import explainer
from rlx.rollout.synthesis import NothingKept, Synthesis
from rlx.rollout.tasks import keep_digests
from rlx.stacks import explain_with
from rlx.types import Rollout
from rlx.waiting import Preempted

log = logging.getLogger("rlx.synthesizer")


class Synthesizer:
    """Plays what a synthesis lacks."""

    def __init__(
        self, synthesis: Synthesis, config: SynthesizeRoot, paths: RunPaths, envs: Mapping[str, Local], model: Model, heartbeat: Heartbeat
    ) -> None:
        """`envs`: with the policies of `model`."""
        self.synthesis, self.config, self.paths, self.envs, self.model, self.heartbeat = synthesis, config, paths, envs, model, heartbeat
        self.failures = Failures()
        hopeless = Hopeless("synthesis", config.orchestrator.max_error_rate)
        hopeless.succeeded = {place[0] for place in synthesis.done}
        self.player = Player(
            envs,
            max_retries=config.orchestrator.max_retries,
            max_concurrent=config.concurrency,
            played=self._played,
            check=model.check,
            away=model.away,
            hopeless=hopeless,
        )
        self.phase = "starting"

    async def run(self) -> None:
        """Play to the end. Raises the first error of any part."""
        explain_with(explainer(self.player.waiting, self.envs, asyncio.get_running_loop()))
        try:
            await first_failure(self._play(), forever=[self._beat()])
        finally:
            self.failures.write(self.paths.failures)
            await asyncio.gather(*(env.close() for env in self.envs.values()))

    async def _play(self) -> None:
        (version,) = await self.model.versions([self.config.step or 0])
        self.phase = f"loading version {version} into the servers"
        await self.model.reach(version)
        what = (
            f"the model {self.config.model.name}" if self.config.weights_dir is None else f"version {version} of {self.config.weights_dir}"
        )
        self.synthesis.belong_to((await self.model.origin()).digest, what)
        self.phase = "playing"
        self.synthesis.begin(self.envs)
        await first_failure(self.player.play(self.synthesis.jobs(self.envs)), forever=[self.model.follow(self.player)])
        self._report()

    def _played(self, job: Job, rollouts: list[Rollout]) -> None:
        self.failures.add(rollouts)
        self.synthesis.take(job, rollouts)

    async def _beat(self) -> None:
        """Report the current phase and the progress."""
        while True:
            self._report()
            if listed(self.paths.preempt):
                raise Preempted
            await asyncio.sleep(INTERVAL)

    def _report(self) -> None:
        self.heartbeat.progress = self.synthesis.tokens
        if self.phase == "playing":
            self.heartbeat.beat(f"playing, rollouts {self.synthesis.played}/{self.synthesis.total}")
            write_text(self.paths.progress, json.dumps(self.synthesis.progress(self.player)))
        else:
            self.heartbeat.beat(self.phase)


async def play(
    synthesis: Synthesis, config: SynthesizeRoot, paths: RunPaths, envs: Mapping[str, Local], chat: Chat | None, heartbeat: Heartbeat
) -> None:
    """Connect to the model and play to the end. `chat`: None for an endpoint, which has its own."""
    async with connected(config, paths, envs, chat, heartbeat.beat) as model:
        await Synthesizer(synthesis, config, paths, envs, model, heartbeat).run()


def main() -> int:
    """The role as a process. Returns its exit code."""
    config, paths, heartbeat = begin("synthesizer", __doc__, lambda run_dir: load_run(run_dir, SYNTHESIZE))
    synthesis = Synthesis(config, paths)
    try:
        if config.play:
            envs, chat = load(config, paths, heartbeat, endpoint=bool(config.client.base_url))
            keep_digests(paths, envs, kept=paths.finished.stat().st_size > 0)
            if code := run_until_stopped(play(synthesis, config, paths, envs, chat, heartbeat), paths):
                return code
        heartbeat.beat("choosing")
        metadata = synthesis.write()
        log.info("%d rows of %d rollouts in %s", metadata["rows"], metadata["rollouts"]["kept"], metadata["file"])
        heartbeat.beat("done")
    finally:
        synthesis.finished.close()
    return 0


if __name__ == "__main__":
    end(main, "synthesizer", plain=(NothingKept, NothingWorks, PolicyError))
