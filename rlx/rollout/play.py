"""Plays a list of jobs (some rollouts of an example) with bounded concurrency, retries and records that survive a kill.

    jobs_of(env, …) → Player.play(jobs) → Environment.play(task, members, attempt) → played(job, rollouts) → Records.add

Evaluations beside training, `rlx eval`, `rlx synthesize` and `rlx env check` use it. What a rollout is worth belongs to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import msgspec

from rlx.envs.base import Environment
from rlx.paths import write_text
from rlx.rollout.failures import ErrorRate
from rlx.rollout.groups import play_with_retries
from rlx.types import Rollout, Task

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST = 16  # if so many rollouts of an environment failed and none succeeded, a command that plays stops
PLAYED_BY = "played_by.txt"  # beside records: digest of the weights that played them
GLANCE = 0.2  # seconds between two looks at how many rollouts may be in flight


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Rollouts that are played by one request: one of an example, or all if rewards compare them."""

    env: str  # the caller's name of the environment
    task: Task
    members: tuple[int, ...]


def jobs_of(
    name: str, env: Environment, places: Iterable[int], rollouts: int, done: Callable[[tuple[int, int]], bool] = lambda one: False
) -> Iterator[Job]:
    """The jobs of an environment: `rollouts` rollouts of each example at `places`, without those that are `done((place, member))`.

    A row is read when its turn comes, because reading all would block the event loop. The seeds of a rollout follow from the policy's
    seed, the environment's name, the example, its place and the member, so a rollout is the same whenever it is played.
    """
    for place in places:
        left = [member for member in range(rollouts) if not done((place, member))]
        if not left:
            continue
        row = dict(env.rows[place])
        task = Task(env=env.name, example_id=int(row["example_id"]), index=place, row=row)
        for part in [tuple(range(rollouts))] if env.scores_groups else [(member,) for member in left]:
            yield Job(name, task, part)


def in_turn(streams: Sequence[Iterator[Job]]) -> Iterator[Job]:
    """The jobs of all environments, one of each in turn."""
    return (job for together in itertools.zip_longest(*streams) for job in together if job is not None)


class NothingWorks(RuntimeError):
    """Rollout after rollout failed: something is wrong with the environment or the model's servers."""

    def __init__(self, what: str, env: str, failed: int, last: Rollout) -> None:
        """`what`: an evaluation, a synthesis. `last`: the last failure."""
        super().__init__(
            f"{failed} rollouts of {env} in a row failed, so the {what} stops; resume=latest plays them again. "
            f"The last, example {last.task.example_id}: {last.stop}: {last.error}"
        )


class Hopeless:
    """Ends a command whose rollouts all fail (`NothingWorks`), or whose reward functions raise too often (`ErrorRate`)."""

    def __init__(self, what: str, max_error_rate: float) -> None:
        self.what, self.succeeded = what, set[str]()  # environments of which a rollout has succeeded
        self._errors, self._in_a_row = ErrorRate(max_error_rate), Counter[str]()
        self._last: dict[str, Rollout] = {}

    def add(self, env: str, rollouts: Sequence[Rollout], in_flight: int, most: int) -> None:
        """Count the rollouts of a job. `most`: rollouts in flight that may fail together, once one has succeeded."""
        self._errors.add([one for one in rollouts if one.status == "ok"], lambda: in_flight)
        self._last[env] = rollouts[-1]
        self._in_a_row[env] += len(rollouts)
        if any(one.status == "ok" for one in rollouts):
            self.succeeded.add(env)
            self._in_a_row[env] = 0
        elif self._in_a_row[env] >= max(FIRST, most if env in self.succeeded else 0):
            self.stop(env)

    def stop(self, env: str) -> NoReturn:
        """Raise NothingWorks."""
        raise NothingWorks(self.what, env, self._in_a_row[env], self._last[env])


class Player:
    """Plays jobs. Belongs to one event loop; `play` may be called again when it has returned."""

    def __init__(
        self,
        envs: Mapping[str, Environment],
        *,
        max_retries: int,
        max_concurrent: int | Callable[[], int],
        played: Callable[[Job, list[Rollout]], None],
        check: Callable[[Rollout], None] = lambda rollout: None,
        away: Callable[[], float] = lambda: 0.0,
        hopeless: Hopeless | None = None,
    ) -> None:
        """`envs`: by the names in jobs. `max_retries`: further attempts at a failed rollout; a timeout is not retried.

        `max_concurrent`: the most rollouts in flight, which `set_max_concurrent` changes, or a function if others share the servers. One
        job is always played. `played`: called with each finished job and its rollouts, in the order of `Job.members`; those that failed
        for good have their last `status` and `error`.
        `check`: called with each rollout of each attempt; what it raises ends `play`.
        `away`: see `play_through`. `hopeless`: None: failures never end `play`.
        """
        self.envs, self.max_retries, self.hopeless = envs, max_retries, hopeless
        self.played, self.check, self.away = played, check, away
        self._most = max_concurrent
        self.begun = self.finished = 0  # rollouts
        self._in_flight: dict[Job, float] = {}  # with the monotonic seconds at which it began

    async def play(self, jobs: Iterable[Job]) -> None:
        """Play all jobs, begun in their order. If one of them raises, the others are cancelled and its error is raised."""
        playing: set[asyncio.Task[None]] = set()
        ended: list[asyncio.Task[None]] = []
        one_ended = asyncio.Event()  # `asyncio.wait` would look at all that are playing whenever one ends

        def end(one: asyncio.Task[None]) -> None:
            playing.discard(one)
            ended.append(one)
            one_ended.set()

        coming = iter(jobs)
        job = next(coming, None)
        try:
            while job is not None or playing:
                while job is not None and (self.begun == self.finished or self.in_flight + len(job.members) <= self.max_concurrent):
                    self.begun += len(job.members)
                    one = asyncio.create_task(self._play(job))
                    playing.add(one)
                    one.add_done_callback(end)
                    job = next(coming, None)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GLANCE):  # `wait_for` of Python 3.11 loses a cancellation that comes with the event
                        await one_ended.wait()
                one_ended.clear()
                errors = [one.exception() for one in ended]  # ask all, or asyncio complains about those that nobody asked
                ended.clear()
                for error in errors:
                    if error is not None:
                        raise error
        finally:
            for one in playing:
                one.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
            self.begun = self.finished

    @property
    def max_concurrent(self) -> int:
        """The most rollouts in flight at the moment."""
        return self._most() if callable(self._most) else self._most

    def set_max_concurrent(self, limit: int) -> None:
        """At most this many rollouts in flight from now on. Those in flight go on."""
        self._most = limit

    @property
    def in_flight(self) -> int:
        """Rollouts being played."""
        return self.begun - self.finished

    def waiting(self) -> list[tuple[Task, int, float]]:
        """The jobs in flight, for `rlx.rollout.stalls`: task, number of members and seconds of each."""
        now = time.monotonic()
        return [(job.task, len(job.members), now - began) for job, began in self._in_flight.items()]

    def now(self) -> dict[str, float]:
        """For the console: rollouts in flight, and the seconds of the oldest job."""
        return {"in_flight": self.in_flight, "oldest": max((seconds for _, _, seconds in self.waiting()), default=0.0)}

    async def _play(self, job: Job) -> None:
        self._in_flight[job] = time.monotonic()
        try:
            rollouts = await play_with_retries(self.envs[job.env], job.task, job.members, self.max_retries, self._checked, away=self.away)
        finally:
            del self._in_flight[job]
        self.finished += len(rollouts)
        self.played(job, rollouts)
        if self.hopeless is not None:
            self.hopeless.add(job.env, rollouts, self.in_flight, self.max_concurrent)

    def _checked(self, rollout: Rollout, _: bool) -> Rollout:
        self.check(rollout)
        return rollout


class Records(Generic[T]):
    """A file with one record a line, appended as they come. A kill loses at most the line that is being written.

    Values that JSON cannot hold (an environment's own objects) are written as their `repr`.
    """

    def __init__(self, path: Path, kind: type[T]) -> None:
        """Opens the file for appending and cuts off an incomplete last line. `kind`: a dataclass or msgspec struct."""
        self.path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._encoder = msgspec.json.Encoder(enc_hook=repr)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)

    def add(self, record: T) -> None:
        """Append a record; it is in the file when this returns."""
        self._file.write(self._encoder.encode(record) + b"\n")
        self._file.flush()

    def read(self) -> list[T]:
        """All records in the file, in the order in which they were added. Raises ValueError for a line that is no record."""
        records = []
        for number, line in enumerate(self.path.read_bytes().splitlines(), 1):
            try:
                records.append(self._decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ValueError(f"{self.path}, line {number}: {error}. Delete this line, and its rollout is played again") from error
        return records

    def belong_to(self, digest: str | None, what: str) -> bool:
        """Note which weights play. Returns whether the records were of others: then they are put aside, and new ones begin.

        `digest`: of the weights that play now (`rlx.rollout.models.Origin`); None: not known. Training that went back to an earlier
        checkpoint writes a version anew. `what`: the weights, for the warning.
        """
        note = self.path.with_name(PLAYED_BY)
        before = note.read_text().strip() if note.is_file() else digest
        changed = digest is not None and before != digest and self.path.stat().st_size > 0
        if changed:
            names = (self.path.with_name(f"{self.path.stem}_{number}.jsonl") for number in itertools.count(1))
            aside = next(path for path in names if not path.exists())
            log.warning(
                "%s has changed since an earlier attempt (digest %s, now %s): its rollouts are now in %s, and all are played again",
                *(what, before, digest, aside),
            )
            self.close()
            self.path.rename(aside)
            self._file = self.path.open("ab")
        if digest is not None:
            write_text(note, f"{digest}\n")  # a kill before this leaves the records as those of the others
        return changed

    def close(self) -> None:
        self._file.close()

    def delete(self) -> None:
        """Delete the file, and the note of which weights played."""
        self.close()
        for path in (self.path, self.path.with_name(PLAYED_BY)):
            path.unlink(missing_ok=True)
