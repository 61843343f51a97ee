"""One run of a shared trainer, as every rank of the trainer holds it: its adapter's slot, trainer, source, versions, checkpoints, metrics.

It plays the part of `rlx.roles.trainer.Trainer` for one run, without the model and the loop. Everything that it writes is in the run's own
directory, in the usual format. So the run can go on in another shared trainer, or in one of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rlx.checkpoints.folders import TRAINER, read_start
from rlx.checkpoints.trainer import CheckpointFailed, Checkpoints
from rlx.config.load import load_run
from rlx.config.schema import Config, OptimTerms, split_terms
from rlx.config.shared_trainer import differing
from rlx.data.source import OrchestratorSource
from rlx.metrics import MetricsWriter
from rlx.models.load import DTYPES, check_length
from rlx.models.lora import peft_config
from rlx.models.policy import PolicyModel
from rlx.models.slots import Slot
from rlx.parallel.mesh import Mesh
from rlx.paths import RunPaths, listed, remove, write_text
from rlx.shared.membership import EvictedError, is_present, request_token
from rlx.train.build import losses_of, optimizer_of, served
from rlx.train.checkpoint import load
from rlx.train.reference import Reference
from rlx.train.step import PolicyTrainer
from rlx.train.summary import Summary
from rlx.types import StepBatch
from rlx.weights.files import ModelFiles, versions
from rlx.weights.hub import fetch
from rlx.weights.publish import Publisher, PublishFailed

log = logging.getLogger("rlx.trainer")


class HostedRun:
    """A run in a slot. Every rank makes the same calls."""

    def __init__(
        self,
        host: Config,
        paths: RunPaths,
        token: str,
        slot: int,
        model: PolicyModel,
        mesh: Mesh,
        tick: Callable[[], None],
    ) -> None:
        """Load the run in `paths`, which asks with `token`, from its checkpoint if it resumes.

        `host`: the trainer's configuration. `tick`: called while waiting.

        Raises ValueError if the run does not fit the trainer. Errors of building its loss and optimizer pass through.
        """
        self.cfg = cfg = load_run(paths.root)
        if problems := differing(host, cfg):
            raise ValueError("; ".join(problems))
        check_length(model, cfg.seq_len, served(cfg))  # the trainer's own seq_len says nothing of its runs' samples
        self.paths, self.token, self.slot, self.mesh, self.tick = paths, token, slot, mesh, tick
        view = Slot(model, slot)
        view.begin(cfg.lora, cfg.seed)
        optim_terms, optim = split_terms(cfg.optim, OptimTerms)
        self.trainer = PolicyTrainer(
            view,
            losses_of(cfg),
            optimizer_of(host, optim, view, mesh),
            schedule=cfg.scheduler,
            total_updates=cfg.max_steps * cfg.num_updates,
            max_norm=optim_terms.max_norm,
            mesh=mesh,
            reference=Reference(model, adapters=False) if cfg.uses_reference else None,
        )
        self.step, self.since = 0, time.perf_counter()
        if (start := read_start(paths)) is not None:
            self.step = load(start.checkpoint / TRAINER, self.trainer, alone=False).step
            assert self.step == start.step, f"{start.checkpoint} is the state after {self.step} steps, not {start.step}"
        self.first = self.step  # steps that were done before
        self.source = OrchestratorSource(paths, mesh, cfg.trainer.batch_timeout)
        self.metrics = MetricsWriter(paths.metrics, "trainer") if mesh.first else None
        self.summary = Summary(paths, mesh, self.trainer)
        source = model.base["name"]

        def begin() -> ModelFiles:
            if not mesh.first:
                return ModelFiles({})
            for version in versions(paths.weights):  # an earlier attempt wrote it after the run was rewound
                if version > self.step:
                    remove(paths.weights_of(version))
            write_text(paths.initial_model, f"{source}\n")
            return ModelFiles.of_adapters(peft_config(model.hf, cfg.lora, source), fetch(source, None))

        static = mesh.run_on_all_or_raise(begin)
        self.publisher = Publisher(view, mesh, paths, static, DTYPES[cfg.model.dtype])
        self.checkpoints = Checkpoints.of(cfg, paths, self.trainer, self.still_there)
        self.hurried = False  # True: an orchestrator that may hang must not hold up the other runs while this one leaves
        self.checkpoints.wait_for_orchestrator = False  # an orchestrator that is slow to add its part must not hold up the other runs
        if self.step:
            self.publisher.ensure(self.step)
        else:
            self.publisher.publish(0)  # as an adapter: a server must not compute the base model and adapters in one batch

    def still_there(self) -> None:
        """Called while rank 0 waits for the orchestrator's part of a checkpoint. Raises EvictedError if it is gone.

        The same where it must not be waited for.
        """
        self.tick()
        if self.hurried:
            raise EvictedError("its orchestrator has not added its part of the checkpoint")
        if why := self.gone():
            raise EvictedError(why)

    def gone(self) -> str | None:
        """On rank 0: why the orchestrator that asked is gone; None if it is alive.

        After a long step another attempt may be at work in the same directory, so a live orchestrator may not be the one that asked.
        """
        if not is_present(self.paths):
            return "its orchestrator has ended"
        return "it was started again" if request_token(self.paths) != self.token else None

    @property
    def name(self) -> str:
        return self.paths.root.name

    @property
    def done(self) -> bool:
        """Whether the last version is trained."""
        return self.step >= self.cfg.max_steps

    def ready(self) -> bool:
        """On rank 0: whether the batch of the run's next step is complete.

        A step that ends with a checkpoint waits until the one before it is complete, because saving would wait for it, with all runs.
        """
        if self.done or (self.checkpoints.writing and self.checkpoints.due(self.step + 1)):
            return False
        try:
            return listed(self.paths.batch_of(self.step))
        except OSError:  # the next look says why the run must leave
            return False

    def go_on(self) -> str | None:
        """On rank 0: complete the checkpoint if its parts are there. Returns why a checkpoint or version could not be written."""
        try:
            self.checkpoints.finish(wait=False)
            self.publisher.check()
        except (CheckpointFailed, PublishFailed) as error:
            return str(error)
        return None

    @property
    def settled(self) -> bool:
        """On rank 0: whether the last version is trained and its checkpoint complete."""
        return self.done and not self.checkpoints.writing

    def receive(self) -> StepBatch:
        """The batch of the run's next step, which is ready. Raises ValueError for a damaged file."""
        self.checkpoints.wait_copied()
        batch = self.source.receive(self.step, self.tick)
        self.source.done(self.step)
        return batch

    def after(self, values: dict[str, float], common: dict[str, float], started: float) -> None:
        """Publish the version that a step made, write the step's metrics, and save a checkpoint if one is due.

        `values`: the run's metrics. `common`: those of the whole common step. `started`: `time.perf_counter()` when it began. In the order
        of `rlx.roles.trainer`: the version appears after its metrics. Raises PublishFailed, CheckpointFailed, or RankLost if rank 0
        has failed. Raises EvictedError if the orchestrator is gone: the run's next attempt makes this step again, and may have begun.
        """
        gone = self.mesh.run_on_all_or_raise(lambda: self.gone() if self.mesh.first else None)
        if self.mesh.any(gone is not None):
            raise EvictedError(gone or "its orchestrator is gone")
        step, version = self.step, self.step + 1
        self.summary.after_step(step)
        seconds = values["time/forward_backward"] + values["time/optimizer"]
        began = time.perf_counter()
        self.mesh.run_on_all_or_raise(self.publisher.wait)
        self.publisher.gather(version)
        ended = time.perf_counter()

        def tell() -> None:
            if self.metrics is not None:
                times = {"time/wait_batch": started - self.since, "time/broadcast": ended - began, "time/step": ended - self.since}
                times |= {"time/write_weights": self.publisher.seconds, "time/send_weights": 0.0}
                self.metrics.write(step, values | common | times | {"perf/compute_frac": seconds / (ended - self.since)})
                self.publisher.announce(version, keep_last=self.cfg.versions_kept, protect=self.checkpoints.protected())

        self.mesh.run_on_all_or_raise(tell)
        log.info("%s: step %d: loss %.4f, gradient norm %.3f", self.name, step, values["loss/total"], values["optim/grad_norm"])
        self.step, self.since = version, time.perf_counter()
        if self.checkpoints.due(version):
            self.save()
        self.checkpoints.finish(wait=False)

    def save(self) -> None:
        """Write a checkpoint, after its version is completely on the disk."""
        self.mesh.run_on_all_or_raise(self.publisher.wait)
        self.checkpoints.save(self.step)

    def close(self) -> None:
        """Wait for what is being written. Raises PublishFailed, CheckpointFailed."""
        try:
            self.publisher.close()
        finally:
            try:
                self.checkpoints.close()
            finally:
                if self.metrics is not None:
                    self.metrics.close()
