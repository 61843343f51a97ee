"""The synthesizer role: plays environments with a model and writes what is worth learning as supervised data.

    for job in what is not finished:
        play it with the model, keep its transcripts and rewards        rollouts/finished.jsonl
    choose among all finished rollouts, write rows                      data/train.jsonl, data/metadata.json

With play=false only the last line. It is one asyncio loop. The model answers on servers of the run, on others, or at an endpoint.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping

from rlx.aio import first_failure
from rlx.config.load import load_run
from rlx.config.roots import SYNTHESIZE
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.envs.base import Local
from rlx.heartbeat import INTERVAL, Heartbeat
from rlx.paths import RunPaths, listed, write_text
from rlx.policy.base import PolicyError
from rlx.policy.chat import Chat
from rlx.polling import Preempted
from rlx.rollout.failures import ErrorRate, Failures, RolloutsFailed
from rlx.rollout.policy_backend import Backend, connected
from rlx.rollout.role import begin, end, load, run_until_stopped
from rlx.rollout.rollout_runner import Job, RolloutRunner
from rlx.rollout.rollout_set import RolloutSet
from rlx.rollout.sft_export import NothingKept, export, wanted_of
from rlx.rollout.stalls import explainer
from rlx.rollout.task_sampler import keep_digests
from rlx.stack_dump import explain_with
from rlx.types import Rollout

log = logging.getLogger("rlx.synthesizer")


class Synthesizer:
    """Samples the rollouts that a synthesis lacks."""

    def __init__(self, config: SynthesizeRoot, paths: RunPaths, envs: Mapping[str, Local], model: Backend, heartbeat: Heartbeat) -> None:
        """`envs`: with the policies of `model`."""
        self.config, self.paths, self.envs, self.model, self.heartbeat = config, paths, envs, model, heartbeat
        self.failures, self.errors = Failures(), ErrorRate(config.orchestrator.max_error_rate)
        self.rollouts: RolloutSet | None = None
        self.runner = RolloutRunner(
            envs,
            max_retries=config.orchestrator.max_retries,
            max_concurrent=config.concurrency,
            on_end=self._on_end,
            check=model.check,
            away=model.away,
            errors=self.errors,
        )
        self.phase = "starting"

    async def run(self) -> None:
        """Play to the end. Raises the first error of any part."""
        explain_with(explainer(self.runner.waiting, self.envs, asyncio.get_running_loop()))
        try:
            await first_failure(self._play(), forever=[self._beat()])
        finally:
            self.failures.write(self.paths.failures)
            await asyncio.gather(*(env.close() for env in self.envs.values()))

    async def _play(self) -> None:
        (version,) = await self.model.versions([self.config.step or 0])
        self.phase = f"loading version {version} into the servers"
        await self.model.reach(version)
        digest = (await self.model.info()).digest
        wanted = wanted_of(self.config)
        self.rollouts = RolloutSet(self.envs, wanted, version=version, file=self.paths.finished, digest=digest)
        self.rollouts.count_finished(self.errors)
        await first_failure(self.runner.run(self.rollouts.jobs()), forever=[self.model.follow(self.runner)])
        self._report()

    def _on_end(self, job: Job, rollouts: list[Rollout]) -> None:
        assert self.rollouts is not None
        self.failures.add(rollouts)
        self.rollouts.add(job, rollouts)

    async def _beat(self) -> None:
        """Report the current phase and the progress."""
        while True:
            self._report()
            if listed(self.paths.preempt):
                raise Preempted
            await asyncio.sleep(INTERVAL)

    def _report(self) -> None:
        if self.rollouts is None:
            self.heartbeat.beat(self.phase)
            return
        self.heartbeat.progress = self.rollouts.tokens
        self.heartbeat.beat(f"playing, rollouts {len(self.rollouts.outcomes)}/{self.rollouts.total}")
        write_text(self.paths.progress, json.dumps(self.rollouts.progress("playing", self.runner)))


async def play(config: SynthesizeRoot, paths: RunPaths, envs: Mapping[str, Local], chat: Chat | None, heartbeat: Heartbeat) -> None:
    """Connect to the model and play to the end. `chat`: None for an endpoint, which has its own."""
    async with connected(config, paths, envs, chat, heartbeat.beat) as model:
        await Synthesizer(config, paths, envs, model, heartbeat).run()


def main() -> int:
    """The role as a process. Returns its exit code."""
    config, paths, heartbeat = begin("synthesizer", __doc__, lambda run_dir: load_run(run_dir, SYNTHESIZE))
    if config.play:
        envs, chat = load(config, paths, heartbeat, endpoint=bool(config.client.base_url))
        keep_digests(paths, envs, kept=paths.finished.is_file() and paths.finished.stat().st_size > 0)
        if code := run_until_stopped(play(config, paths, envs, chat, heartbeat), paths):
            return code
    heartbeat.beat("choosing")
    metadata = export(config, paths)
    log.info("%d rows of %d rollouts in %s", metadata["rows"], metadata["rollouts"]["kept"], metadata["file"])
    heartbeat.beat("done")
    return 0


if __name__ == "__main__":
    end(main, "synthesizer", plain=(NothingKept, RolloutsFailed, PolicyError))
