"""The trainer: waits for the batch of each step, trains on it, publishes the new policy version.

    batch n (made by versions ≥ n − max_async_level)  →  optimizer steps from version n  →  metrics of step n  →  version n+1

It also writes a checkpoint of version n when one is due and before a preemption ends the run. `rlx.train.watch` sends heartbeats and
notices a preemption. `rlx.parallel.mesh` divides the work among ranks. `rlx.weights.publish` brings versions to the servers.

Start a single rank as `python -m rlx.roles.trainer --run-dir D`, and each of several with RANK and WORLD_SIZE.
The exit code is 0 after `max_steps` steps and 75 after a preemption. Any other code is an error.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from pathlib import Path

from rlx.checkpoints.folders import not_evaluated
from rlx.config.load import load_training
from rlx.config.schema import TrainingRoot
from rlx.inference.endpoints import wait_for_neighbours
from rlx.metrics import MetricsWriter
from rlx.parallel.rendezvous import Place
from rlx.paths import RunPaths, write_text
from rlx.polling import LEFT, Preempted
from rlx.process import end_at_once
from rlx.tracking import tracked
from rlx.train.role import begin
from rlx.train.watch import Watch
from rlx.types import StepBatch

log = logging.getLogger("rlx.trainer")

LAST_WRITE = 5.0  # seconds for a version that is being written when the trainer ends by an error


class Trainer:
    """One rank's objects, built from the run's configuration."""

    def __init__(self, cfg: TrainingRoot, paths: RunPaths, place: Place, watch: Watch) -> None:
        from rlx.checkpoints.folders import TRAINER, read_start
        from rlx.checkpoints.trainer import Checkpoints
        from rlx.models.load import longest_served
        from rlx.parallel.mesh import build_mesh
        from rlx.policy.source import source_of, validation_rows
        from rlx.train.build import build
        from rlx.train.flops import Meter
        from rlx.train.summary import ScoreKeeper, Summary
        from rlx.train.validation import Validation
        from rlx.weights.hub import TIMEOUT, fetch, initial_model
        from rlx.weights.publish import Publisher, setup_memory_folder
        from rlx.weights.subscribe import write_initial

        self.cfg, self.paths, self.watch = cfg, paths, watch
        if place.rank == 0:
            setup_memory_folder(cfg, paths)
        wait_for_neighbours(cfg, paths, watch.beat, watch.tick)
        self.mesh = build_mesh(cfg, paths, place, timeout=TIMEOUT, tick=watch.heartbeat, alive=watch.waiting)
        name = initial_model(cfg, paths, self.mesh, watch)
        start = read_start(paths)
        if start is None and self.mesh.first:
            write_initial(paths, fetch(name, None), longest_served(name, trust_remote_code=cfg.model.trust_remote_code))
        self.step_trainer = build(cfg, name, self.mesh, watch.working, resumes=start is not None)
        self.model, self.reference = self.step_trainer.model, self.step_trainer.reference
        self.summary = Summary(paths, self.mesh, self.step_trainer)
        self.source = source_of(cfg, paths, self.mesh, name, self.step_trainer.losses.streams)
        self.step_trainer.sampled_by_this_run = self.source.own
        rows = validation_rows(cfg, self.mesh, name, watch.heartbeat)
        self.meter = Meter(self.model, self.mesh)
        row = cfg.micro_batch_tokens, self.meter.flops.work
        self.validation = Validation(self.step_trainer, rows, *row, paths, watch) if rows is not None else None
        self.metrics = MetricsWriter(paths.metrics, "trainer") if self.mesh.first else None
        self.broadcast = Publisher.from_config(cfg, self.model, self.mesh, paths, name, watch.working)
        watch.checks.append(self.broadcast.check)
        self.checkpoints = Checkpoints.of(cfg, paths, self.step_trainer, watch.heartbeat)
        self.first_step, self.updated = 0, False  # `updated`: the current step has already changed the weights
        self.step_trainer.before_micro_batch = self.between_micro_batches
        self.scores = ScoreKeeper(cfg, paths, self.mesh, self.step_trainer)
        if start is not None:
            with watch.working(f"reading checkpoint {start.step}"):
                self.resume(start.checkpoint / TRAINER, start.step)
        elif cfg.lora.enabled and cfg.publishes(0):
            self.broadcast.publish(0)  # as an adapter: a server must not compute the base model and adapters in one batch

    def resume(self, folder: Path, step: int) -> None:
        """Load the state of a checkpoint and make sure that its policy version is published for the servers."""
        from rlx.train.checkpoint import load

        progress = load(folder, self.step_trainer)
        assert progress.step == step, f"{folder} is the state after {progress.step} steps, not {step}"
        self.first_step = step
        self.broadcast.ensure(step)
        log.info("resuming after %d steps, from %s", step, folder)

    def run(self) -> int:
        """Train until version `max_steps` is published. Returns the exit code."""
        from rlx.train.profile import profiled

        self.validate(self.first_step)
        for step in range(self.first_step, self.cfg.max_steps):
            started = time.perf_counter()
            try:
                batch = self.receive(step)
                waited = time.perf_counter() - started
                self.checkpoints.wait_copied()
                with profiled(self.cfg, self.paths, step, self.mesh.rank):
                    values = self.train(batch)
            except Preempted:
                return self.give_way(step)
            values["time/wait_batch"] = waited
            self.publish(step, values, started)
            self.keep(step + 1)
            self.validate(step + 1)
        self.finish(f"writing version {self.cfg.max_steps}")
        self.watch.beat("done")
        return 0

    def receive(self, step: int) -> StepBatch:
        """The batch of this step, the same on every rank. Raises Preempted on all ranks after a notice."""
        self.watch.beat(f"waiting for batch {step}", step)
        self.watch.raise_if_preempted(self.mesh)
        batch = self.source.receive(step, self.watch.tick)
        self.source.done(step)
        return batch

    def train(self, step_batch: StepBatch) -> dict[str, float]:
        """Run the optimizer steps of a batch and return the step's metrics. Raises Preempted on all ranks if the step is abandoned."""
        from rlx.data.packing import pack

        batch = pack(
            step_batch,
            rank=self.mesh.data_rank,
            ranks=self.mesh.num_data_ranks,
            tokens=self.cfg.micro_batch_tokens,
            loss_of=self.step_trainer.losses.loss_of,
            cost=self.meter.flops.work,
            padded=self.step_trainer.padded,
        )
        self.updated = False
        self.watch.beat(f"training step {batch.step}", batch.step)

        def starts(update: int, of: int) -> None:
            self.updated = update > 0
            self.watch.beat(f"training step {batch.step}, optimizer step {update + 1} of {of}", batch.step)

        iterations = self.cfg.trainer.num_iterations
        values = self.step_trainer.train_batch(batch, iterations=iterations, starts=starts) | self.source.report(batch.step)
        self.scores.write(step_batch)
        if self.reference is not None and self.reference.after_step(batch.step, self.model):
            log.info("step %d: the reference moved towards the policy with weight %g", batch.step, self.reference.alpha)
        self.summary.after_step(batch.step)
        seconds = values["time/forward_backward"] + values["time/optimizer"]
        balance = {"perf/imbalance": batch.imbalance, "perf/imbalance_attention": batch.attention_imbalance}
        return values | balance | self.meter.measure(step_batch, seconds, iterations, self.step_trainer.forward_only)

    def publish(self, step: int, values: dict[str, float], started: float) -> None:
        """Gather version n+1, write the metrics of step n, then announce the version and delete old ones.

        The orchestrator continues when it sees the version, so the order of lines in `metrics.jsonl` is always the same.
        """
        version = step + 1
        # Without servers, only versions that last are wanted: the last one and those of checkpoints.
        lasts = self.cfg.keeps_weights(version) or self.checkpoints.due(version)
        wanted = lasts or self.cfg.publishes(version)
        began = time.perf_counter()
        if wanted:
            with self.watch.working(f"gathering version {version}", step):
                self.broadcast.gather(version, lasts=lasts)
        if self.metrics is not None:
            ended = time.perf_counter()
            share = (values["time/forward_backward"] + values["time/optimizer"]) / (ended - started)
            times = {"time/broadcast": ended - began, "time/step": ended - started} | self.broadcast.times
            self.metrics.write(step, values | times | {"perf/compute_frac": share})
        if wanted and self.mesh.first:
            protect = {*self.checkpoints.protected(), *not_evaluated(self.cfg, self.paths, version)}
            self.broadcast.announce(version, keep_last=self.cfg.versions_kept, protect=protect)
        log.info("step %d: loss %.4f, gradient norm %.3f, version %d", step, values["loss/total"], values["optim/grad_norm"], version)
        if not lasts:  # servers read the files of those that last
            with suppress(Preempted):  # the next step's wait raises it, too
                self.broadcast.offer(version, self.watch.tick)

    def validate(self, version: int) -> None:
        """Measure the loss of a version on the validation rows, if that is due."""
        if self.cfg.validates(version) and self.validation is not None:
            self.watch.beat(f"validating version {version}", version)
            self.validation.record(version)

    def keep(self, step: int) -> None:
        """Save the state after `step` steps if a checkpoint is due. Also complete an earlier checkpoint whose files are written."""
        if self.checkpoints.due(step):
            self.save(step, f"writing checkpoint {step}")
        self.checkpoints.finish(wait=False)

    def save(self, step: int, phase: str) -> None:
        """Write a checkpoint, after its policy version is completely on the disk."""
        with self.watch.working(phase, step):
            self.broadcast.wait()
            self.checkpoints.save(step)

    def finish(self, phase: str) -> None:
        """Wait for all background writes."""
        with self.watch.working(phase):
            self.broadcast.close()
            self.checkpoints.close()

    def give_way(self, step: int) -> int:
        """Handle a preemption: save the state after `step` steps, record it in a file and return the exit code."""
        self.step_trainer.abort_step()
        if step > self.first_step and not self.cfg.bench:
            self.broadcast.leave_on_disk(step)
            self.save(step, f"writing checkpoint {step} before leaving")
        self.finish(f"writing checkpoint {step} before leaving")
        log.info("preempted after %d steps", step)
        if self.mesh.first:
            write_text(self.paths.preempted, json.dumps({"step": step}) + "\n")
        return LEFT

    def between_micro_batches(self) -> None:
        """Send a heartbeat. Raises Preempted if the step should be abandoned; this is possible only before it changes the weights."""
        self.watch.progressed()
        if not self.updated:
            self.watch.raise_if_grace_over(self.mesh)


def main() -> int:
    """One rank as a process. Returns its exit code."""
    cfg, paths, place = begin("rlx.roles.trainer", __doc__, load_training)
    watch = Watch(paths, place.name, first=place.rank == 0, grace=cfg.launcher.grace)
    try:
        trainer = Trainer(cfg, paths, place, watch)
    except Preempted:  # there is no state to save yet
        return LEFT
    with tracked(cfg, paths, place.name):
        try:
            code = trainer.run()
        except Exception:
            trainer.broadcast.wait_briefly(LAST_WRITE)  # the process ends at once, and its threads with it
            raise
    trainer.mesh.close()
    return code


if __name__ == "__main__":
    end_at_once(main)
