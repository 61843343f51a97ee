"""The orchestrator role: plays rollouts with the servers' policy, lets environments score them and sends batches to the trainer.

    for step in range(max_steps):
        wait for the first groups to finish, none of them older than max_async_level versions
        rewards → advantages → training samples: a StepBatch
        write metrics and rollouts, send the batch
    meanwhile: keep rollouts in flight, bring every new policy version to the servers, report the current phase

It is one asyncio loop. Longer computations (encoding, compressing) run in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.advantages.base import GroupScores
from rlx.advantages.shaping import shape
from rlx.aio import first_failure, gather_with_timeout
from rlx.checkpoints.folders import Start, read_start, steps
from rlx.checkpoints.orchestrator import POLL_SECONDS, Snapshots, read_state
from rlx.config.eval_envs import pins
from rlx.config.load import load_run
from rlx.config.schema import Config
from rlx.data.source import send
from rlx.envs.base import Environment, Local
from rlx.envs.worker_metrics import away, worker_metrics
from rlx.heartbeat import INTERVAL, Heartbeat
from rlx.inference.fleet import Fleet
from rlx.inference.replica import memory_of
from rlx.inference.sampler import Sampler
from rlx.inference.wire import InferenceError
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths, listed
from rlx.policy.chat import Chat
from rlx.polling import Preempted
from rlx.process import peak_memory
from rlx.rollout import concurrency
from rlx.rollout.batch import advantages_of, make_batch, make_groups, max_tokens_of, scores_of, step_metrics
from rlx.rollout.collector import Collector
from rlx.rollout.evaluate import Evaluations
from rlx.rollout.filters import reason_to_drop
from rlx.rollout.policy_backend import connect_servers
from rlx.rollout.record import StepRecorder
from rlx.rollout.role import begin, end, load, run_until_stopped
from rlx.rollout.stalls import explainer
from rlx.rollout.state import OrchestratorState
from rlx.rollout.step_timer import StepClock
from rlx.rollout.task_sampler import keep_digests
from rlx.rollout.teacher_logprobs import TeacherLogprobs
from rlx.rollout.updates import WeightUpdates
from rlx.shared.membership import EvictedError, TrainerClient
from rlx.stack_dump import explain_with
from rlx.tracking import Tracker, tracked
from rlx.types import Group, Rollout

log = logging.getLogger("rlx.orchestrator")


class Orchestrator:
    """The main loop and its background tasks."""

    def __init__(
        self,
        config: Config,
        paths: RunPaths,
        envs: Mapping[str, Environment],
        sampler: Sampler,
        fleet: Fleet,
        heartbeat: Heartbeat,
        tracker: Tracker | None = None,
        teaching: TeacherLogprobs | None = None,
        member: TrainerClient | None = None,
        digests: Mapping[str, Any] | None = None,
    ) -> None:
        """`member`: of a shared trainer; None: the run has a trainer of its own. `digests`: of the environments' examples."""
        self.config = config
        self.paths = paths
        self.sampler, self.fleet = sampler, fleet
        self.heartbeat = heartbeat
        self.teaching = teaching or TeacherLogprobs()
        self.envs, self.member = envs, member
        self.advantage = advantages_of(config)
        self._max_tokens = max_tokens_of(config)
        self.collector = Collector(config, envs, self._left_out, lambda: away(sampler, envs), self.teaching.begin, digests)
        self.rules = config.orchestrator.difficulty_filter.rules
        self.metrics = MetricsWriter(paths.metrics, "orchestrator")
        self.inference_metrics = MetricsWriter(paths.metrics, "inference")
        self.snapshots = Snapshots(paths, keep=config.max_async_level + 4)
        self.step = self.first_step = 0
        self.recorder = StepRecorder(paths, config.orchestrator, tracker)
        if (start := read_start(paths)) is not None:
            self._go_on_from(start)
        behind = config.max_async_level + 1 + (0 if pins(config) else config.eval.interval or 0)
        oldest = self.first_step - behind  # the trainer may have been so far ahead of an evaluation
        at_work = (lambda: self.collector.in_flight, lambda: away(sampler, envs))
        self.evaluations = Evaluations(config, paths, envs, self.first_step, *at_work, oldest=oldest, servers=lambda: fleet.size)
        self.updates = WeightUpdates(paths, fleet, config.weight_broadcast.timeout, config.max_steps, self._reached, self.evaluations)

    def _reached(self, version: int) -> None:
        """All servers have this policy version now."""
        self.sampler.version = version
        self.collector.set_version(version)
        self.evaluations.begin(version)

    def _go_on_from(self, start: Start) -> None:
        """Load the state of a checkpoint. `run` brings its policy version to the servers."""
        state = read_state(start.checkpoint, OrchestratorState)
        self.step = self.first_step = start.step
        self.recorder.saved = start.step - 1
        self.collector.restore(state.collector)
        if state.advantage is not None:
            self.advantage.load_state_dict(state.advantage)
        log.info("resuming after %d steps, from %s", start.step, start.checkpoint)

    def _state(self) -> OrchestratorState:
        """The orchestrator's state for a checkpoint."""
        return OrchestratorState(collector=self.collector.state(), advantage=self.advantage.state_dict())

    async def run(self) -> None:
        """The whole run. Returns when the last version is served. Raises the first error of any part."""
        loop = asyncio.get_running_loop()
        explain_with(explainer(lambda: [*self.collector.waiting(), *self.evaluations.waiting()], self.envs, loop))
        limit = None  # seconds for each part of the end
        try:
            forever = [self._beat(), self.snapshots.keep_answering(self.recorder.wait)]
            forever += [self.member.stay()] if self.member is not None else []
            forever.append(concurrency.follow(self.config, self.fleet, self.collector))
            await first_failure(self._work_until_preempted(), forever=forever)
        except asyncio.CancelledError:
            limit = 0.4 * self.config.launcher.grace  # we were told to stop, and the tracker needs some time, too
            raise
        finally:
            await gather_with_timeout(limit, self.collector.close(), self.evaluations.close())
            await gather_with_timeout(limit, *(env.close() for env in self.envs.values()))

    async def _work_until_preempted(self) -> None:
        """All the work. Raises Preempted if a resumed run is to end it.

        During a preemption an error does not end us, because the trainer's checkpoint still needs our part.
        """
        try:
            await self._work()
        except Preempted:
            raise
        except Exception:
            if not listed(self.paths.preempt):
                raise
            log.warning("work ended by this error during a preemption", exc_info=True)
            await asyncio.Event().wait()

    async def _work(self) -> None:
        if self.config.lora.enabled and not self.first_step:  # version 0 is an adapter, too: vLLM's CPU build mixes up base and adapters
            self.updates.version = -1
            await self.updates.reach(0)
        self.evaluations.begin(self.updates.version)
        await self.updates.reach(self.first_step)  # the servers need the checkpoint's policy before the first token
        parts = [self._train(), self.updates.follow()]
        if self.config.ckpt.interval is not None and not self.config.bench and self.first_step < self.config.max_steps:
            parts.append(self.snapshots.answered_for(self.config.max_steps))  # the trainer begins this checkpoint after its last version
        if self.member is not None:
            parts.append(self.member.ended())  # nobody else of this run would notice that its last checkpoint failed
        await first_failure(*parts, forever=[self.fleet.held()])
        if self.evaluations.gave_up and await self._has_last_checkpoint():
            log.info("the run is left as preempted: resumed from checkpoint %d, it has only this evaluation to play", self.config.max_steps)
            raise Preempted

    async def _has_last_checkpoint(self) -> bool:
        """Whether the checkpoint of the last step is complete. One that is due is waited for, as long as a preemption gives the roles."""
        due = self.config.ckpt.interval is not None and not self.config.bench
        deadline = time.monotonic() + (self.config.launcher.preempt_grace if due else 0.0)
        while self.config.max_steps not in steps(self.paths):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def _train(self) -> None:
        clock = StepClock(self.collector)
        for step in range(self.first_step, self.config.max_steps):
            self.step, collected = step, await self.collector.collect()
            clock.collected()
            scores, filtered = self._scores(collected), self.collector.filtered
            groups = make_groups(collected, scores, self.advantage)
            self.advantage.update(scores)
            batch = await asyncio.to_thread(make_batch, step, groups, self.config)  # 0.1 s for thousands of long rollouts
            batch, taught = await self.teaching.score(batch, collected)
            values = (
                step_metrics(groups, batch, self.collector.tally, filtered, self.rules, taught, self.collector.sizes)
                | self.collector.tasks.pool_sizes()
            )
            values |= worker_metrics(self.envs) | {"time/update_weights": self.updates.seconds}
            values |= {"perf/peak_memory_gb": peak_memory() / 2**30} if self.config.bench else {}
            state = await self._inference_state()
            # Write the metrics of step n before the trainer can begin batch n, so that their order is fixed at max_async_level 0.
            self.metrics.write(step, values | clock.step())
            if state:
                self.inference_metrics.write(step, state)
            # The failures are written with step n. The state after it must not hold them, or a resumed run would write them again.
            failures = sorted(self.collector.tally.failures, key=lambda rollout: (rollout.task.index, rollout.member))
            self.collector.tally.failures = []
            self.snapshots.take(step + 1, self._state())
            await asyncio.to_thread(send, self.paths, batch)
            log.info("step %d: reward %.4f, %s", step, values["reward/mean"], self._in_words(groups, clock))
            await self.recorder.begin(groups, failures, filtered, batch)
        await self.recorder.wait()

    def _scores(self, batch: Sequence[Sequence[Rollout]]) -> GroupScores:
        return shape(scores_of(batch), self.config.reward, self._max_tokens)

    def _left_out(self, rollouts: Sequence[Rollout]) -> str | None:
        """The filter rule that a finished group breaks; None if it is trained on."""
        filters = self.config.orchestrator.difficulty_filter
        return reason_to_drop(rollouts, filters, lambda group: self.advantage(self._scores([group])))

    def _in_words(self, groups: Sequence[Group], clock: StepClock) -> str:
        versions = (version for group in groups for rollout in group.rollouts for version in rollout.trace.versions)
        oldest = min(versions, default=self.collector.version)
        return f"oldest version {oldest}, waited {clock.waited:.2f} s for rollouts, {self.collector.in_flight} in flight"

    async def _inference_state(self) -> dict[str, float]:
        """The servers' metrics. `perf/servers` is 0 if none answers; the sampler's requests deal with that."""
        try:
            return await self.fleet.stats() | (memory_of(await self.fleet.states()) if self.config.bench else {})
        except InferenceError as error:
            log.warning("no server metrics at step %d: %s", self.step, error)
            return {"perf/servers": 0.0}  # a record all the same: a resumed run has the records of an undisturbed one

    async def _beat(self) -> None:
        """Report the current phase in the heartbeat."""
        while True:
            done = self.step == self.config.max_steps - 1 and self.collector.num_batches == self.config.max_steps
            phase = f"waiting for weights {self.config.max_steps}" if done else self.collector.phase
            phase = self.evaluations.instead_of(self.teaching.phase or phase)
            if self.updates.version < self.first_step:
                phase = f"waiting for weights {self.first_step}, where this attempt begins"
            self.heartbeat.beat(phase, step=self.step)
            await asyncio.sleep(INTERVAL / 2)


async def orchestrate(
    config: Config,
    paths: RunPaths,
    envs: Mapping[str, Local],
    chat: Chat,
    heartbeat: Heartbeat,
    member: TrainerClient | None,
    digests: Mapping[str, Any],
    tracker: Tracker | None,
) -> None:
    """Connect to the run's servers and run to the end."""
    async with (
        connect_servers(config, paths, envs, chat, heartbeat.beat) as (fleet, sampler),
        TeacherLogprobs.of(
            *(config, chat.tokenizer, heartbeat.beat, lambda: sampler.servers().endpoints),
            version=lambda: sampler.version,
            adapter=lambda: fleet.adapter(sampler.version),
        ) as teaching,
    ):
        await Orchestrator(config, paths, envs, sampler, fleet, heartbeat, tracker, teaching, member, digests).run()


def main() -> int:
    """The role as a process. Returns its exit code."""
    config, paths, heartbeat = begin("orchestrator", __doc__, load_run)
    member = None
    if config.trainer.shared_trainer_dir is not None:
        member = TrainerClient(paths, Path(config.trainer.shared_trainer_dir))
        member.wait(lambda: heartbeat.beat(f"waiting for the shared trainer in {config.trainer.shared_trainer_dir}"))
    envs, chat = load(config, paths, heartbeat)
    assert chat is not None
    digests = keep_digests(paths, envs)
    with tracked(config, paths, "orchestrator") as tracker:
        return run_until_stopped(orchestrate(config, paths, envs, chat, heartbeat, member, digests, tracker), paths)


if __name__ == "__main__":
    end(main, "orchestrator", plain=(EvictedError,))
