"""A worker and its requests as the pool sees them, without its help: when it must be ended or replaced, and what is answered."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from rlx.envs.base import failed
from rlx.envs.child import Child, how
from rlx.envs.marks import Mark
from rlx.envs.together import MOST_WAITING
from rlx.envs.wire import Played, PlayFailed
from rlx.trace import Trace
from rlx.types import Rollout, Status, Task

GRACE = 1.0  # seconds beyond its time that a rollout may take to end by itself
BLOCKING = (
    5.0  # a rollout beyond its time ends its worker if the step that runs then has taken this long; for short timeouts, as long as they
)
PING = 5.0  # seconds without a sign of life after which a worker is asked for one
HARD = 1.5  # times the memory bound at which a worker is ended at once
CROWDED = 2.0  # seconds over which the share of the time in which a worker computes is taken
BUSY = 0.9  # share of the time in which a worker computes above which its rollouts wait for each other
LOST = 3  # workers that a request may lose without being known as the cause; then it fails


class WorkerError(RuntimeError):
    """An environment has no working worker. The message has the environment's own words."""


@dataclass(slots=True, eq=False)
class Playing:
    """One request, from `play` to its answer."""

    number: int
    task: Task
    members: tuple[int, ...]
    attempt: int
    answer: asyncio.Future[list[Rollout]]
    began: float = 0.0  # monotonic seconds when its worker got it
    before: float = 0.0  # seconds that its worker had computed for all rollouts then
    computed: float = 0.0  # seconds since then in which its worker computed for this request, as the pool saw it
    lost: int = 0  # workers that died with it for an unknown reason
    sampled: dict[int, Trace] = field(default_factory=dict)  # of the members whose rewards compute, if that is kept


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a worker is ended."""

    cause: str  # "timeout", "memory", "retired" or "died"
    mark: Mark | None  # the rollout at fault, if it is known
    text: str  # for people


@dataclass(slots=True, eq=False)
class Worker:
    """One process and what it is doing."""

    child: Child
    place: int  # 0 … number of workers - 1: the name of its log
    began: float = field(default_factory=time.monotonic)  # monotonic seconds of its start
    loaded: bool = False
    retiring: bool = False  # it gets no new requests
    playing: dict[int, Playing] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)  # requests that were given up and are not yet acknowledged
    alive: float = 0.0  # monotonic seconds of the last sign of life
    pinged: float = 0.0
    warned: float = 0.0  # beginning of the step that the log has named
    looked: float = field(default_factory=time.monotonic)  # monotonic seconds of the latest look
    computed: float = 0.0  # seconds in which its event loop computed for rollouts, as the looks saw it
    busy: float = 0.0  # share of the last seconds in which it did
    verdict: Verdict | None = None  # set when we end it
    load_error: str = ""  # the environment's own words

    @property
    def load(self) -> int:
        return len(self.playing) + len(self.cancelled)

    @property
    def waiting(self) -> int:
        """Rollouts that wait until it has computed for others: no request of theirs is at the servers, and it computes nearly always."""
        if self.busy < BUSY:
            return 0
        return max(0, sum(len(playing.members) for playing in self.playing.values()) - self.child.marks.asking() - 1)

    def forgive(self, gap: float, now: float) -> None:
        """Seconds up to now in which the process that looks was stopped itself, and perhaps this one with it, do not count.

        What was noted since it goes on stays as it is: a sign of life, a new request.
        """
        self.began, self.alive, self.looked = (min(now, since + gap) for since in (self.began, self.alive, self.looked))
        for playing in self.playing.values():
            playing.began = min(now, playing.began + gap)

    def look(self, now: float) -> None:
        """Note whether it computes for a rollout at this moment."""
        passed, self.looked = now - self.looked, now
        mark = self.child.marks.step()
        if mark is not None:
            self.computed += passed
            if (playing := self.playing.get(mark.play)) is not None:
                playing.computed += passed
        self.busy += (float(mark is not None) - self.busy) * min(1.0, passed / CROWDED)

    def _alone(self, playing: Playing, now: float) -> float:
        """Seconds that a request has taken, without those in which its worker computed for others (as in `together.run_for`)."""
        passed = now - playing.began
        return passed - min(self.computed - playing.before - playing.computed, passed * MOST_WAITING / (1 + MOST_WAITING))

    def overdue(self, timeout: float, allowed: float, now: float) -> Verdict | None:
        """Whether a rollout blocks this worker beyond its time, or the worker shows no sign of life.

        `timeout`: seconds for a rollout. `allowed`: seconds for a whole request, scoring included.
        """
        mark = self.child.marks.step()
        if mark is not None:
            self.alive = max(self.alive, mark.since)
            playing = self.playing.get(mark.play)
            late = (now - mark.since if playing is None else self._alone(playing, now)) > allowed + GRACE
            if late and now - mark.since > min(timeout, BLOCKING):
                return Verdict("timeout", mark, f"no result after {timeout:g} s (rollout_timeout): it blocks its worker")
        elif self.load and now - self.alive > timeout + GRACE:  # perhaps a call in a thread holds the interpreter
            calls = self.child.marks.calls()
            late_calls = [call for call in calls if now - call.since > timeout]
            if calls and not late_calls:
                return None  # it began after the worker's last word: soon it is late, and then known as the culprit
            text = f"no result after {timeout:g} s (rollout_timeout): its worker does not answer"
            return Verdict("timeout", late_calls[0] if late_calls else None, text)
        return None

    @property
    def silent(self) -> bool:
        """Whether it should be asked for a sign of life."""
        return self.load > 0 and self.pinged < self.alive and time.monotonic() - self.alive > PING

    def too_large(self, bound: float) -> Verdict | None:
        """Whether its memory exceeds `bound` bytes. Cause "memory": at once; "retired": when it has answered everything.

        What it computes meanwhile is at fault for "memory". For "retired" it is only a hint.
        """
        used = self.child.memory()
        if used <= bound or (self.retiring and used <= HARD * bound):
            return None
        says = f"its worker {self.child.name} has {used / 2**30:.2f} GiB, env_worker_memory_gb is {bound / 2**30:g}"
        mark = self.child.marks.step()
        return Verdict("memory" if used > HARD * bound else "retired", mark, says)

    def too_slow(self, env_id: str, limit: float) -> Verdict:
        """Note that it has not loaded the environment in time."""
        self.verdict = Verdict("died", None, f"its worker has not loaded {env_id} within {limit:g} s")
        return self.verdict

    def cannot_load(self, error: str) -> None:
        """Note the environment's own words, and end the process. It ends itself, unless it was its `Loaded` that could not be read."""
        self.load_error = error
        self.child.kill()

    def not_loaded(self, name: str, env_id: str, code: int) -> WorkerError:
        """What to say of a worker that ended before it had loaded the environment."""
        if self.load_error:
            return WorkerError(f"envs.{name} could not be loaded: {self.load_error}")
        said = self.child.last_lines()
        if self.verdict is not None:  # it was ended because it took too long
            return WorkerError(f"envs.{name}: {self.verdict.text}\n{said}")
        return WorkerError(f"envs.{name}: its worker ended before it had loaded {env_id}: {how(code)}\n{said}")

    def death(self, mark: Mark | None, code: int) -> Verdict:
        """Why its process has ended, if we did not end it. `mark`: what it computed then."""
        if self.retiring and not self.playing:
            return Verdict("retired", None, "it was replaced because of its memory")
        return Verdict("died", mark, f"{self.child.name} (process {self.child.pid}) died: {how(code)}")

    def settle(self, verdict: Verdict) -> list[Playing]:
        """Fail the request at fault. Returns the others, to be played again."""
        culprit = None if verdict.mark is None else self.playing.pop(verdict.mark.play, None)
        if culprit is not None and verdict.mark is not None:
            status: Status = "timeout" if verdict.cause == "timeout" else "error"
            stop = "timeout" if verdict.cause == "timeout" else f"worker_{verdict.cause}"
            fail(culprit, verdict.mark.member, status, stop, verdict.text)
        others, self.playing = list(self.playing.values()), {}
        for playing in others:
            playing.sampled = {}
            playing.lost += culprit is None and verdict.cause != "retired"
            if playing.lost > LOST:
                fail(playing, None, "error", f"worker_{verdict.cause}", f"{verdict.text}; it lost {LOST} workers before")
        return [playing for playing in others if not playing.answer.done()]


def answer(playing: Playing, message: Played | PlayFailed) -> None:
    """Answer a request with what its worker says."""
    if playing.answer.done():
        return
    if isinstance(message, PlayFailed):
        playing.answer.set_exception(RuntimeError(f"{message.error}\n{message.trace}"))
    elif message.rollouts:
        own = [[replace(rollout, task=playing.task) for rollout in runs] for runs in message.rollouts]
        try:
            playing.answer.set_result([replace(first, others=tuple(others)) if others else first for first, *others in own])
        except ValueError as error:  # a defect of ours: it must reach the one who waits
            playing.answer.set_exception(error)
    else:
        fail(playing, None, "error", "environment_error", message.error or "the environment cancelled the rollout's own task")


def fail(playing: Playing, member: int | None, status: Status, stop: str, error: str) -> None:
    """Answer a request: this member failed (None: all of them), the others are cancelled."""
    if playing.answer.done():
        return
    rollouts = []
    for each in playing.members:
        mine: tuple[Status, str, str] = (status, stop, error)
        if member is not None and each != member:
            mine = ("cancelled", "group_failed", "another rollout of the group failed")
        timing = {"total": time.monotonic() - playing.began}
        lost = failed(playing.task, each, None, *mine, timing)
        rollouts.append(replace(lost, trace=playing.sampled.get(each, lost.trace)))
    playing.answer.set_result(rollouts)
