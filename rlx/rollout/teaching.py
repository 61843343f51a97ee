"""Has teachers score the samples of the environments that learn from one: each group as it finishes, while others are still played.

    a group finishes ─► requests of up to `teacher.batch_size` samples ─► the batch waits for what is missing

The teacher scores whole samples; the trainer reads the numbers of sampled tokens (`teacher_logprobs`). The teacher of self-distillation
reads the demonstration in the place of the prompt. A sample that was not scored in time is left out and counted, or ends the run
(`teacher.unscored`): a batch never waits longer than `teacher.deadline`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlx.arrays import Float, Int
from rlx.config.checks.objective import shown, taught
from rlx.config.objectives import loss_of
from rlx.config.schema import Config
from rlx.heartbeat import INTERVAL
from rlx.inference.endpoints import Endpoint
from rlx.policy.teacher import Scores, Teacher, TeacherError
from rlx.rollout.samples import branches_of
from rlx.types import Rollout, StepBatch, TrainingSample


@dataclass(frozen=True, slots=True)
class _Request:
    """The samples of some rollouts that finished together."""

    sequences: list[Int]  # [L'] each
    skipped: list[tuple[int, int]]  # of each: tokens of its own prompt, and of the policy's in the sample
    scores: Scores
    asking: asyncio.Task[Scores]
    batch: int  # number of the batch that was collected when it began


class Teaching:
    """The teachers of a run; without one, every batch is returned as it is."""

    def __init__(
        self,
        teachers: Mapping[str, Teacher] | None = None,
        unscored: str = "fail",
        *,
        strategy: str = "interleaved",
        unread: frozenset[str] = frozenset(),
        keeps: int = 3,
    ) -> None:
        """`teachers`: by the environments whose samples they score. `unscored`: see `TeacherConfig`. `strategy`: how turns become samples.

        `unread`: environments whose truncated rollouts give no samples. `keeps`: batches for which the scores of a group are kept.
        """
        self.teachers, self.unscored, self.strategy, self.unread, self.keeps = dict(teachers or {}), unscored, strategy, unread, keeps
        self.phase: str | None = None  # what it does now, in words
        self._asked: dict[tuple[int, int], tuple[_Request, int]] = {}  # by group and member: the request, the place of its first sample
        self._batches = 0

    @classmethod
    @asynccontextmanager
    async def of(
        cls,
        config: Config,
        tokenizer: Any,
        beat: Callable[[str], None],
        own: Callable[[], Sequence[Endpoint]] = lambda: (),
        version: Callable[[], int] = lambda: 0,
        adapter: Callable[[], str | None] = lambda: None,
    ) -> AsyncIterator[Teaching]:
        """The run's teachers, checked against the policy's tokenizer. `beat` is called meanwhile. For the others see `Teacher`.

        Raises TeacherError if one does not fit.
        """
        t = config.teacher
        keys: dict[str, Any] = {name: getattr(t, name) for name in ("batch_size", "max_concurrent", "timeout", "deadline")}
        teachers: dict[str, Teacher] = {}
        async with AsyncExitStack() as stack:
            if envs := taught(config):
                other = Teacher(t.base_url, model=t.model, api_key=t.api_key, **keys)
                teachers |= dict.fromkeys(envs, await stack.enter_async_context(other))
            if envs := shown(config):
                teachers |= dict.fromkeys(
                    envs, await stack.enter_async_context(Teacher([], own=own, version=version, adapter=adapter, **keys))
                )
            for teacher in dict.fromkeys(teachers.values()):
                check = asyncio.ensure_future(teacher.check(tokenizer, config.seq_len))
                while not check.done():
                    beat(f"waiting for the teacher ({', '.join(server.url for server in teacher.servers())})")
                    await asyncio.wait([check], timeout=INTERVAL / 2)
                check.result()
            unread = frozenset(name for name in teachers if loss_of(config, name).get("mask_overlong"))
            strategy, keeps = config.orchestrator.trajectory_strategy, config.max_async_level + 2
            teaching = cls(teachers, t.unscored, strategy=strategy, unread=unread, keeps=keeps)
            try:
                yield teaching
            finally:
                teaching.close()

    def begin(self, rollouts: Sequence[Rollout]) -> None:
        """A group has finished: have its samples scored, unless they already are. Raises TeacherError for a sample that is too long."""
        env = rollouts[0].task.env
        teacher = self.teachers.get(env)
        new = [one for one in rollouts if (one.task.index, one.member) not in self._asked and not (env in self.unread and one.is_truncated)]
        if teacher is None or not new:
            return
        sequences: list[Int] = []
        skipped: list[tuple[int, int]] = []
        firsts: dict[tuple[int, int], int] = {}
        for rollout in new:
            firsts[rollout.task.index, rollout.member] = len(sequences)
            for ids, own in _sequences(rollout, self.strategy):
                if teacher.context is not None and len(ids) >= teacher.context:
                    raise TeacherError(
                        f"a sample of {env}, example {rollout.task.example_id}, has {len(ids)} tokens with what the teacher "
                        f"reads; its scores need one more, but the servers take {teacher.context}. Raise their context (the run's own: "
                        "inference.max_model_len), or lower seq_len"
                    )
                sequences.append(ids)
                skipped.append(own)
        scores = Scores([None] * len(sequences))
        request = _Request(sequences, skipped, scores, asyncio.create_task(teacher.score(sequences, scores)), self._batches)
        self._asked |= {which: (request, first) for which, first in firsts.items()}

    async def score(self, batch: StepBatch, groups: Sequence[Sequence[Rollout]]) -> tuple[StepBatch, dict[str, float]]:
        """The batch with the teachers' log-probabilities, and metrics. `groups`: what the batch was made of.

        Raises TeacherError with `unscored` = `fail`, for a refusal, or for tokens to distil that were not sampled at temperature 1.
        """
        if not self.teachers:
            return batch, {}
        for rollouts in groups:  # those of a checkpoint; the others have begun
            self.begin(rollouts)
        samples = [sample for part in batch.mini_batches for sample in part if sample.env in self.teachers]
        seen: Counter[tuple[int, int]] = Counter()
        places: dict[int, tuple[_Request, int]] = {}  # by the sample's id
        for sample in samples:
            which = sample.group, sample.member
            if sample.loss_mask.any():
                request, first = self._asked[which]
                places[id(sample)] = request, first + seen[which]
            seen[which] += 1
        wanted = [sample for sample in samples if id(sample) in places]
        _refuse_other_temperatures(wanted)
        began, self.phase = time.monotonic(), f"the teacher scores batch {batch.step}"
        requests = list({id(request): request for request, _ in places.values()}.values())
        deadline = max(teacher.deadline for teacher in self.teachers.values())
        try:
            await self._wait([request.asking for request in requests], deadline)
        finally:
            self.phase = None
        found = {which: _found(*place) for which, place in places.items()}
        missing = [sample for sample in wanted if found[id(sample)] is None]
        if missing and self.unscored == "fail":
            trouble = list(dict.fromkeys(one for request in requests for one in request.scores.trouble))
            raise TeacherError(
                f"the teacher did not score {len(missing)} of {len(wanted)} samples of step {batch.step} in {deadline:g} s "
                f"(teacher.deadline). The trouble: {'; '.join(trouble[-3:]) or 'none'}. teacher.unscored=drop would leave such samples out"
            )
        mini_batches = tuple(tuple(one for sample in part for one in _taught(sample, found)) for part in batch.mini_batches)
        values = {
            "teacher/unscored": float(len(missing)),
            "teacher/unscored_tokens": float(sum(int(sample.loss_mask.sum()) for sample in missing)),
            "teacher/retries": float(sum(request.scores.retries for request in requests)),
            "time/teacher": time.monotonic() - began,
        }
        self._batches += 1  # what this batch has taken is forgotten, and what no batch will take: groups that were dropped meanwhile
        taken = {id(request) for request in requests}
        self._asked = {
            which: one for which, one in self._asked.items() if id(one[0]) not in taken and self._batches - one[0].batch <= self.keeps
        }
        return replace(batch, mini_batches=mini_batches), values

    async def _wait(self, asking: Sequence[asyncio.Task[Scores]], deadline: float) -> None:
        """Wait until all have ended, at most this long. Raises the error of one that failed."""
        if not asking:
            return
        done, late = await asyncio.wait(asking, timeout=deadline, return_when=asyncio.FIRST_EXCEPTION)
        for task in late:
            task.cancel()
        for task in done:
            task.result()

    def close(self) -> None:
        """Give up everything that is being asked."""
        for request, _ in self._asked.values():
            request.asking.cancel()


def _found(request: _Request, number: int) -> Float | None:
    """The log-probabilities of a sample [L]; None if it was not scored."""
    if (logprobs := request.scores.logprobs[number]) is None:
        return None
    own, policys = request.skipped[number]
    return np.concatenate([np.zeros(policys, dtype=np.float32), logprobs[own:]])


def _sequences(rollout: Rollout, strategy: str) -> Iterator[tuple[Int, tuple[int, int]]]:
    """(tokens that the teacher reads [L'], tokens of the prompt in them and in the sample) of each sample of a rollout."""
    trace = rollout.trace
    for branch in branches_of(trace, strategy):
        ids, first = trace.ids(branch.path[-1]), min(branch.own)
        start = len(trace.ids(first)) - len(trace.nodes[first].logprobs)
        shown = trace.teacher_prompt(branch.path, start)
        prompt = ids[:start] if shown is None else shown
        yield np.concatenate([prompt, ids[start:]]), (len(prompt), start)


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


def _taught(sample: TrainingSample, found: Mapping[int, Float | None]) -> list[TrainingSample]:
    """The sample with its scores; nothing if it needs some and has none."""
    if id(sample) not in found:
        return [sample]
    logprobs = found[id(sample)]
    if logprobs is None:
        return []
    return [replace(sample, teacher_logprobs=np.where(sample.loss_mask, logprobs, np.float32(np.nan)))]
