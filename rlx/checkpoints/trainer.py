"""The trainer's side of checkpoints: when one is due, writing it now or in the background, completing it, pruning old ones.

    begin (rank 0)  →  every rank writes its shards  →  the orchestrator adds its part  →  COMPLETE, rename  →  prune

A checkpoint that fails ends the run: continuing would risk losing all later work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from rlx.checkpoints import folders
from rlx.checkpoints.folders import kept
from rlx.checkpoints.orchestrator import STATE
from rlx.config.eval_envs import is_due
from rlx.config.schema import CkptConfig, Config, TrainingRoot
from rlx.paths import RunPaths, listed
from rlx.polling import wait_for
from rlx.train.checkpoint import Saver, Saving, TrainerProgress
from rlx.train.step import PolicyTrainer
from rlx.weights.shapes import digest_of

log = logging.getLogger(__name__)

ORCHESTRATOR_TIMEOUT = 300.0  # seconds for the orchestrator's part, which is already in its memory


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written. The message says why and names the last good one."""


class Checkpoints:
    """The checkpoints of one run. Every rank has this object and makes the same calls."""

    def __init__(
        self,
        paths: RunPaths,
        config: CkptConfig,
        trainer: PolicyTrainer,
        *,
        last: int,
        facts: Mapping[str, Any],
        with_orchestrator: bool = True,
        is_evaluated: Callable[[int], bool] = lambda _: False,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`last` is the run's last step. `facts` go into the marker, for people to read. `tick` is called while waiting.

        `is_evaluated`: whether the policy version of a step is evaluated; `ckpt.keep_best` waits for that.
        """
        self.paths, self.config, self.trainer, self.last = paths, config, trainer, last
        self.facts, self.with_orchestrator, self.is_evaluated, self.tick = facts, with_orchestrator, is_evaluated, tick
        self.mesh, self.first = trainer.mesh, trainer.mesh.first
        self.wait_for_orchestrator = True  # False: `save` does not wait for the orchestrator's part; call `finish(wait=False)` now and then
        self.saved: int | None = None  # step of this attempt's last complete checkpoint
        self._saver: Saver | None = None
        self._pending: tuple[int, Saving] | None = None
        self._pruner = ThreadPoolExecutor(1)
        self._pruning: Future[list[int]] | None = None

    @classmethod
    def of(cls, cfg: TrainingRoot, paths: RunPaths, trainer: PolicyTrainer, tick: Callable[[], None]) -> Checkpoints:
        """The checkpoints that the configuration wants: those of `ckpt`, or none in a benchmark."""
        return cls(
            *(paths, replace(cfg.ckpt, interval=None) if cfg.bench else cfg.ckpt, trainer),
            last=cfg.max_steps,
            facts={"ranks": trainer.mesh.world_size, "model": cfg.model.name},
            with_orchestrator=isinstance(cfg, Config) and cfg.generates_rollouts,
            is_evaluated=partial(is_due, cfg),
            tick=tick,
        )

    def due(self, step: int) -> bool:
        """Whether to save the state after `step` steps."""
        return self.config.interval is not None and (step % self.config.interval == 0 or step == self.last)

    def save(self, step: int) -> None:
        """Write the state after `step` steps. With `ckpt.save_async`, `finish` completes it later.

        Raises CheckpointFailed, or RankLost if rank 0 could not do its part.
        """
        self.mesh.run_on_all_or_raise(self.finish)
        if self.saved == step:
            return
        folder = folders.writing(self.paths, step)
        self.mesh.run_on_all_or_raise(lambda: self._or_fail(step, lambda: self._begin(step)))
        progress = TrainerProgress(step, self.trainer.updates)
        saver = self._saver = self._saver or Saver(self.trainer, digest_of, in_background=self.config.save_async)
        saving = self._or_fail(step, lambda: saver.save(folder / folders.TRAINER, progress))
        self._pending = (step, saving)
        if not self.config.save_async:
            self.finish(wait=self.wait_for_orchestrator)

    def wait_copied(self) -> None:
        """Return when the trainer may change its state again."""
        if self._pending is not None:
            step, saving = self._pending
            self._or_fail(step, saving.wait_copied)

    def finish(self, *, wait: bool = True) -> None:
        """Complete the checkpoint being written in the background. If it is not ready, wait for it, or with `wait=False` return."""
        if self._pending is None or not (
            wait or (self._pending[1].done and (self.wait_for_orchestrator or self._answered(self._pending[0])))
        ):
            return
        (step, saving), self._pending = self._pending, None
        self._or_fail(step, lambda: self._complete(step, saving))
        self.saved = step

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is not complete yet."""
        return self._pending is not None

    def _begin(self, step: int) -> None:
        self._finish_pruning()  # the new checkpoint may need the freed space
        if not self.first:
            return
        folder = folders.begin(self.paths, step)
        if self.with_orchestrator:
            # This host looks into it before the orchestrator's host writes there, unless that one has already seen the new folder.
            (folder / folders.ORCHESTRATOR).mkdir(exist_ok=True)

    def _answered(self, step: int) -> bool:
        """Whether the orchestrator's part of a checkpoint is there; only rank 0 waits for it."""
        return not self.first or not self.with_orchestrator or listed(self._part(step))

    def _part(self, step: int) -> Path:
        return folders.writing(self.paths, step) / folders.ORCHESTRATOR / STATE

    def protected(self) -> set[int]:
        """Steps whose weights must be kept, because a checkpoint of that step exists or is being written."""
        return {*folders.steps(self.paths), *([self._pending[0]] if self._pending else [])}

    def close(self) -> None:
        """Wait for what is being written, and end the threads. Raises CheckpointFailed, OSError."""
        try:
            self.finish()
            self._finish_pruning()
        finally:
            self._pruner.shutdown()
            if self._saver is not None:
                self._saver.close()

    def _complete(self, step: int, saving: Saving) -> None:
        files = {f"{folders.TRAINER}/{name}": record for name, record in saving.files().items()}
        if not self.first:
            return
        if self.with_orchestrator:
            name = f"{folders.ORCHESTRATOR}/{STATE}"
            path = self._part(step)
            wait_for(lambda: listed(path), f"the orchestrator's part of checkpoint {step} ({path})", ORCHESTRATOR_TIMEOUT, tick=self.tick)
            content = path.read_bytes()
            files[name] = {"size": len(content), "xxh3": xxhash.xxh3_64(content).hexdigest()}
        if self.paths.metrics.exists():
            folders.sync(self.paths.metrics)
        folder = folders.finish(self.paths, step, files, self.facts)
        size = sum(record["size"] for record in files.values())
        log.info("checkpoint %d: %.1f MiB in %s", step, size / 2**20, folder)
        # Deleting gigabytes takes time; the trainer need not wait for it.
        self._pruning = self._pruner.submit(self._prune)

    def _prune(self) -> list[int]:
        best = self.config.keep_best if self.is_evaluated(self.last) else None  # a replay has no evaluations
        protect = kept(self.paths, best, self.is_evaluated) if best is not None else ()
        return folders.prune(self.paths, self.config.keep_last, self.config.keep_interval, protect)

    def _finish_pruning(self) -> None:
        """Wait until old checkpoints are deleted. Raises OSError if deleting failed."""
        if self._pruning is not None:
            self._pruning.result()

    def _or_fail(self, step: int, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            if self.first:
                folders.abandon(self.paths, step)
            good = folders.steps(self.paths)
            last = f"the last complete checkpoint is {self.paths.checkpoint_of(good[-1])}" if good else "there is no earlier one"
            raise CheckpointFailed(
                f"the checkpoint of step {step} could not be written: {type(error).__name__}: {error}; {last}. "
                "Free some space (or lower ckpt.keep_last, raise ckpt.interval), then continue with resume=latest"
            ) from error
