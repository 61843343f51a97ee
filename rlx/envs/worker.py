"""The server of an environment: a process that loads it, plays what the orchestrator asks for, and asks the inference servers itself.

    Load → load the environment → its rows and facts → Give, Serve → Play … Play → the rollouts go out as Played, with their tokens

`rlx.envs.pool` starts it through `rlx/envs/boot.py`, in this or in another Python, so its imports are light: the standard library, numpy,
msgspec, aiohttp, tokenizers, jinja2, and modules of rlx that need no more. It ends when the orchestrator ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import logging
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlx.config.pythons import sources_of
from rlx.envs.errors import in_one_line
from rlx.envs.load import load_one
from rlx.envs.marks import PLAYING, SPENT, Marks, ThreadMarks, marked_tasks
from rlx.envs.wire import (
    CancelPlay,
    Give,
    Link,
    Load,
    Loaded,
    LoadFailed,
    Outage,
    Ping,
    Play,
    Played,
    PlayFailed,
    Pong,
    Rows,
    Scores,
    Serve,
    Standing,
    ToWorker,
    Warned,
    pack_row,
    unpack_row,
)
from rlx.inference.sampler import Follower
from rlx.policy.base import Episode, Policy
from rlx.policy.spec import chat_of, policy_of
from rlx.process import die_with_parent, keep_event_loop_free
from rlx.stacks import answer_in_child, explain_with, where_rollouts_wait
from rlx.trace import Trace, Turn
from rlx.types import Task

log = logging.getLogger("rlx.envs.worker")

CHUNK = 1000  # rows sent at a time
SAMPLE = 64  # rows in the digest


def main(name: str, sock: str, marks: str, stacks: str) -> None:
    """Serve until the orchestrator is gone. `sock`, `marks` and `stacks` are file descriptors that it made."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name}: %(message)s", datefmt="%H:%M:%S")
    for library in ("httpx", "httpx2"):
        logging.getLogger(library).setLevel(logging.WARNING)  # otherwise a line for every request to an endpoint
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=int(stacks), all_threads=True)  # answers even while C code holds the interpreter
    link = Link(socket.socket(fileno=int(sock)), ToWorker)
    load, *more = _first(link)
    logging.getLogger("rlx.policy").addHandler(Telling(link))
    began = time.monotonic()
    try:
        env = load_one(load.name, load.config, load.settings)
        _outlive_signals()
        _introduce(link, env, load, time.monotonic() - began)
    except Exception as error:
        log.exception("loading failed")
        link.send_now(LoadFailed(in_one_line(error, sources_of(load.config.id)), traceback.format_exc()))
        os._exit(1)
    new_loop, memory = _loop_class(), Marks(int(marks))
    threads = ThreadMarks(memory)

    class Loop(new_loop):  # type: ignore[misc, valid-type]
        """The event loop. It marks the calls that it runs in threads."""

        def run_in_executor(self, executor: Any, function: Callable[..., Any], *arguments: Any) -> Any:
            return super().run_in_executor(executor, threads.wrapped(executor, function), *arguments)

    loop = Loop()
    loop.set_task_factory(marked_tasks(memory))
    asyncio.set_event_loop(loop)
    explain_with(lambda: where_rollouts_wait(loop, getattr(env, "sources", None)))
    answer_in_child(name, int(stacks))
    Server(link, env, loop, memory, load.settings.keeps_late).run(more)
    os._exit(0)  # a thread that hangs must not keep the process


def _loop_class() -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop
    return uvloop.Loop


def _first(link: Link) -> list[Any]:
    """The first messages, of which the first is `Load`. Leaves if the orchestrator is gone."""
    while (messages := link.receive(60.0)) is not None:
        if messages:
            assert isinstance(messages[0], Load), f"the first message is {messages[0]}"
            return messages
    os._exit(1)


def _outlive_signals() -> None:
    """Leave the decision about SIGINT and SIGTERM to the orchestrator: the worker ends when the orchestrator closes the link.

    SLURM sends them to every process of a job. The processes that this one starts keep their own: Python's handlers do not outlive
    `exec`, and a forked child gets back those from before.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in numbers:
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=restore)


def _introduce(link: Link, env: Any, load: Load, seconds: float) -> None:
    """Send the environment's rows and facts. `seconds`: that loading it took."""
    rows = env.rows
    columns = len(rows) > 0 and isinstance(rows[:1], dict)
    for start in range(0, len(rows) if load.send_rows else 0, CHUNK):
        chunk = rows[start : start + CHUNK]
        each = [dict(zip(chunk, values, strict=True)) for values in zip(*chunk.values(), strict=True)] if columns else chunk
        link.send_now(Rows([pack_row(row) for row in each]))
    digest = hashlib.blake2b(str(len(rows)).encode(), digest_size=16)
    for place in range(0, len(rows), max(1, len(rows) // SAMPLE)):
        digest.update(pack_row(rows[place]))
    tools = [dict(tool) for tool in env.tools]
    sources = str(sources_of(load.config.id) or "")
    link.send_now(Loaded(len(rows), columns, env.scores_groups, digest.hexdigest(), tools, sources, seconds, list(env.agents)))


class Telling(logging.Handler):
    """Sends the policy's warnings to the orchestrator: what they say concerns the run, and not the environment's code."""

    def __init__(self, link: Link) -> None:
        super().__init__(logging.WARNING)
        self.link = link

    def emit(self, record: logging.LogRecord) -> None:
        self.link.send(Warned(record.getMessage()))


class Marking:
    """The policy, which marks later code in a rollout's context as its member's."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def context_length(self) -> int:
        return self.policy.context_length

    def episode(self, task: Task, member: int, attempt: int) -> Episode:
        """See `rlx.policy.base.Policy.episode`."""
        play, _ = PLAYING.get()
        PLAYING.set((play, member + 1))
        return self.policy.episode(task, member, attempt)


class Generating:
    """The run's servers, as far as they are known, with a count of the requests in flight that the orchestrator sees."""

    def __init__(self, link: Link, marks: Marks) -> None:
        self.link, self.marks = link, marks
        self.sampler: Follower | None = None

    @property
    def version(self) -> int:
        assert self.sampler is not None
        return self.sampler.version

    async def generate(self, prompt_ids: Any, sampling: dict[str, Any], request_id: str, affinity: int) -> Turn:
        """See `rlx.inference.sampler.Sampler.generate`."""
        assert self.sampler is not None, "a request before the first `Serve`"
        self.marks.asking(1)
        try:
            return await self.sampler.generate(prompt_ids, sampling, request_id, affinity)
        finally:
            self.marks.asking(-1)

    async def take(self, message: Serve) -> None:
        """Sample on these servers."""
        if self.sampler is None:
            self.sampler = Follower(message.servers)
            self.sampler.on_outage = lambda begins: self.link.send(Outage(begins))
            await self.sampler.__aenter__()
        else:
            self.sampler.take(message.servers)

    async def close(self) -> None:
        """Close the connections."""
        if self.sampler is not None:
            await self.sampler.__aexit__()


class Server:
    """Plays requests concurrently, and sends each rollout as soon as it is scored."""

    def __init__(self, link: Link, env: Any, loop: asyncio.AbstractEventLoop, marks: Marks, keeps_late: bool) -> None:
        self.link, self.env, self.loop, self.keeps_late = link, env, loop, keeps_late
        self.generating = Generating(link, marks)
        self.policy: Policy | None = None
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._taking: asyncio.Task[None] | None = None

    def run(self, messages: Sequence[Any] = ()) -> None:
        """Serve until the orchestrator closes the link; then let the environment release its resources. `messages` have arrived already."""
        self.loop.run_until_complete(self._serve(messages))

    async def _serve(self, messages: Sequence[Any]) -> None:
        gone = asyncio.Event()
        for message in messages:
            self._handle(message)
        self.link.attach(self._handle, gone.set)
        await gone.wait()
        for task in self._playing.values():
            task.cancel()
        await asyncio.gather(*self._playing.values(), return_exceptions=True)
        await self.env.close()
        await self.generating.close()

    def _handle(self, message: Any) -> None:
        if isinstance(message, Play):
            SPENT.begin(message.number)
            token = PLAYING.set((message.number, message.members[0] + 1 if len(message.members) == 1 else 0))
            playing = self._playing[message.number] = self.loop.create_task(self._play(message))
            PLAYING.reset(token)
            playing.add_done_callback(lambda task: self._played(message.number, task))
        elif isinstance(message, CancelPlay):
            if message.number in self._playing:
                self._playing[message.number].cancel()
        elif isinstance(message, Serve):
            self._taking = self.loop.create_task(self.generating.take(message))  # it has begun before a later `Play` has
        elif isinstance(message, Give):
            self._make(message)
        elif isinstance(message, Ping):
            self.link.send(Pong())

    def _make(self, message: Give) -> None:
        spec = message.policy
        try:
            self.policy = policy_of(spec, None if spec.chat is None else chat_of(spec.chat), self.generating)
        except Exception as error:  # a package that this Python lacks, a template that it cannot read
            log.exception("the policy cannot be made")
            self.link.send(LoadFailed(f"its policy cannot be made: {in_one_line(error, None)}", traceback.format_exc()))
            return
        if (standing := getattr(self.policy, "standing", None)) is not None:
            standing.answered = True  # the orchestrator's own request, before this
        self.env.policy = Marking(self.policy)
        if self.keeps_late:
            self.env.scores = self._scores
        keep_event_loop_free()  # all is loaded

    def _scores(self, trace: Trace) -> None:
        number, member = PLAYING.get()
        self.link.send_at_once(Scores(number, member - 1, trace))

    async def _play(self, asked: Play) -> None:
        try:
            task = Task(env=self.env.name, example_id=asked.example_id, index=asked.index, row=unpack_row(asked.row))
            rollouts = await self.env.play(task, asked.members, asked.attempt)
            if (standing := getattr(self.policy, "standing", None)) is not None:
                self.link.send(Standing(sorted(standing.models), standing.refusal))
            bare = replace(task, row={})  # the orchestrator has it
            runs = [[replace(run, task=bare, others=()) for run in (rollout, *rollout.others)] for rollout in rollouts]
            self.link.send(Played(asked.number, runs))
        except Exception as error:
            self.link.send(PlayFailed(asked.number, f"{type(error).__name__}: {error}", traceback.format_exc()))

    def _played(self, number: int, task: asyncio.Task[None]) -> None:
        """A request has ended."""
        del self._playing[number]
        SPENT.end(number)
        if task.cancelled():
            self.link.send(Played(number, []))
