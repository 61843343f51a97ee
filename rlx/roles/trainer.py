"""The trainer: waits for the batch of each step, trains on it, publishes the new policy version.

    batch n (made by versions ≥ n − max_async_level)  →  optimizer steps from version n  →  metrics of step n  →  version n+1

It also writes a checkpoint of version n when one is due and before a preemption ends the run. `rlx.train.watch` sends heartbeats and
notices a preemption. `rlx.parallel.mesh` divides the work among ranks.

Start one rank as `python -m rlx.roles.trainer --run-dir D`, several ranks of one host under `python -m torch.distributed.run`, and
ranks on several hosts as one process each, with RANK and WORLD_SIZE.
The exit code is 0 after `max_steps` steps and 75 after a preemption (0 under torchrun). Any other code is an error.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.checkpoints.best import not_evaluated
from rlx.config.chat_format import template_path
from rlx.config.evaluated import is_due
from rlx.config.load import load_training
from rlx.config.schema import Config, EvaluatedRun, TrainingRoot
from rlx.metrics import MetricsWriter
from rlx.parallel.rendezvous import Place
from rlx.paths import RunPaths, listed, write_text
from rlx.process import die_with_parent, keep_freed_memory, say_full_disk, set_cpu_threads, sigterm_is_a_notice
from rlx.stacks import answer
from rlx.tracking import tracked
from rlx.train.watch import Watch
from rlx.types import StepBatch
from rlx.waiting import LEFT, Preempted, wait_for

if TYPE_CHECKING:
    import torch

    from rlx.weights.memory import Offers

log = logging.getLogger("rlx.trainer")

INITIAL_MODEL_TIMEOUT = 3600.0  # seconds to wait for the initial model (a warm start or a download)


class Called(Preempted):
    """Servers wait for weights, so the trainer stops waiting for a batch. Other ranks see a `Preempted` and ask rank 0 for the reason."""


class Trainer:
    """One rank's objects, built from the run's configuration."""

    def __init__(self, cfg: TrainingRoot, paths: RunPaths, place: Place, watch: Watch) -> None:
        from rlx.checkpoints.folders import TRAINER, read_start
        from rlx.checkpoints.trainer import Checkpoints
        from rlx.models.load import DTYPES
        from rlx.parallel.mesh import build_mesh
        from rlx.policy.source import source_of, validation_rows
        from rlx.train.build import build
        from rlx.train.flops import Meter
        from rlx.train.scores import ScoreKeeper
        from rlx.train.validation import Validation
        from rlx.weights.publish import Publisher

        self.cfg, self.paths, self.watch = cfg, paths, watch
        if isinstance(cfg, EvaluatedRun):
            wait_for_servers(cfg, paths, watch)
        self.mesh = build_mesh(cfg, paths, place, timeout=INITIAL_MODEL_TIMEOUT, tick=watch.beat_on, alive=watch.waiting)
        name = self.initial_model()
        self.step_trainer = build(cfg, name, self.mesh, watch.working, resumes=(begin := read_start(paths)) is not None)
        self.model, self.reference = self.step_trainer.model, self.step_trainer.reference
        # The run's summary shows what `auto` chose, because few users read this role's log.
        self.summary = {"logprob": self.model.logprob_backend, "layers": self.model.liger}
        if self.mesh.first:
            write_text(paths.kernels, json.dumps(self.summary) + "\n")
        self.source = source_of(cfg, paths, self.mesh, name, self.step_trainer.losses.streams)
        rows = validation_rows(cfg, self.mesh, name, watch.beat_on)
        self.validation = Validation(self.step_trainer, rows, cfg.micro_batch_tokens, paths, watch) if rows is not None else None
        self.metrics = MetricsWriter(paths.metrics, "trainer") if self.mesh.first else None
        self.publisher = Publisher.of(
            *(self.model, self.mesh, paths),
            source=name,
            dtype=DTYPES[cfg.model.dtype],
            trust_remote_code=cfg.model.trust_remote_code,
            chat_template=None if cfg.model.chat_template is None else template_path(cfg.model.chat_template),
            lora=cfg.lora if cfg.lora.on else None,
        )
        watch.checks.append(self.publisher.check)
        self.offers = self.offers_of(DTYPES[cfg.model.dtype])
        self.checkpoints = Checkpoints(
            *(paths, replace(cfg.ckpt, interval=None) if cfg.bench else cfg.ckpt, self.step_trainer),
            last=cfg.max_steps,
            facts={"ranks": self.mesh.world_size, "model": cfg.model.name},
            with_orchestrator=cfg.has_orchestrator,
            is_evaluated=functools.partial(is_due, cfg),
            tick=watch.beat_on,
        )
        self.first_step, self.updated = 0, False  # `updated`: the current step has already changed the weights
        self.step_trainer.before_micro_batch = self.between_micro_batches
        self.meter = Meter(self.model, self.mesh)
        self.scores = ScoreKeeper(cfg, paths, self.mesh, self.step_trainer)
        if begin is not None:
            with watch.working(f"reading checkpoint {begin.step}"):
                self.resume(begin.checkpoint / TRAINER, begin.step)

    def offers_of(self, dtype: torch.dtype) -> Offers | None:
        """What sends weights to the servers without files; None: they read files. Raises ValueError if the servers' tensors are others."""
        if self.cfg.transfer is None:
            return None
        if self.publisher.converts:
            raise ValueError(
                f"this model's checkpoints have other tensors than the trainer (fused experts), which weight_broadcast.type="
                f"{self.cfg.transfer} does not convert; set weight_broadcast.type=filesystem"
            )
        from rlx.weights.memory import Offers, sender_of

        assert isinstance(self.cfg, Config)
        make = sender_of(self.cfg.transfer)
        return Offers(self.model, self.mesh, self.paths, dtype, self.cfg.weight_broadcast.timeout, make)

    def initial_model(self) -> str:
        """Folder or hub name of the initial model. Waits until the model exists and is on this host's disk.

        Raises Preempted if there is only one trainer process; several ranks leave later, together.
        """
        from rlx.weights.hub import fetch

        path = self.paths.initial_model
        self.watch.beat("waiting for the initial model")
        tick = self.watch.tick if self.mesh.world_size == 1 else self.watch.beat_on  # several ranks leave together, with a checkpoint

        def read() -> bytes:
            what = f"the initial model ({path})"
            wait_for(lambda: listed(path), what, INITIAL_MODEL_TIMEOUT, poll=0.05, tick=tick)
            return path.read_bytes()

        name = self.mesh.read(read).decode().strip()
        for wanted in filter(None, (name, self.cfg.ref.name)):
            fetch(wanted, self.watch.heartbeat)  # on every rank, before collectives: a download may exceed their timeout
        return name

    def resume(self, folder: Path, step: int) -> None:
        """Load the state of a checkpoint and make sure that its policy version is published for the servers."""
        from rlx.train.checkpoint import load

        progress = load(folder, self.step_trainer)
        assert progress.step == step, f"{folder} is the state after {progress.step} steps, not {step}"
        self.first_step = step
        self.publisher.ensure(step)
        log.info("resuming after %d steps, from %s", step, folder)

    def run(self) -> int:
        """Train until version `max_steps` is published. Returns the exit code."""
        self.validate(self.first_step)
        for step in range(self.first_step, self.cfg.max_steps):
            started = time.perf_counter()
            try:
                batch = self.receive(step)
                waited = time.perf_counter() - started
                self.checkpoints.wait_copied()
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
        """The batch of this step, the same on every rank. Raises Preempted on all ranks after a preemption notice."""
        while True:
            self.watch.beat(f"waiting for batch {step}", step)
            self.watch.give_way_with(self.mesh)
            try:
                batch = self.source.receive(step, self.tick)
                break
            except Preempted as why:
                if self.offers is None or not self.mesh.any(isinstance(why, Called)):
                    raise
            with self.watch.working(f"sending version {step}", step):
                self.offers.send()
        self.source.done(step)
        return batch

    def tick(self) -> None:
        """Called while waiting for a batch."""
        self.watch.tick()
        if self.offers is not None and self.offers.called():
            raise Called

    def train(self, step_batch: StepBatch) -> dict[str, float]:
        """Run the optimizer steps of a batch and return the step's metrics. Raises Preempted on all ranks if the step is abandoned."""
        from rlx.data.packing import pack

        ranks, tokens = self.mesh.num_data_ranks, self.cfg.micro_batch_tokens
        batch = pack(step_batch, rank=self.mesh.data_rank, ranks=ranks, tokens=tokens, loss_of=self.step_trainer.losses.loss_of)
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
        if self.mesh.first and self.step_trainer.warning is not None and "warning" not in self.summary:
            self.summary["warning"] = self.step_trainer.warning
            log.warning("step %d: %s", batch.step, self.step_trainer.warning)
            write_text(self.paths.kernels, json.dumps(self.summary) + "\n")
        seconds = values["time/forward_backward"] + values["time/optimizer"]
        return values | self.meter.measure(step_batch, seconds, iterations, self.step_trainer.forward_only)

    def publish(self, step: int, values: dict[str, float], started: float) -> None:
        """Gather version n+1, write the metrics of step n, then announce the version and delete old ones.

        The orchestrator continues when it sees the version, so the order of lines in `metrics.jsonl` is always the same.
        """
        version = step + 1
        # Without servers, only the last version and those of checkpoints are wanted.
        wanted = self.cfg.publishes(version) or self.checkpoints.due(version)
        began = time.perf_counter()
        if wanted:
            with self.watch.working(f"gathering version {version}", step):
                self.publisher.gather(version)
        if self.metrics is not None:
            ended = time.perf_counter()
            share = (values["time/forward_backward"] + values["time/optimizer"]) / (ended - started)
            times = {"time/broadcast": ended - began, "time/write_weights": self.publisher.seconds, "time/step": ended - started}
            times["time/send_weights"] = self.offers.seconds if self.offers is not None else 0.0
            self.metrics.write(step, values | times | {"perf/compute_frac": share})
        if wanted and self.mesh.first:
            protect = {*self.checkpoints.protected(), *not_evaluated(self.cfg, self.paths, version)}
            self.publisher.announce(version, keep_last=self.cfg.versions_kept, protect=protect)
        log.info("step %d: loss %.4f, gradient norm %.3f, version %d", step, values["loss/total"], values["optim/grad_norm"], version)
        if self.offers is not None and version < self.cfg.max_steps:  # the last one has files, because nobody is here to send it
            self.offers.offer(version)
            with self.watch.working(f"sending version {version}", step):
                self.offers.send_soon()

    def validate(self, version: int) -> None:
        """Measure the loss of a version on the validation rows, if that is due."""
        if self.cfg.validates(version) and self.validation is not None:
            self.watch.beat(f"validating version {version}", version)
            self.validation.record(version)

    def keep(self, step: int) -> None:
        """Save the state after `step` steps if a checkpoint is due. Also complete an earlier checkpoint whose files are written."""
        self.checkpoints.prepare()
        if self.checkpoints.due(step):
            self.save(step, f"writing checkpoint {step}")
        self.checkpoints.finish(wait=False)

    def save(self, step: int, phase: str) -> None:
        """Write a checkpoint, after its policy version is completely on the disk."""
        with self.watch.working(phase, step):
            self.publisher.wait()
            self.checkpoints.save(step)

    def finish(self, phase: str) -> None:
        """Wait for all background writes."""
        with self.watch.working(phase):
            self.publisher.close()
            if self.offers is not None:
                self.offers.close()
            self.checkpoints.close()

    def give_way(self, step: int) -> int:
        """Handle a preemption: save the state after `step` steps, record it in a file and return the exit code."""
        self.step_trainer.give_up()
        if step > self.first_step and not self.cfg.bench:
            if self.offers is not None:
                with self.watch.working(f"writing version {step}"):
                    self.publisher.ensure(step)
            self.save(step, f"writing checkpoint {step} before leaving")
        self.finish(f"writing checkpoint {step} before leaving")
        log.info("preempted after %d steps", step)
        if self.mesh.first:
            write_text(self.paths.preempted, json.dumps({"step": step}) + "\n")
        return 0 if "TORCHELASTIC_RUN_ID" in os.environ else LEFT  # torchrun treats any other code as a failure

    def between_micro_batches(self) -> None:
        """Send a heartbeat. Raises Preempted if the step should be abandoned; this is possible only before it changes the weights."""
        self.watch.progressed()
        if not self.updated:
            self.watch.give_up_with(self.mesh)
            if self.offers is not None and not self.mesh.grouped and self.offers.called():  # gathering would disturb sharded layers here
                self.offers.send()


def wait_for_servers(cfg: EvaluatedRun, paths: RunPaths, watch: Watch) -> None:
    """Wait until every server on our GPU has published its endpoint. While an engine starts, it measures the GPU's free memory, so the
    trainer must not take any. Raises WaitTimeout after `inference.startup_timeout`."""
    if cfg.hardware.device != "cuda" or not cfg.hardware.shared or not cfg.plays or not cfg.num_servers:
        return
    from rlx.inference.endpoints import read_endpoints

    watch.beat("waiting for the inference servers, which measure the GPU's memory before the trainer takes any")
    read_endpoints(paths, cfg.hardware.inference_replicas, cfg.inference.startup_timeout, watch.tick)


def main() -> int:
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m rlx.roles.trainer", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    paths = RunPaths(parser.parse_args().run_dir)

    def stop(number: int, _: object) -> None:
        if number == signal.SIGTERM and sigterm_is_a_notice():
            paths.ask_to_give_way()
        else:
            os._exit(128 + number)  # nothing to clean up: files are written atomically

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    cfg = load_training(paths.root)
    place = Place.of(os.environ)
    answer(paths, place.name or f"trainer_rank_{place.rank}")
    logging.basicConfig(level="WARNING" if place.rank else "INFO", format="%(asctime)s trainer %(message)s", stream=sys.stdout)
    set_cpu_threads(cfg.hardware.cpu_threads)
    if place.world_size != cfg.trainer_ranks:
        raise ValueError(f"{place.world_size} trainer processes were started, but hardware.trainer_processes requires {cfg.trainer_ranks}")

    import torch

    set_cpu_threads(cfg.hardware.cpu_threads)  # torch is loaded now
    if cfg.hardware.device == "cpu":
        keep_freed_memory()
        torch.use_deterministic_algorithms(True)
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  a debugging aid that costs time
    try:
        watch = Watch(paths, place.name, first=place.rank == 0, grace=cfg.launcher.grace)
        trainer = Trainer(cfg, paths, place, watch)
    except Preempted:  # there is no state to save yet
        return LEFT
    with tracked(cfg, paths, place.name or ""):
        code = trainer.run()
    trainer.mesh.close()
    return code


if __name__ == "__main__":
    sys.exit(say_full_disk(main))
