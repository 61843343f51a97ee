"""Writes the files of each step beside the main loop, one step at a time. `rlx.rollout.record` has the formats."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rlx.config.schema import OrchestratorConfig
from rlx.paths import RunPaths
from rlx.rollout.failures import Failures
from rlx.rollout.record import LeftOut, record_batch, records, write_rollouts
from rlx.tracking import Tracker
from rlx.types import Group, Rollout, StepBatch


class StepRecorder:
    """Writes the rollouts and the batch of each step to the disk and to the tracker."""

    def __init__(self, paths: RunPaths, config: OrchestratorConfig, tracker: Tracker | None) -> None:
        self.paths, self.config, self.tracker = paths, config, tracker
        self.failures = Failures()
        self.saved = -1  # the last step whose files are complete
        self._saving: asyncio.Future[None] | None = None

    async def begin(self, groups: Sequence[Group], failures: Sequence[Rollout], left_out: LeftOut, batch: StepBatch) -> None:
        """Wait until the step before is written, then start to write this step. Raises the error of the step before."""
        await self.wait()
        self._saving = asyncio.ensure_future(asyncio.to_thread(self._save, groups, failures, left_out, batch))

    async def wait(self) -> int:
        """Wait for the write in progress. Returns the last step whose files are complete. Raises the error of the write."""
        if self._saving is not None:
            await asyncio.shield(self._saving)  # a checkpoint needs the files even if the work on the step is cancelled
        return self.saved

    def _save(self, groups: Sequence[Group], failures: Sequence[Rollout], left_out: LeftOut, batch: StepBatch) -> None:
        step = batch.step
        if self.config.save_batches:
            record_batch(self.paths.recorded_of(step), batch)
        if self.config.save_rollouts:
            write_rollouts(self.paths.rollouts_of(step), groups, failures, left_out, tokens=self.config.record_tokens)
        self.failures.add(rollout for group in groups for rollout in group.rollouts)
        self.failures.add(rollout for _, rollouts in left_out for rollout in rollouts)
        self.failures.add(failures)
        self.failures.write(self.paths.failures)
        self.saved = step
        if self.tracker is not None and self.tracker.wants_rollouts(step):
            self.tracker.rollouts(step, list(records(groups)))
