"""Has a teacher score the samples of the environments that learn from one, before the batch goes to the trainer.

The teacher scores whole samples; the trainer reads the numbers of sampled tokens (`teacher_logprobs`). A sample that was not scored in
time is left out and counted, or ends the run (`teacher.unscored`). It never waits longer than `teacher.deadline`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.config.checks.teacher import taught
from rlx.config.schema import Config
from rlx.heartbeat import INTERVAL
from rlx.policy.teacher import Teacher, TeacherError
from rlx.types import StepBatch, TrainingSample


class Teaching:
    """The teacher of a run; without one, every batch is returned as it is."""

    def __init__(self, teacher: Teacher | None = None, envs: frozenset[str] = frozenset(), unscored: str = "fail") -> None:
        """`envs`: the environments whose samples it scores. `unscored`: see `TeacherConfig`."""
        self.teacher, self.envs, self.unscored = teacher, envs, unscored
        self.phase: str | None = None  # what it does now, in words

    @classmethod
    @asynccontextmanager
    async def of(cls, config: Config, tokenizer: Any, beat: Callable[[str], None]) -> AsyncIterator[Teaching]:
        """The run's teacher, checked against the policy's tokenizer. `beat` is called meanwhile. Raises TeacherError if it does not fit."""
        envs, t = frozenset(taught(config)), config.teacher
        if not envs:
            yield cls()
            return
        keys: dict[str, Any] = {"model": t.model, "api_key": t.api_key, "batch_size": t.batch_size, "max_concurrent": t.max_concurrent}
        async with Teacher(t.base_url, **keys, timeout=t.timeout, deadline=t.deadline) as teacher:
            check = asyncio.ensure_future(teacher.check(tokenizer, config.seq_len))
            while not check.done():
                beat(f"waiting for the teacher ({', '.join(t.base_url)})")
                await asyncio.wait([check], timeout=INTERVAL / 2)
            check.result()
            yield cls(teacher, envs, t.unscored)

    async def score(self, batch: StepBatch) -> tuple[StepBatch, dict[str, float]]:
        """The batch with the teacher's log-probabilities, and metrics.

        Raises TeacherError with `unscored` = `fail`, for a refusal, or for tokens to distil that were not sampled at temperature 1.
        """
        wanted = [sample for samples in batch.mini_batches for sample in samples if sample.env in self.envs and sample.loss_mask.any()]
        if self.teacher is None:
            return batch, {}
        _refuse_other_temperatures(wanted)
        began, self.phase = time.monotonic(), f"the teacher scores batch {batch.step}"
        try:
            scores = await self.teacher.score([sample.token_ids for sample in wanted])
        finally:
            self.phase = None
        if scores.missing and self.unscored == "fail":
            trouble = f" The trouble: {'; '.join(scores.trouble[-3:])}." if scores.trouble else ""
            raise TeacherError(
                f"the teacher did not score {scores.missing} of {len(wanted)} samples of step {batch.step} in {self.teacher.deadline:g} s "
                f"(teacher.deadline).{trouble} teacher.unscored=drop would leave such samples out"
            )
        found = {id(sample): logprobs for sample, logprobs in zip(wanted, scores.logprobs, strict=True)}
        mini_batches = tuple(tuple(one for sample in samples for one in _taught(sample, found)) for samples in batch.mini_batches)
        values = {"teacher/unscored": float(scores.missing), "teacher/retries": float(scores.retries)}
        return replace(batch, mini_batches=mini_batches), values | {"time/teacher": time.monotonic() - began}


def _refuse_other_temperatures(samples: list[TrainingSample]) -> None:
    """Raise TeacherError for tokens to distil whose request asked for another temperature than the teacher's."""
    for sample in samples:
        read = sample.loss_mask if sample.ref_kl_weights is None else sample.loss_mask & (sample.ref_kl_weights != 0)
        if (other := read & (sample.temperature != 1)).any():
            raise TeacherError(
                f"the environment {sample.env} sampled {int(other.sum())} tokens of rollout {sample.group}/{sample.member} at "
                f"temperature {float(sample.temperature[other][0]):g}, but the teacher's log-probabilities are at temperature 1: the "
                "difference is no KL. Let its requests ask for no temperature, or for 1; give these tokens a weight of 0 "
                "(ref_kl_weights); or use ref.name, which the trainer scores at the same temperature"
            )


def _taught(sample: TrainingSample, found: dict[int, Any]) -> list[TrainingSample]:
    """The sample with its scores; nothing if it needs some and has none."""
    if id(sample) not in found:
        return [sample]
    logprobs = found[id(sample)]
    if logprobs is None:
        return []
    return [replace(sample, teacher_logprobs=np.where(sample.loss_mask, logprobs, np.float32(np.nan)))]
