"""Runs a list of jobs (some rollouts of an example) with bounded concurrency and retries.

    RolloutSet.jobs() → RolloutRunner.run(jobs) → Environment.play(task, members, attempt) → RolloutSet.add(job, rollouts)

Evaluations during training, `rlx eval`, `rlx synthesize` and `rlx env check` use it. What a rollout is worth belongs to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rlx.envs.base import Environment
from rlx.rollout.failures import ErrorRate
from rlx.rollout.groups import play_with_retries
from rlx.types import Rollout, Task

POLL_SECONDS = 0.2  # seconds between two looks at how many rollouts may be in flight


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Rollouts that one request runs: one of an example, or all if rewards compare them."""

    env: str  # the caller's name of the environment
    task: Task
    members: tuple[int, ...]


class RolloutRunner:
    """Runs jobs. Belongs to one event loop; `run` may be called again when it has returned."""

    def __init__(
        self,
        envs: Mapping[str, Environment],
        *,
        max_retries: int,
        max_concurrent: int | Callable[[], int],
        on_end: Callable[[Job, list[Rollout]], None],
        check: Callable[[Rollout], None] = lambda rollout: None,
        away: Callable[[], float] = lambda: 0.0,
        errors: ErrorRate | None = None,
    ) -> None:
        """`envs`: by the names in jobs. `max_retries`: further attempts at a failed rollout; a timeout is not retried.

        `max_concurrent`: the most rollouts in flight, which `set_max_concurrent` changes, or a function if others share the servers. One
        job is always run. `on_end`: called with each finished job and its rollouts, in the order of `Job.members`; those that failed for
        good have their last `status` and `error`.
        `check`: called with each rollout of each attempt; what it raises ends `run`.
        `away`: see `play_with_outage_retry`. `errors`: ends `run` when too much fails; None: failures never do.
        """
        self.envs, self.max_retries, self.errors = envs, max_retries, errors
        self.on_end, self.check, self.away = on_end, check, away
        self._most = max_concurrent
        self.finished = self.in_flight = 0  # rollouts
        self._began: dict[Job, float] = {}  # monotonic seconds of each job in flight

    async def run(self, jobs: Iterable[Job]) -> None:
        """Run all jobs, begun in their order. If one of them raises, the others are cancelled and its error is raised."""
        running: set[asyncio.Task[None]] = set()
        ended: list[asyncio.Task[None]] = []
        one_ended = asyncio.Event()  # `asyncio.wait` would look at all that are running whenever one ends

        def end(one: asyncio.Task[None]) -> None:
            running.discard(one)
            ended.append(one)
            one_ended.set()

        coming = iter(jobs)
        job = next(coming, None)
        try:
            while job is not None or running:
                while job is not None and (not self.in_flight or self.in_flight + len(job.members) <= self.max_concurrent):
                    self.in_flight += len(job.members)
                    one = asyncio.create_task(self._run(job))
                    running.add(one)
                    one.add_done_callback(end)
                    job = next(coming, None)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):  # `wait_for` of Python 3.11 loses a cancellation that comes with the event
                        await one_ended.wait()
                one_ended.clear()
                errors = [one.exception() for one in ended]  # ask all, or asyncio complains about those that nobody asked
                ended.clear()
                for error in errors:
                    if error is not None:
                        raise error
        finally:
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self.in_flight = 0

    @property
    def max_concurrent(self) -> int:
        """The most rollouts in flight at the moment."""
        return self._most() if callable(self._most) else self._most

    def set_max_concurrent(self, limit: int) -> None:
        """At most this many rollouts in flight from now on. Those in flight go on."""
        self._most = limit

    def waiting(self) -> list[tuple[Task, int, float]]:
        """The jobs in flight, for `rlx.rollout.stalls`: task, number of members and seconds of each."""
        now = time.monotonic()
        return [(job.task, len(job.members), now - began) for job, began in self._began.items()]

    async def _run(self, job: Job) -> None:
        self._began[job] = time.monotonic()
        try:
            rollouts = await play_with_retries(self.envs[job.env], job.task, job.members, self.max_retries, self._checked, away=self.away)
        finally:
            del self._began[job]
        self.finished += len(rollouts)
        self.in_flight -= len(job.members)
        self.on_end(job, rollouts)
        if self.errors is not None:
            self.errors.add(job.env, rollouts, lambda: self.in_flight)

    def _checked(self, rollout: Rollout, _: bool) -> Rollout:
        self.check(rollout)
        return rollout
