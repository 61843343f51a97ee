"""The synthesizer role: plays environments with a model and writes what is worth learning as supervised data.

    for job in what is not finished:
        play it with the model, keep its transcripts and rewards        rollouts/finished.jsonl
    choose among all finished rollouts, write rows                      data/train.parquet, data/metadata.json

With play=false only the last line. It is one asyncio loop. The model answers on servers of the run, on others, or at an endpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import uvloop

from rlx.config.load import load_run
from rlx.config.roots import SYNTHESIZE
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.envs.base import Local
from rlx.envs.load import check_chat, load_environments, load_tokenizer, wait_loaded
from rlx.heartbeat import INTERVAL, Heartbeat
from rlx.paths import RunPaths
from rlx.policy.chat import Chat
from rlx.policy.transcript import TranscribedPolicy
from rlx.process import die_with_parent, full_disk, keep_event_loop_free, say_full_disk, set_cpu_threads
from rlx.rollout.answering import answering
from rlx.rollout.failures import Failures
from rlx.rollout.play import Job, Player
from rlx.rollout.stalls import explainer
from rlx.rollout.synthesis import NothingKept, Synthesis, keep_digests
from rlx.stacks import answer, explain_with
from rlx.types import Rollout
from rlx.waiting import first_failure

log = logging.getLogger("rlx.synthesizer")


class Synthesizer:
    """Plays what a synthesis lacks."""

    def __init__(
        self, synthesis: Synthesis, config: SynthesizeRoot, paths: RunPaths, envs: Mapping[str, Local], heartbeat: Heartbeat
    ) -> None:
        self.synthesis, self.config, self.paths, self.envs, self.heartbeat = synthesis, config, paths, envs, heartbeat
        self.failures = Failures()
        self.policies: dict[str, TranscribedPolicy] = {}

    async def run(self, chat: Chat | None) -> None:
        """Connect to the model and play to the end. `chat`: its chat format; None at an endpoint."""
        try:
            async with answering(self.config, self.paths, self.envs, chat, self.heartbeat.beat) as away:
                await self._play(away)
        finally:
            self.failures.write(self.paths.failures)
            await asyncio.gather(*(env.close() for env in self.envs.values()))

    async def _play(self, away: Callable[[], float]) -> None:
        for name, env in self.envs.items():
            assert env.policy is not None
            env.policy = self.policies[name] = TranscribedPolicy(env.policy)
        retries, room = self.config.orchestrator.max_retries, self.config.concurrency
        player = Player(self.envs, max_retries=retries, room=lambda: room, played=self._played, away=away)
        explain_with(explainer(player.waiting, self.envs, asyncio.get_running_loop()))
        await first_failure(player.play(self.synthesis.jobs(self.envs)), forever=[self._beat()])

    def _played(self, job: Job, rollouts: list[Rollout]) -> None:
        self.failures.add(rollouts)
        self.synthesis.take(job, rollouts, self.policies[job.env])

    async def _beat(self) -> None:
        """Report the progress in the heartbeat."""
        while True:
            self.heartbeat.beat(self.synthesis.phase)
            await asyncio.sleep(INTERVAL / 2)


def play(synthesis: Synthesis, config: SynthesizeRoot, paths: RunPaths, heartbeat: Heartbeat) -> int:
    """Load the environments and play what is not finished. Returns an exit code."""
    envs = load_environments(config, heartbeat.beat, paths.latest_logs)
    chat = None if config.client.base_url else load_tokenizer(config, paths, heartbeat.beat)
    wait_loaded(envs, heartbeat.beat)
    if chat is not None:
        check_chat(envs, config, chat)
    heartbeat.beat("reading the data sets")
    keep_digests(paths, envs)
    keep_event_loop_free()
    stopped: list[int] = []

    async def stoppable() -> None:
        running = asyncio.ensure_future(Synthesizer(synthesis, config, paths, envs, heartbeat).run(chat))

        def stop(number: int) -> None:
            stopped.append(number)
            running.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await running

    try:
        uvloop.run(stoppable())
    except asyncio.CancelledError:
        return 128 + stopped[0] if stopped else 1
    return 0


def main() -> int:
    """The role as a process. Returns its exit code."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    run_dir = parser.parse_args().run_dir
    config, paths = load_run(run_dir, SYNTHESIZE), RunPaths(run_dir)
    set_cpu_threads(config.hardware.cpu_threads)
    heartbeat = Heartbeat(paths, "synthesizer")
    answer(paths, "synthesizer")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os._exit(128 + number))  # before the loop runs there is nothing to clean up
    synthesis = Synthesis(config, paths)
    try:
        if config.play and (code := play(synthesis, config, paths, heartbeat)):
            return code
        heartbeat.beat("choosing")
        metadata = synthesis.write()
        log.info("%d rows of %d rollouts in %s", metadata["rows"], metadata["rollouts"]["kept"], metadata["file"])
        heartbeat.beat("done")
    except Exception as error:
        if full_disk(error, paths.root):
            raise
        if not isinstance(error, NothingKept):
            log.exception("the synthesizer failed")
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # last, so that the log ends with the error in one line
        return 1
    finally:
        synthesis.close()
    return 0


if __name__ == "__main__":
    code = say_full_disk(main)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a reward function that hangs in a thread must not keep the process alive
