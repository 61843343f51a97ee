"""Has teachers score the samples of the environments that learn from one: each group as it finishes, while others are still sampled.

    a group finishes ─► requests of up to `teacher.batch_size` samples ─► the batch waits for what is missing

The teacher scores whole samples; the trainer reads the numbers of sampled tokens (`teacher_logprobs`). The teacher of self-distillation
reads the demonstration in the place of the prompt. A sample that was not scored in time is left out and counted, or ends the run
(`teacher.on_timeout`): a batch never waits longer than `teacher.deadline`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.arrays import Float, Int
from rlx.config.checks.objective import scored_by_teacher, self_distilled
from rlx.config.objectives import loss_of
from rlx.config.schema import Config
from rlx.heartbeat import INTERVAL
from rlx.inference.endpoints import Endpoint
from rlx.policy.teacher_client import TeacherClient, TeacherError
from rlx.rollout.samples import branches_of
from rlx.types import Rollout, StepBatch, TrainingSample

Which = tuple[int, int, int]  # a sample: group, member, number among the samples of its rollout


class TeacherLogprobs:
    """The teachers of a run; without one, every batch is returned as it is."""

    def __init__(
        self,
        teachers: Mapping[str, TeacherClient] | None = None,
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
        self._requests: dict[tuple[int, int], tuple[list[asyncio.Task[None]], int]] = {}  # by group and member; with the batch of the time
        self._logprobs: dict[Which, Float] = {}  # [L] of each sample that was scored
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
    ) -> AsyncIterator[TeacherLogprobs]:
        """The run's teachers, checked against the policy's tokenizer. `beat` is called meanwhile. For the others see `TeacherClient`.

        Raises TeacherError if one does not fit.
        """
        t = config.teacher
        keys: dict[str, Any] = {name: getattr(t, name) for name in ("batch_size", "max_concurrent", "timeout", "deadline")}
        teachers: dict[str, TeacherClient] = {}
        async with AsyncExitStack() as stack:
            if envs := scored_by_teacher(config):
                other = await stack.enter_async_context(TeacherClient(t.base_url, model=t.model, api_key=t.api_key, **keys))
                teachers |= dict.fromkeys(envs, other)
            if envs := self_distilled(config):
                itself = await stack.enter_async_context(TeacherClient([], own=own, version=version, adapter=adapter, **keys))
                teachers |= dict.fromkeys(envs, itself)
            for teacher in dict.fromkeys(teachers.values()):
                check = asyncio.ensure_future(teacher.check(tokenizer, config.seq_len))
                while not check.done():
                    beat(f"waiting for the teacher ({', '.join(server.url for server in teacher.servers())})")
                    await asyncio.wait([check], timeout=INTERVAL / 2)
                check.result()
            unread = frozenset(name for name in teachers if loss_of(config, name).get("mask_overlong"))
            strategy, keeps = config.orchestrator.trajectory_strategy, config.max_async_level + 2
            scoring = cls(teachers, t.on_timeout, strategy=strategy, unread=unread, keeps=keeps)
            try:
                yield scoring
            finally:
                scoring.close()

    def begin(self, rollouts: Sequence[Rollout]) -> None:
        """A group has finished: have its samples scored, unless they already are. Raises TeacherError for a sample that is too long."""
        env = rollouts[0].task.env
        teacher = self.teachers.get(env)
        new = [one for one in rollouts if _key(one) not in self._requests and not (env in self.unread and one.is_truncated)]
        if teacher is None or not new:
            return
        samples: list[tuple[Which, Int, int, int]] = []
        for rollout in new:
            for number, (ids, prompt, start) in enumerate(_sequences(rollout, self.strategy)):
                if teacher.context is not None and len(ids) >= teacher.context:
                    raise TeacherError(
                        f"a sample of {env}, example {rollout.task.example_id}, has {len(ids)} tokens with what the teacher "
                        f"reads; its scores need one more, but the servers take {teacher.context}.\n"
                        "  fix: raise their context (the run's own: inference.max_model_len), or lower seq_len"
                    )
                samples.append(((*_key(rollout), number), ids, prompt, start))
        samples.sort(key=lambda sample: len(sample[1]))  # in one request, no short sample waits for a long one
        parts = [samples[place : place + teacher.batch_size] for place in range(0, len(samples), teacher.batch_size)]
        requests = [asyncio.create_task(self._score(teacher, part)) for part in parts]
        self._requests |= {_key(rollout): (requests, self._batches) for rollout in new}

    async def _score(self, teacher: TeacherClient, samples: Sequence[tuple[Which, Int, int, int]]) -> None:
        found = await teacher.score([ids for _, ids, _, _ in samples])
        for (which, _, prompt, start), logprobs in zip(samples, found, strict=True):
            self._logprobs[which] = np.concatenate([np.zeros(start, dtype=np.float32), logprobs[prompt:]])

    async def score(self, batch: StepBatch, groups: Sequence[Sequence[Rollout]]) -> tuple[StepBatch, dict[str, float]]:
        """The batch with the teachers' log-probabilities, and metrics. `groups`: what the batch was made of.

        Raises TeacherError with `unscored` = `fail`, for a refusal, or for tokens to distil that were not sampled at temperature 1.
        """
        if not self.teachers:
            return batch, {}
        for rollouts in groups:  # those of a checkpoint; the others have begun
            self.begin(rollouts)
        numbers: Counter[tuple[int, int]] = Counter()
        wanted: dict[int, tuple[TrainingSample, Which]] = {}  # by the sample's id
        for sample in (one for part in batch.mini_batches for one in part if one.env in self.teachers):
            if sample.loss_mask.any():
                _refuse_other_temperatures(sample)
                wanted[id(sample)] = sample, (sample.group, sample.member, numbers[sample.group, sample.member])
            numbers[sample.group, sample.member] += 1
        began, self.phase = time.monotonic(), f"the teacher scores batch {batch.step}"
        clients, deadline = set(self.teachers.values()), max(teacher.deadline for teacher in self.teachers.values())
        try:
            await _wait({request for _, which in wanted.values() for request in self._requests[which[:2]][0]}, deadline)
        finally:
            self.phase = None
        missing = [sample for sample, which in wanted.values() if which not in self._logprobs]
        if missing and self.unscored == "fail":
            trouble = [text for client in clients for text in client.trouble]
            raise TeacherError(
                f"the teacher did not score {len(missing)} of {len(wanted)} samples of step {batch.step} in {deadline:g} s "
                f"(teacher.deadline). The trouble: {'; '.join(trouble[-3:]) or 'none'}.\n"
                "  fix: teacher.on_timeout=drop leaves such samples out"
            )
        values = {
            "teacher/unscored": float(len(missing)),
            "teacher/unscored_tokens": float(sum(int(sample.loss_mask.sum()) for sample in missing)),
            "teacher/retries": float(sum(client.take_retries() for client in clients)),
            "time/teacher": time.monotonic() - began,
        }
        gone = set(map(id, missing))
        scores = {number: self._logprobs[which] for number, (_, which) in wanted.items() if number not in gone}
        mini_batches = tuple(
            tuple(_with_scores(sample, scores.get(id(sample))) for sample in part if id(sample) not in gone) for part in batch.mini_batches
        )
        self._batches += 1  # what this batch has taken is forgotten, and what no batch will take: groups that were dropped meanwhile
        self._requests = {key: one for key, one in self._requests.items() if key not in numbers and self._batches - one[1] <= self.keeps}
        self._logprobs = {which: one for which, one in self._logprobs.items() if which[:2] in self._requests}
        return replace(batch, mini_batches=mini_batches), values

    def close(self) -> None:
        """Cancel all requests."""
        for requests, _ in self._requests.values():
            for request in requests:
                request.cancel()


async def _wait(requests: set[asyncio.Task[None]], deadline: float) -> None:
    """Wait until all have ended, at most this long, and cancel the rest. Raises the error of one that failed."""
    if not requests:
        return
    done, late = await asyncio.wait(requests, timeout=deadline, return_when=asyncio.FIRST_EXCEPTION)
    for task in late:
        task.cancel()
    for task in done:
        task.result()


def _key(rollout: Rollout) -> tuple[int, int]:
    return rollout.task.index, rollout.member


def _sequences(rollout: Rollout, strategy: str) -> Iterator[tuple[Int, int, int]]:
    """(tokens that the teacher reads [L'], tokens of the prompt in them, and in the sample) of each sample of a rollout."""
    trace = rollout.trace
    for branch in branches_of(trace, strategy):
        ids, first = trace.ids(branch.path[-1]), min(branch.own)
        start = len(trace.ids(first)) - len(trace.nodes[first].logprobs)
        shown = trace.teacher_prompt(branch.path, start)
        prompt = ids[:start] if shown is None else shown
        yield np.concatenate([prompt, ids[start:]]), len(prompt), start


def _refuse_other_temperatures(sample: TrainingSample) -> None:
    """Raise TeacherError for tokens to distil whose request asked for another temperature than the teacher's."""
    read = sample.loss_mask if sample.ref_kl_weights is None else sample.loss_mask & (sample.ref_kl_weights != 0)
    if (other := read & (sample.temperature != 1)).any():
        raise TeacherError(
            f"the environment {sample.env} sampled {int(other.sum())} tokens of rollout {sample.group}/{sample.member} at "
            f"temperature {float(sample.temperature[other][0]):g}, but the teacher's log-probabilities are at temperature 1: the "
            "difference is no KL.\n  fix: let its requests ask for no temperature, or for 1; give these tokens a weight of 0 "
            "(ref_kl_weights); or use ref.name, which the trainer scores at the same temperature"
        )


def _with_scores(sample: TrainingSample, logprobs: Float | None) -> TrainingSample:
    """The sample with its scores [L]; as it is if it needs none."""
    if logprobs is None:
        return sample
    return replace(sample, teacher_logprobs=np.where(sample.loss_mask, logprobs, np.float32(np.nan)))
