"""Which rollout a worker is computing for at this moment, in memory that the orchestrator reads without the worker's help.

A worker that is stuck in C code, or that has just died, cannot say which rollout it was. So it writes the rollout's number into shared
memory before each step of the event loop that belongs to it, and again for each call in a thread. This costs about a microsecond a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

THREADS = 64  # calls in threads that can be marked at once
LONG_NS = 20_000_000  # steps of the event loop that take so long are counted (`SPENT`): shorter ones delay nobody
OWN = 4  # words before those of the threads
SIZE = 8 * (OWN + 4 * THREADS)  # bytes

Where = tuple[int, int]  # number of the request, and member + 1 (0: not one member, but the whole request)
PLAYING: ContextVar[Where] = ContextVar("PLAYING")
"""The rollout that the current task belongs to."""


class Spent:
    """Seconds of the event loop's long steps so far, to tell the time that a rollout takes from the time that it waits for others."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.own: dict[int, dict[int, float]] = {}  # of these, those of the requests in progress: number → member + 1 → seconds

    def begin(self, play: int) -> None:
        """A request begins. Only between `begin` and `end` its own seconds are kept: what it left behind may compute later."""
        self.own[play] = {}

    def end(self, play: int) -> None:
        """A request has ended."""
        del self.own[play]

    def by_others(self, where: Where | None) -> float:
        """Seconds so far in which the event loop computed for others than this rollout."""
        return self.seconds - (0.0 if where is None else self.own.get(where[0], {}).get(where[1], 0.0))

    def add(self, where: Where, seconds: float) -> None:
        """A step has taken so long."""
        self.seconds += seconds
        if (members := self.own.get(where[0])) is not None:
            members[where[1]] = members.get(where[1], 0.0) + seconds


SPENT = Spent()
"""Of this process. Without marked tasks (`marked_tasks`) it stays 0."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Code of a rollout that runs now."""

    play: int
    member: int | None  # None: it computes for all members, or nobody knows for which
    since: float  # monotonic seconds
    thread: int = 0  # identity of the thread; 0: the event loop


class Marks:
    """The shared memory: three words for the event loop's step (begin in ns, request, member + 1), one for the requests to the inference
    servers that are in flight, then four for each thread."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, SIZE)
        self.words = memoryview(self._memory).cast("Q")

    @staticmethod
    def create() -> int:
        """A file in memory, for both processes."""
        fd = os.memfd_create("rlx-marks")
        os.ftruncate(fd, SIZE)
        return fd

    def step(self) -> Mark | None:
        """What the event loop computes now; None if it waits, or does not work for a rollout."""
        for _ in range(3):  # the worker may write meanwhile
            begun, play, member = self.words[0], self.words[1], self.words[2]
            if begun == self.words[0]:
                return Mark(play, member - 1 if member else None, begun / 1e9) if begun else None
        return None

    def asking(self, more: int = 0) -> int:
        """Requests to the inference servers in flight, of which there are so many `more` now. The worker alone changes it."""
        self.words[3] += more
        return self.words[3]

    def calls(self) -> list[Mark]:
        """The calls in threads, the oldest first."""
        found = []
        for place in range(OWN, OWN + 4 * THREADS, 4):
            thread, play, member, begun = self.words[place : place + 4]
            if thread:
                found.append(Mark(play, member - 1 if member else None, begun / 1e9, thread))
        return sorted(found, key=lambda mark: mark.since)

    def close(self) -> None:
        """Release the memory."""
        self.words.release()
        self._memory.close()


class _Marked(Coroutine):
    """A coroutine whose every step is marked."""

    __slots__ = ("_coroutine", "_member", "_play", "_words")

    def __init__(self, coroutine: Any, where: Where, words: memoryview) -> None:
        self._coroutine, (self._play, self._member), self._words = coroutine, where, words

    def send(self, value: Any) -> Any:
        words = self._words
        words[1], words[2], words[0] = self._play, self._member, time.monotonic_ns()
        try:
            return self._coroutine.send(value)
        finally:
            self._ended(words)

    def throw(self, *error: Any) -> Any:
        words = self._words
        words[1], words[2], words[0] = self._play, self._member, time.monotonic_ns()
        try:
            return self._coroutine.throw(*error)
        finally:
            self._ended(words)

    def _ended(self, words: memoryview) -> None:
        took, words[0] = time.monotonic_ns() - words[0], 0
        if took > LONG_NS:
            SPENT.add((self._play, self._member), took / 1e9)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        """`cr_frame`, `cr_running` and so on, which asyncio and anyio look at."""
        return getattr(self._coroutine, name)


def marked_tasks(marks: Marks) -> Callable[..., asyncio.Task]:
    """A task factory that marks the steps of every task that was started in a rollout's context."""
    words = marks.words

    def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task:
        where = PLAYING.get(None)
        return asyncio.Task(coroutine if where is None else _Marked(coroutine, where, words), loop=loop, **options)

    return factory


class ThreadMarks:
    """Marks the calls that rollouts make in threads."""

    def __init__(self, marks: Marks) -> None:
        self._words = marks.words
        self._free = list(range(OWN, OWN + 4 * THREADS, 4))  # pop and append are atomic

    def wrapped(self, executor: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function for `run_in_executor`, marked if it runs in a thread for a rollout."""
        where = PLAYING.get(None)
        if where is None or not (executor is None or isinstance(executor, ThreadPoolExecutor)):
            return function
        return functools.partial(self._call, where, function)

    def _call(self, where: Where, function: Callable[..., Any], *arguments: Any) -> Any:
        with self._marked(where):
            return function(*arguments)

    @contextlib.contextmanager
    def _marked(self, where: Where) -> Iterator[None]:
        try:
            place = self._free.pop()
        except IndexError:  # all places are taken
            yield
            return
        words = self._words
        words[place + 1], words[place + 2], words[place + 3] = *where, time.monotonic_ns()
        words[place] = threading.get_ident()
        try:
            yield
        finally:
            words[place] = 0
            self._free.append(place)
