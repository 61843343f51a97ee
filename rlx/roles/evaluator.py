"""The evaluator role: plays environments with one model, or with several versions of it, and scores them (`rlx eval`).

Beside supervised training it evaluates the versions that are due, as they appear (`rlx.rollout.beside`). The main loop of `rlx eval`:

    for version in versions:                 0 is the initial model; an endpoint has one version
        bring the version to the servers, which compare its checksums
        play every rollout that has no record yet, and append its record
        scores → results in verifiers' layout → a record of source `eval` → summary.json, summary.csv

A killed evaluation continues after the last record. The seeds follow from seed, environment, example and member, so the rollouts that it
still plays are those that an uninterrupted evaluation would have played. `rlx.rollout.play` plays, `scores` and `results` are shared with
evaluations beside training.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Mapping

from rlx.concurrent import first_failure
from rlx.config.evaluated import PREFIX
from rlx.config.load import load_play
from rlx.config.schema import SftRoot
from rlx.config.schema_eval import EvalRoot
from rlx.config.schema_launch import LoggerConfig
from rlx.envs.base import Local
from rlx.heartbeat import EVALUATING, INTERVAL, AtWork, Heartbeat
from rlx.metrics import MetricsWriter, read_metrics
from rlx.paths import RunPaths, listed, write_text
from rlx.policy.base import PolicyError
from rlx.policy.chat import Chat
from rlx.rollout.beside import evaluate_beside
from rlx.rollout.models import Model, connected
from rlx.rollout.play import NothingWorks
from rlx.rollout.role import begin, end, load, run_until_stopped
from rlx.rollout.scored import PLAYED, Scored
from rlx.rollout.scoring import rows_of, write_summary
from rlx.rollout.stalls import explainer
from rlx.rollout.tasks import keep_digests
from rlx.stacks import explain_with
from rlx.tracking import tracked
from rlx.waiting import Preempted

log = logging.getLogger("rlx.evaluator")
LAST = 600.0  # seconds to wait for the last metrics of the trainer, which may be writing its last checkpoint


class Evaluator:
    """The main loop."""

    def __init__(self, config: EvalRoot, paths: RunPaths, envs: Mapping[str, Local], model: Model, heartbeat: Heartbeat) -> None:
        """`envs`: by their names in `config.envs`."""
        self.config, self.paths, self.model, self.heartbeat = config, paths, model, heartbeat
        self.envs = envs
        self.metrics = MetricsWriter(paths.metrics, "eval")
        self.now: Scored | None = None
        self.phase = "starting"

    async def run(self) -> None:
        """Evaluate every version that has no record yet. Raises the first error of any part."""
        waiting = lambda: self.now.player.waiting() if self.now is not None else []  # noqa: E731
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
        """Evaluate the version that the model has now, and write its record."""
        digest = (await self.model.origin()).digest
        self.now = now = Scored(self.config, self.paths, self.envs, version, self.model, digest)
        if now.player.finished:
            log.info("version %d: %d rollouts are done already", version, now.player.finished)
        await now.play()
        values = await asyncio.to_thread(now.write, await self.model.origin())
        self.metrics.write(version, values)
        now.forget()

    def _summarize(self) -> None:
        """Write the summary of what is evaluated so far."""
        rows = rows_of(self.paths, list(self.config.envs))
        facts = {
            "model": self.config.model.name,
            "weights_dir": self.config.weights_dir,
            "endpoint": self.config.client.base_url,
            "seed": self.config.seed,
            "pass_threshold": self.config.pass_threshold,
        }
        write_summary(self.paths.root, rows, facts)

    async def _beat(self) -> None:
        """Report the current phase and the progress."""
        while True:
            if self.now is not None:
                player, version = self.now.player, self.now.version
                self.phase = f"{EVALUATING} version {version}, rollouts {player.finished}/{self.now.total}"
                self.heartbeat.progress = self.now.tokens
                write_text(self.paths.progress, json.dumps(self.now.progress()))
            self.heartbeat.beat(self.phase, step=self.now.version if self.now is not None else None)
            if listed(self.paths.preempt):
                raise Preempted
            await asyncio.sleep(INTERVAL)


async def evaluate(config: EvalRoot | SftRoot, paths: RunPaths, envs: Mapping[str, Local], chat: Chat | None, heartbeat: Heartbeat) -> None:
    """Connect to the model and evaluate to the end. `chat`: None for an endpoint, which has its own."""
    if isinstance(config, SftRoot):
        assert chat is not None
        await evaluate_beside(config, paths, envs, chat, heartbeat)
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


def has_finished(paths: RunPaths) -> bool:
    """Whether earlier attempts left the record of a version, or of a rollout."""
    if any(record["source"] == "eval" for record, _ in read_metrics(paths.metrics)):
        return True
    return any(file.stat().st_size for file in paths.evaluations.glob(f"*/step_*/{PLAYED}"))


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
    end(main, "evaluator", plain=(NothingWorks, PolicyError))  # their own sentence says it all
