"""The synthesizer role: plays environments with a model and writes what is worth learning as supervised data.

    for job in what is not finished:
        play it with the model, keep its transcripts and rewards        rollouts/finished.jsonl
    choose among all finished rollouts, write rows                      data/train.parquet, data/metadata.json

With play=false only the last line. It is one asyncio loop. The model answers on servers of the run, on others, or at an endpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from rlx.config.load import load_run
from rlx.config.roots import SYNTHESIZE
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.envs.base import Local
from rlx.envs.load import check_chat, load_environments, load_tokenizer, wait_loaded
from rlx.heartbeat import INTERVAL, Heartbeat
from rlx.paths import RunPaths, write_text
from rlx.policy.base import PolicyError
from rlx.policy.chat import Chat
from rlx.policy.transcript import TranscribedPolicy
from rlx.process import die_with_parent, full_disk, keep_event_loop_free, say_full_disk, set_cpu_threads, sigterm_is_a_notice
from rlx.rollout.batch import RewardErrors
from rlx.rollout.failures import Failures
from rlx.rollout.models import Model, connect_endpoint, connect_servers
from rlx.rollout.play import Job, Player
from rlx.rollout.stalls import explainer
from rlx.rollout.synthesis import NothingKept, NothingWorks, Synthesis, keep_digests
from rlx.stacks import answer, explain_with
from rlx.types import Rollout
from rlx.waiting import LEFT, Preempted, first_failure

log = logging.getLogger("rlx.synthesizer")


class Synthesizer:
    """Plays what a synthesis lacks."""

    def __init__(
        self, synthesis: Synthesis, config: SynthesizeRoot, paths: RunPaths, envs: Mapping[str, Local], model: Model, heartbeat: Heartbeat
    ) -> None:
        """`envs`: with the policies of `model`."""
        self.synthesis, self.config, self.paths, self.envs, self.model, self.heartbeat = synthesis, config, paths, envs, model, heartbeat
        self.failures = Failures()
        self.reward_errors = RewardErrors(config.orchestrator.max_reward_errors)
        self.policies: dict[str, TranscribedPolicy] = {}
        for name, env in envs.items():
            assert env.policy is not None
            env.policy = self.policies[name] = TranscribedPolicy(env.policy)
        retries, room = config.orchestrator.max_retries, config.concurrency
        self.player = Player(envs, max_retries=retries, room=lambda: room, played=self._played, check=model.check, away=model.away)
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
        self.phase = "playing"
        self.synthesis.begin(self.envs)
        await self.player.play(self.synthesis.jobs(self.envs))
        self._report()

    def _played(self, job: Job, rollouts: list[Rollout]) -> None:
        self.failures.add(rollouts)
        self.synthesis.take(job, rollouts, self.policies[job.env])
        self.reward_errors.check([rollouts])

    async def _beat(self) -> None:
        """Report the current phase and the progress."""
        while True:
            self._report()
            if self.paths.preempt.exists():
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
    async with AsyncExitStack() as stack:
        model: Model
        if chat is None:
            model = await connect_endpoint(stack, config, envs, heartbeat.beat)
        else:
            model = await connect_servers(stack, config, paths, envs, chat, heartbeat.beat)
        await Synthesizer(synthesis, config, paths, envs, model, heartbeat).run()


def play_to_the_end(synthesis: Synthesis, config: SynthesizeRoot, paths: RunPaths, heartbeat: Heartbeat) -> int:
    """Load the environments and play what is not finished. Returns an exit code, or raises an error of any part."""
    envs = load_environments(config, heartbeat.beat, paths.latest_logs)
    chat = None if config.client.base_url else load_tokenizer(config, paths, heartbeat.beat)
    wait_loaded(envs, heartbeat.beat)
    if chat is not None:
        check_chat(envs, config, chat)
    heartbeat.beat("reading the data sets")
    keep_digests(paths, envs, kept=paths.finished.stat().st_size > 0)
    keep_event_loop_free()
    stopped: list[int] = []

    async def stoppable() -> None:
        running = asyncio.ensure_future(play(synthesis, config, paths, envs, chat, heartbeat))

        def stop(number: int) -> None:
            if number == signal.SIGTERM and sigterm_is_a_notice():
                paths.ask_to_give_way()
            else:
                stopped.append(number)
                running.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await running

    try:
        uvloop.run(stoppable())
    except asyncio.CancelledError:
        return 128 + stopped[0] if stopped else 1
    except Preempted:
        return LEFT
    return 0


def main() -> int:
    """The role as a process. Returns its exit code."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request
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
        if config.play and (code := play_to_the_end(synthesis, config, paths, heartbeat)):
            return code
        heartbeat.beat("choosing")
        metadata = synthesis.write()
        log.info("%d rows of %d rollouts in %s", metadata["rows"], metadata["rollouts"]["kept"], metadata["file"])
        heartbeat.beat("done")
    except Exception as error:
        if full_disk(error, paths.root):
            raise
        says_it_all = isinstance(error, (NothingKept, NothingWorks, PolicyError))
        if not says_it_all:
            log.exception("the synthesizer failed")
        # Last, so that the log ends with the error in one line.
        print(error if says_it_all else f"{type(error).__name__}: {error}", file=sys.stderr)
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
