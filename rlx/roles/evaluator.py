"""The evaluator role: plays environments with one model, or with several versions of it, and scores them. The main loop of `rlx eval`:

    for version in versions:                 0 is the initial model; an endpoint has one version
        bring the version to the servers, which compare its checksums
        sample every rollout that is not finished yet, and append it to eval/finished.jsonl
        scores → results in verifiers' layout → a record of source `eval` → summary.json, summary.csv

A killed evaluation continues after the last record. The seeds follow from seed, environment, example and member, so the rollouts that it
still plays are those that an uninterrupted evaluation would have played.

Beside supervised training it evaluates the versions that are due, as they appear. The trainer never waits for that: it keeps the weights of
versions that have no record yet (`rlx.checkpoints.folders.not_evaluated`). A killed run evaluates what is missing, after its checkpoint is
loaded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rlx.aio import first_failure, gather_with_timeout
from rlx.checkpoints import folders
from rlx.config.eval_envs import PREFIX
from rlx.config.load import load_play
from rlx.config.schema import SftRoot
from rlx.config.schema_eval import EvalRoot
from rlx.config.schema_launch import LoggerConfig
from rlx.envs.base import Local
from rlx.envs.worker_metrics import away
from rlx.heartbeat import EVALUATING, INTERVAL, AtWork, Heartbeat
from rlx.inference.fleet import Fleet
from rlx.inference.sampler import Sampler
from rlx.metrics import MetricsWriter, read_metrics
from rlx.paths import RunPaths, listed, step_of, write_text
from rlx.policy.base import PolicyError
from rlx.policy.chat import Chat
from rlx.polling import Preempted
from rlx.rollout.eval_summary import write_summary
from rlx.rollout.evaluate import Evaluations
from rlx.rollout.evaluation import Evaluation
from rlx.rollout.failures import ErrorRate, RolloutsFailed
from rlx.rollout.policy_backend import Backend, connect_servers, connected
from rlx.rollout.role import begin, end, load, run_until_stopped
from rlx.rollout.rollout_runner import RolloutRunner
from rlx.rollout.stalls import explainer
from rlx.rollout.task_sampler import keep_digests
from rlx.rollout.updates import WeightUpdates
from rlx.stack_dump import explain_with
from rlx.tracking import tracked

log = logging.getLogger("rlx.evaluator")
LAST = 600.0  # seconds to wait for the last metrics of the trainer, which may be writing its last checkpoint


class Evaluator:
    """The main loop of `rlx eval`."""

    def __init__(self, config: EvalRoot, paths: RunPaths, envs: Mapping[str, Local], model: Backend, heartbeat: Heartbeat) -> None:
        """`envs`: by their names in `config.envs`."""
        self.config, self.paths, self.model, self.heartbeat = config, paths, model, heartbeat
        self.envs = envs
        self.metrics = MetricsWriter(paths.metrics, "eval")
        self.now: tuple[Evaluation, RolloutRunner] | None = None
        self.phase = "starting"

    async def run(self) -> None:
        """Evaluate every version that has no record yet. Raises the first error of any part."""
        waiting = lambda: self.now[1].waiting() if self.now is not None else []  # noqa: E731
        explain_with(explainer(waiting, {env.name: env for env in self.envs.values()}, asyncio.get_running_loop()))
        try:
            await first_failure(self._work(), forever=[self._beat()])
        finally:
            await asyncio.gather(*(env.close() for env in self.envs.values()))

    async def _work(self) -> None:
        done = {record["step"] for record, _ in read_metrics(self.paths.metrics) if record["source"] == "eval"}
        for version in await self.model.versions(self.config.versions):
            if version not in done:
                self.phase = f"loading version {version} into the servers"
                await self.model.reach(version)
                await self._evaluate(version)
            await asyncio.to_thread(self._summarize)

    async def _evaluate(self, version: int) -> None:
        """Evaluate the version that the model has now, and write its record. Raises RolloutsFailed, or what `Model.check` raises."""
        config, digest, file = self.config, (await self.model.info()).digest, finished_file(self.paths)
        now = await asyncio.to_thread(Evaluation, config, self.paths, self.envs, version, file, digest)
        if now.before:
            log.info("version %d: %d rollouts are done already", version, now.before)
        errors = ErrorRate(config.orchestrator.max_error_rate)
        now.count_finished(errors)
        runner = RolloutRunner(
            self.envs,
            max_retries=config.orchestrator.max_retries,
            max_concurrent=config.concurrency,
            on_end=now.add,
            check=self.model.check,
            away=self.model.away,
            errors=errors,
        )
        self.now = now, runner
        await first_failure(runner.run(now.jobs()), forever=[self.model.follow(runner)])
        now.check_success()
        origin = await self.model.info()
        facts = {"served_model": origin.model, "weights": origin.weights, "attested": origin.attested}
        if config.client.base_url:
            facts["base_url"] = config.client.base_url
        values = await asyncio.to_thread(now.write, config.pass_threshold, facts, time.monotonic() - now.began)
        self.metrics.write(version, values | ({} if origin.attested is None else {"eval/attested": origin.attested}))
        file.unlink()  # the version has its record now

    def _summarize(self) -> None:
        """Write the summary of what is evaluated so far."""
        facts = {
            "model": self.config.model.name,
            "weights_dir": self.config.weights_dir,
            "endpoint": self.config.client.base_url,
            "seed": self.config.seed,
            "pass_threshold": self.config.pass_threshold,
        }
        write_summary(self.paths, list(self.config.envs), facts)

    async def _beat(self) -> None:
        """Report the current phase and the progress."""
        while True:
            if self.now is not None:
                now, runner = self.now
                self.phase = f"{EVALUATING} version {now.version}, rollouts {len(now.outcomes)}/{now.total}"
                self.heartbeat.progress = now.tokens
                what = "model" if self.config.weights_dir is None else f"step_{now.version}" if now.version else "base"
                write_text(self.paths.progress, json.dumps(now.progress(what, runner)))
            self.heartbeat.beat(self.phase, step=self.now[0].version if self.now is not None else None)
            if listed(self.paths.preempt):
                raise Preempted
            await asyncio.sleep(INTERVAL)


class SftEvaluator:
    """The main loop beside supervised training.

    the trainer publishes version v  →  the servers load it and compare its checksums  →  its evaluation  →  its record  →  the next
    """

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
            await gather_with_timeout(None, self.evaluations.close(), *(env.close() for env in self.envs.values()))

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
    return step_of(Path(resume or "")) or 0


async def evaluate(config: EvalRoot | SftRoot, paths: RunPaths, envs: Mapping[str, Local], chat: Chat | None, heartbeat: Heartbeat) -> None:
    """Connect to the model and evaluate to the end. `chat`: None for an endpoint, which has its own."""
    if isinstance(config, SftRoot):
        async with connect_servers(config, paths, envs, chat, heartbeat.beat) as (fleet, sampler):
            await SftEvaluator(config, paths, envs, fleet, sampler, heartbeat).run()
        await last_metrics(config, paths, heartbeat)
        return
    async with connected(config, paths, envs, chat, heartbeat.beat) as model:
        await Evaluator(config, paths, {name.removeprefix(PREFIX): env for name, env in envs.items()}, model, heartbeat).run()


async def last_metrics(config: SftRoot, paths: RunPaths, heartbeat: Heartbeat) -> None:
    """Wait until the trainer has written its last metrics, if this role forwards them somewhere. Gives up after `LAST` seconds."""
    if config.logger == LoggerConfig():
        return
    done, deadline = AtWork(paths, "trainer", ("done",)), time.monotonic() + LAST
    while not done() and time.monotonic() < deadline and not listed(paths.preempt):
        heartbeat.beat("waiting for the trainer's last metrics")
        await asyncio.sleep(INTERVAL / 2)


def finished_file(paths: RunPaths) -> Path:
    """The finished rollouts of the version that is being evaluated."""
    return paths.evaluations / "finished.jsonl"


def has_finished(paths: RunPaths) -> bool:
    """Whether earlier attempts left the record of a version, or of a rollout."""
    if any(record["source"] == "eval" for record, _ in read_metrics(paths.metrics)):
        return True
    return finished_file(paths).is_file() and finished_file(paths).stat().st_size > 0


def main() -> int:
    """The role as a process. Returns its exit code."""
    config, paths, heartbeat = begin("evaluator", __doc__, load_play)
    assert isinstance(config, EvalRoot | SftRoot), f"{paths.root} evaluates nothing in this role"
    envs, chat = load(config, paths, heartbeat, endpoint=isinstance(config, EvalRoot) and bool(config.client.base_url))
    if empty := [name.removeprefix(PREFIX) for name, env in envs.items() if not len(env.rows)]:
        print(f"there is nothing to evaluate: no examples in {', '.join(empty)}", file=sys.stderr)
        return 1
    try:
        if isinstance(config, EvalRoot):  # the digests of a run of `rlx sft` are those of what it trains on
            keep_digests(paths, {name.removeprefix(PREFIX): env for name, env in envs.items()}, kept=has_finished(paths))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    with tracked(config, paths, "evaluator"):
        return run_until_stopped(evaluate(config, paths, envs, chat, heartbeat), paths)


if __name__ == "__main__":
    end(main, "evaluator", plain=(RolloutsFailed, PolicyError))  # their own sentence says it all
