"""Has teachers score the samples of the environments that learn from one: each group as it finishes, while others are still played.

    a group finishes ─► its samples' tokens wait ─► requests of `teacher.batch_size` ─► the batch waits for what is missing

The teacher scores whole samples; the trainer reads the numbers of sampled tokens (`teacher_logprobs`). The teacher of self-distillation
reads the demonstration in the place of the prompt. A request waits for a full batch only while others are in flight. A
sample that was not scored in time is left out and counted, or ends the run (`teacher.unscored`): a batch never waits longer than
`teacher.deadline`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
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

Place = tuple[int, int, int]  # group, member, number of the sample among those of its rollout


@dataclass(slots=True, eq=False)
class _Request:
    """Sequences that are asked for together."""

    sequences: list[Int]  # [L'] each
    skipped: list[tuple[int, int]]  # of each: tokens of its own prompt, and of the policy's in the sample
    scores: Scores
    batch: int  # number of the batch that was collected when it began
    asking: asyncio.Task[Scores] | None = None


@dataclass(slots=True)
class _Desk:
    """What one teacher has to do."""

    waiting: list[tuple[Place, Int, tuple[int, int]]] = field(default_factory=list)
    in_flight: int = 0


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
        self._desks = {id(teacher): _Desk() for teacher in self.teachers.values()}
        self._asked: dict[Place, tuple[_Request, int]] = {}  # the request, and the place in it
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
        if teacher is None:
            return
        desk = self._desks[id(teacher)]
        for rollout in rollouts:
            if env in self.unread and rollout.is_truncated:
                continue
            for number, (ids, skipped) in enumerate(_sequences(rollout, self.strategy)):
                place = (rollout.task.index, rollout.member, number)
                if teacher.context is not None and len(ids) >= teacher.context:
                    what = "with its demonstration " if skipped[0] != skipped[1] else ""
                    raise TeacherError(
                        f"a sample of {env}, example {rollout.task.example_id}, has {what}{len(ids)} tokens; a request for its scores "
                        f"needs one more, but they take {teacher.context}. Raise the servers' context (the "
                        "run's own: inference.max_model_len), or lower seq_len"
                    )
                if place not in self._asked and all(place != one[0] for one in desk.waiting):
                    desk.waiting.append((place, ids, skipped))
        self._ask(teacher)

    async def score(self, batch: StepBatch, groups: Sequence[Sequence[Rollout]]) -> tuple[StepBatch, dict[str, float]]:
        """The batch with the teachers' log-probabilities, and metrics. `groups`: what the batch was made of.

        Raises TeacherError with `unscored` = `fail`, for a refusal, or for tokens to distil that were not sampled at temperature 1.
        """
        if not self.teachers:
            return batch, {}
        for rollouts in groups:  # those of a checkpoint; the others have begun
            self.begin(rollouts)
        places: dict[int, Place] = {}
        seen: dict[tuple[int, int], int] = {}
        for sample in (sample for samples in batch.mini_batches for sample in samples if sample.env in self.teachers):
            seen[sample.group, sample.member] = number = seen.get((sample.group, sample.member), -1) + 1
            if sample.loss_mask.any():
                places[id(sample)] = (sample.group, sample.member, number)
        wanted = [sample for samples in batch.mini_batches for sample in samples if id(sample) in places]
        _refuse_other_temperatures(wanted)
        began, self.phase = time.monotonic(), f"the teacher scores batch {batch.step}"
        try:
            requests = await self._answers(list(places.values()))
        finally:
            self.phase = None
        found = {sample: self._found(place) for sample, place in places.items()}
        missing = [sample for sample in wanted if found[id(sample)] is None]
        if missing and self.unscored == "fail":
            trouble = list(dict.fromkeys(one for request in requests for one in request.scores.trouble))
            raise TeacherError(
                f"the teacher did not score {len(missing)} of {len(wanted)} samples of step {batch.step} in "
                f"{self.teachers[missing[0].env].deadline:g} s (teacher.deadline)."
                + (f" The trouble: {'; '.join(trouble[-3:])}." if trouble else "")
                + " teacher.unscored=drop would leave such samples out"
            )
        mini_batches = tuple(tuple(one for sample in samples for one in _taught(sample, found)) for samples in batch.mini_batches)
        values = {
            "teacher/unscored": float(len(missing)),
            "teacher/unscored_tokens": float(sum(int(sample.loss_mask.sum()) for sample in missing)),
            "teacher/retries": float(sum(request.scores.retries for request in requests)),
            "time/teacher": time.monotonic() - began,
        }
        self._forget(list(places.values()))
        return replace(batch, mini_batches=mini_batches), values

    def close(self) -> None:
        """Give up everything that is being asked."""
        for request, _ in self._asked.values():
            if request.asking is not None:
                request.asking.cancel()

    def _ask(self, teacher: Teacher, *, all: bool = False) -> None:
        """Ask for what waits: full requests, and with `all`, or while nothing is in flight, also a smaller one."""
        desk = self._desks[id(teacher)]
        while len(desk.waiting) >= teacher.batch_size or (desk.waiting and (all or not desk.in_flight)):
            part, desk.waiting = desk.waiting[: teacher.batch_size], desk.waiting[teacher.batch_size :]
            sequences = [ids for _, ids, _ in part]
            request = _Request(sequences, [skipped for _, _, skipped in part], Scores([None] * len(part)), self._batches)
            request.asking = asyncio.create_task(teacher.score(sequences, request.scores))
            desk.in_flight += 1
            for number, (place, _, _) in enumerate(part):
                self._asked[place] = (request, number)

            def ended(asking: asyncio.Task[Scores]) -> None:
                desk.in_flight -= 1
                if not asking.cancelled() and asking.exception() is None:  # `score` raises the error of a request that it needs
                    self._ask(teacher)

            request.asking.add_done_callback(ended)

    async def _answers(self, places: Sequence[Place]) -> list[_Request]:
        """The requests for these samples, when they are answered or the deadline has passed. Raises the error of one that failed."""
        for teacher in self.teachers.values():
            self._ask(teacher, all=True)
        requests = list(dict.fromkeys(self._asked[place][0] for place in places if place in self._asked))
        asking = [request.asking for request in requests if request.asking is not None]
        if asking:
            deadline = max(teacher.deadline for teacher in self.teachers.values())
            await asyncio.wait(asking, timeout=deadline, return_when=asyncio.FIRST_EXCEPTION)
            for task in asking:
                if not task.done():
                    task.cancel()
                elif not task.cancelled():  # else an earlier batch gave the rest of its request up
                    task.result()
            self._give_up({request for request in requests if request.asking is not None and not request.asking.done()})
        return requests

    def _give_up(self, requests: set[_Request]) -> None:
        """Forget what these requests have not scored: they may hold samples of later batches, which then ask again."""
        self._asked = {
            place: (request, number)
            for place, (request, number) in self._asked.items()
            if request not in requests or request.scores.logprobs[number] is not None
        }

    def _found(self, place: Place) -> Float | None:
        """The log-probabilities of a sample [L]; None if it was not scored."""
        request, number = self._asked.get(place, (None, 0))
        if request is None or (logprobs := request.scores.logprobs[number]) is None:
            return None
        own, policys = request.skipped[number]
        return np.concatenate([np.zeros(policys, dtype=np.float32), logprobs[own:]])

    def _forget(self, places: Sequence[Place]) -> None:
        """Forget what the batch has taken, and what no batch will take: groups that were dropped meanwhile."""
        self._batches += 1
        for place in places:
            self._asked.pop(place, None)
        self._asked = {place: one for place, one in self._asked.items() if self._batches - one[0].batch <= self.keeps}


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
