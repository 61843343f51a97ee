"""Evaluations beside training: plays the evaluation examples at one policy version, on the run's servers.

The evaluator role uses it beside supervised training, whose servers have nothing else to do. In reinforcement learning:

    version v reaches the servers  →  is v due?  →  play its evaluation while training goes on
    version v+1 is there           →  the servers are updated            eval.pins: the evaluation ends and is recorded before
    the next version that is due   →  the evaluation of v ends and is recorded  →  the servers are updated  →  its own begins

With `eval.pins` an evaluation has tokens of one version, because the servers keep it until the evaluation has ended, and its record has a
fixed place in `metrics.jsonl` (after version v was trained on). Training waits only if it runs out of work: the trainer may be
`max_async_level` + 1 versions ahead of the servers. Without it nothing waits, and the record says up to which version tokens were sampled.
Nothing of training depends on an evaluation: it has its own environments, seeds and counters. So at max_async_level 0 a run's other
records are the same with and without evaluations.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from rlx.config.eval_envs import PREFIX, evaluated, is_due, pins
from rlx.config.schema import EvaluatedRun, ScoredEnvConfig
from rlx.envs.base import Environment
from rlx.heartbeat import EVALUATING
from rlx.metrics import MetricsWriter, read_metrics
from rlx.paths import RunPaths, listed
from rlx.rollout.evaluation import Evaluation
from rlx.rollout.policy_backend import check_version
from rlx.rollout.rollout_runner import POLL_SECONDS, Job, RolloutRunner
from rlx.types import Rollout, Task
from rlx.weights.subscribe import Subscriber

log = logging.getLogger("rlx.evaluation")


class Evaluations:
    """All evaluations of a run. Without `eval.interval` it has nothing to do."""

    def __init__(
        self,
        config: EvaluatedRun,
        paths: RunPaths,
        envs: Mapping[str, Environment],
        first_step: int,
        busy: Callable[[], int] = lambda: 0,
        away: Callable[[], float] = lambda: 0.0,
        *,
        oldest: int = 0,
        servers: Callable[[], int] | None = None,
    ) -> None:
        """`envs`: the run's environments; those to evaluate on have their names with a prefix. `first_step`: where this attempt starts.

        `busy`: rollouts of training in flight. `away`: see `play_with_outage_retry`. `oldest`: the oldest version whose evaluation an
        earlier attempt may not have finished. `servers`: how many servers serve the run at the moment; None: those of the configuration.
        """
        self.config, self.paths, self.busy, self.first_step = config, paths, busy, first_step
        self.specs: dict[str, ScoredEnvConfig] = evaluated(config)
        self.envs = {name: envs[PREFIX + name] for name in self.specs}
        self._pins = pins(config)
        self.servers = servers or (lambda: len(config.inference.base_url) or config.hardware.inference_replicas)
        self.metrics = MetricsWriter(paths.metrics, "eval")
        self._missed = self._find_missed(max(0, oldest)) if self.specs else []
        self.gave_up = False  # whether `finish` ended without the last evaluation
        self._now: Evaluation | None = None
        self._runner = RolloutRunner(
            self.envs,
            max_retries=config.orchestrator.max_retries,
            max_concurrent=self._room,
            on_end=self._on_end,
            check=self._check,
            away=away,
        )
        self._playing: asyncio.Task[dict[str, float]] | None = None

    # -- which versions

    def is_wanted(self, version: int) -> bool:
        """Whether this attempt evaluates the version."""
        return is_due(self.config, version) and (version >= self.first_step or version in self._missed)

    def next_stop(self, version: int, newest: int) -> int:
        """The version to update servers to that have `version`: `newest`, or one before it that is evaluated."""
        return next((stop for stop in range(version + 1, newest) if self.is_wanted(stop)), newest)

    def _find_missed(self, oldest: int) -> list[int]:
        """Versions from `oldest` to `first_step` whose evaluation a kill interrupted, if their weights are still there."""
        done = {record["step"] for record, _ in read_metrics(self.paths.metrics) if record["source"] == "eval"}
        lacking = [v for v in range(oldest, self.first_step) if is_due(self.config, v) and v not in done]
        published = Subscriber(self.paths)
        there = [version for version in lacking if version == 0 or published.on_disk(version)]
        for version in lacking:
            what = "is evaluated first" if version in there else "cannot be evaluated any more: its weights are gone"
            log.info("version %d was not evaluated; it %s", version, what)
        return there

    # -- one evaluation

    def begin(self, version: int) -> None:
        """The servers have this version now. Starts its evaluation if it is due."""
        if not self.is_wanted(version) or (self._now is not None and self._now.version == version):
            return
        assert self._now is None, f"version {self._now.version} is still evaluated"
        self._now = Evaluation(self.config, self.paths, self.envs, version)
        self._playing = asyncio.create_task(self._evaluate(self._now))

    async def leave(self, stop: int | None = None) -> None:
        """Wait until the evaluation in progress has ended, and write its record. Raises its error.

        `stop`: the version to which an update of the servers waits meanwhile, and the record says for how long; None: no update waits.
        Without `eval.pins` an evaluation only ends before the next one begins.
        """
        if self._now is None or self._playing is None:
            return
        is_missed = self._now.version < self.first_step  # by an earlier attempt, whose servers are past it
        if not (self._pins or is_missed or stop is None or self._playing.done() or self.is_wanted(stop)):
            return
        began = time.monotonic()
        values = await self._playing
        waited = {"time/wait_evaluation": time.monotonic() - began} if stop is not None else {}
        self.metrics.write(self._now.version, values | waited)
        self._look_for_best(self._now.version, values)
        self._now = self._playing = None

    async def finish(self) -> None:
        """`leave` the last version. During a preemption its evaluation is given up, and `gave_up` says so.

        A resumed run plays it, if there is a checkpoint of the last step.
        """
        leaving = asyncio.ensure_future(self.leave())
        try:
            while not leaving.done() and not listed(self.paths.preempt):
                await asyncio.wait({leaving}, timeout=POLL_SECONDS)
            if leaving.done() or self._now is None:
                await leaving
            else:
                self.gave_up = True
                log.warning("version %d is not evaluated: the run is preempted, and all its steps are done", self._now.version)
        finally:
            leaving.cancel()

    def instead_of(self, phase: str) -> str:
        """The phase to report: the progress of an evaluation if training waits for weights meanwhile, otherwise the given one."""
        now = self._now
        if now is None or not phase.startswith("waiting for weights"):
            return phase
        return f"{EVALUATING} version {now.version}, rollouts {len(now.outcomes)}/{now.total}"

    @property
    def played(self) -> int:
        """Rollouts finished so far, of all evaluations."""
        return self._runner.finished

    def waiting(self) -> list[tuple[Task, int, float]]:
        """The rollouts in flight, for `rlx.rollout.stalls`: task, number of members and seconds of each request."""
        return self._runner.waiting()

    async def close(self) -> None:
        """Cancel an evaluation in progress."""
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.gather(self._playing, return_exceptions=True)

    async def _evaluate(self, now: Evaluation) -> dict[str, float]:
        """Run all jobs and write their results. Returns the metrics. Cancels everything if one of them raises."""
        await self._runner.run(now.jobs())
        newest = {} if self._pins else {f"eval/{name}/newest_version": float(now.newest) for name in self.specs}
        facts = {} if self._pins else {"newest_policy_version": now.newest}
        seconds = time.monotonic() - now.began
        return newest | await asyncio.to_thread(now.write, self.config.eval.pass_threshold, facts, seconds)

    def _room(self) -> int:
        """How many rollouts may be in flight: the evaluation's share of the servers, or what training leaves of them."""
        capacity = max(1, self.servers()) * self.config.inference.max_num_seqs
        return max(math.ceil(self.config.eval.capacity_fraction * capacity), capacity - self.busy())

    def _on_end(self, job: Job, rollouts: Sequence[Rollout]) -> None:
        assert self._now is not None
        self._now.add(job, rollouts)

    def _check(self, rollout: Rollout) -> None:
        assert self._now is not None
        if self._pins:
            check_version(rollout, self._now.version)
        else:
            self._now.newest = max([self._now.newest, *rollout.trace.versions])

    def _look_for_best(self, version: int, values: Mapping[str, float]) -> None:
        """Warn if the record has no value to choose the best checkpoint by."""
        wanted = self.config.ckpt.keep_best
        if wanted is None or wanted in values:
            return
        own = [metric for metric in values if metric.startswith("/".join([*wanted.split("/")[:3], ""]))]
        there = f"it has {', '.join(own)}" if own else "it has none of this kind"
        log.warning("ckpt.keep_best: the evaluation of version %d has no %s, so it cannot be the best; %s", version, wanted, there)
