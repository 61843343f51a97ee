"""The server of an environment: a process that loads it, plays what the orchestrator asks for, and asks the inference servers itself.

    Load → load the environment → its rows and facts → Serve, Give → Play … Play → the rollouts go out as Played, with their tokens

`rlx.envs.pool` starts it through `rlx/envs/boot.py`, in this or in another Python, so its imports are light: the standard library, numpy,
msgspec, aiohttp, tokenizers, jinja2, and modules of rlx that need no more. It ends when the orchestrator ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import hashlib
import importlib
import logging
import logging.handlers
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import replace
from types import FunctionType
from typing import Any

from rlx.config.pythons import sources_of
from rlx.envs.errors import in_one_line
from rlx.envs.kinds import load_one
from rlx.envs.local import Late
from rlx.envs.wire import (
    Beat,
    CancelPlay,
    Failed,
    Give,
    Link,
    Load,
    Loaded,
    Play,
    Played,
    Scores,
    Serve,
    ToWorker,
    decoder,
    encode,
    frame,
    pack_row,
    unpack_row,
)
from rlx.inference.sampler import Sampler
from rlx.policy.spec import PolicySpec, chat_of, policy_of
from rlx.process import die_with_parent, keep_event_loop_free
from rlx.stack_dump import answer_in_child, explain_with, where_rollouts_wait
from rlx.types import Task

log = logging.getLogger("rlx.envs.worker")

SAMPLE = 64  # rows in the digest
BEAT, LOOK = 1.0, 0.1  # seconds between two beats, and between two looks at the event loop
SHORT = 0.02  # seconds that a turn in the event loop may be late: it delays nobody
PLAYING: ContextVar[int] = ContextVar("PLAYING")
"""The request that the current task, or call in a thread, belongs to."""


def main(name: str, sock: str, beats: str, stacks: str) -> None:
    """Serve until the orchestrator is gone. `sock`, `beats` and `stacks` are file descriptors that it made."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name}: %(message)s", datefmt="%H:%M:%S")
    for library in ("httpx", "httpx2"):
        logging.getLogger(library).setLevel(logging.WARNING)  # otherwise a line for every request to an endpoint
    faulthandler.enable(file=int(stacks))
    faulthandler.register(signal.SIGUSR1, file=int(stacks), all_threads=True)  # answers even while C code holds the interpreter
    load: Load = decoder(Load)(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    link = socket.socket(fileno=int(sock))
    try:
        env = load_one(load.name, load.config, load.settings)
        _outlive_signals()
        link.sendall(frame(introduction(env, load)))
    except Exception as error:
        log.exception("loading failed")
        link.sendall(frame(Failed(0, in_one_line(error, sources_of(load.config.id)), traceback.format_exc())))
        os._exit(1)
    loop = new_loop()
    asyncio.set_event_loop(loop)
    explain_with(lambda: where_rollouts_wait(loop, getattr(env, "sources", None)))
    answer_in_child(name, int(stacks))
    server = WorkerServer(link, env, load.settings.keeps_late)
    Heart(socket.socket(fileno=int(beats)), loop, server).start()
    loop.run_until_complete(server.serve())
    os._exit(0)  # a thread that hangs must not keep the process


def _outlive_signals() -> None:
    """Leave the decision about SIGINT and SIGTERM to the orchestrator: the worker ends when the orchestrator closes the link.

    SLURM sends them to every process of a job. The processes that this one starts keep their own: Python's handlers do not outlive
    `exec`, and a forked child gets back those from before.
    """
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    os.register_at_fork(after_in_child=lambda: [signal.signal(*each) for each in before.items()])


def introduction(env: Any, load: Load) -> Loaded:
    """The environment's rows and facts."""
    rows = env.rows
    digest = hashlib.blake2b(str(len(rows)).encode(), digest_size=16)
    for place in range(0, len(rows), max(1, len(rows) // SAMPLE)):
        digest.update(pack_row(rows[place]))
    return Loaded(
        rows=[pack_row(row) for row in rows] if load.send_rows else [],
        columns=len(rows) > 0 and isinstance(rows[:1], dict),
        scores_groups=env.scores_groups,
        digest=digest.hexdigest(),
        tools=[dict(tool) for tool in env.tools],
        sources=str(sources_of(load.config.id) or ""),
        agents=list(env.agents),
    )


# whose code runs


async def _awaited(coroutine: Any) -> Any:
    return await coroutine


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def named(function: Any, number: int) -> Any:
    """The function, with its file named after a request: so a dump of stacks says whose code runs (`read_dump`)."""
    return FunctionType(function.__code__.replace(co_filename=f"<request {number}>"), function.__globals__)


def _new_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task:
    number = PLAYING.get(None)
    return asyncio.Task(coroutine if number is None else named(_awaited, number)(coroutine), loop=loop, **options)


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop in whose stacks every task, and every call in a thread, has the request that it belongs to."""
    fastest: Any = asyncio.SelectorEventLoop
    with contextlib.suppress(ImportError):
        fastest = importlib.import_module("uvloop").Loop

    class Loop(fastest):
        def run_in_executor(self, executor: Any, function: Callable[..., Any], *arguments: Any) -> Any:
            number = PLAYING.get(None)
            if number is not None and (executor is None or isinstance(executor, ThreadPoolExecutor)):
                function = functools.partial(named(_called, number), function)
            return super().run_in_executor(executor, function, *arguments)

    loop = Loop()
    loop.set_task_factory(_new_task)
    return loop


class Heart(threading.Thread):
    """Sends the beats, also while the event loop is blocked, and measures how long what is ready waits for its turn in it."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, server: WorkerServer) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.sock, self.loop, self.server = sock, loop, server
        self.turns, self.asked, self.delay = 0, 0.0, 0.0  # asked: monotonic seconds since which the loop is asked to turn; 0: it is not
        self.warnings: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        for name in ("rlx.policy", "rlx.inference"):  # what they say concerns the run, and not the environment's code
            handler = logging.handlers.QueueHandler(self.warnings)
            handler.setLevel(logging.WARNING)
            logging.getLogger(name).addHandler(handler)

    def run(self) -> None:
        """See `threading.Thread.run`."""
        seen: Any = None
        since = sent = time.monotonic()
        while True:
            now = time.monotonic()
            before, seen = seen, (asyncio.current_task(self.loop), self.turns)
            since = since if seen == before else now
            if not self.asked:
                self.asked = now
                self.loop.call_soon_threadsafe(self._turn)
            if now - sent >= BEAT:
                sent = now
                delay, sampler = max(self.delay, now - self.asked if self.asked else 0.0), self.server.sampler
                warnings = [self.warnings.get().getMessage() for _ in range(self.warnings.qsize())]
                servers = (0, 0.0) if sampler is None else (sampler.waiting, sampler.away)
                with contextlib.suppress(OSError):  # the orchestrator is gone
                    self.sock.send(encode(Beat(now - since, delay, *servers, warnings)))
            time.sleep(LOOK)

    def _turn(self) -> None:
        self.delay = time.monotonic() - self.asked
        Late.seconds += self.delay if self.delay > SHORT else 0.0
        self.turns, self.asked = self.turns + 1, 0.0


class WorkerServer:
    """Plays requests concurrently, and sends each rollout as soon as it is scored."""

    def __init__(self, link: socket.socket, env: Any, keeps_late: bool) -> None:
        self.env, self.keeps_late, self.link = env, keeps_late, Link(link, ToWorker)
        self.sampler: Sampler | None = None
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Serve until the orchestrator closes the link; then let the environment release its resources."""
        async for message in self.link.messages():
            await self._take(message)
        for task in self._playing.values():
            task.cancel()
        await asyncio.gather(*self._playing.values(), return_exceptions=True)
        await self.env.close()
        if self.sampler is not None:
            await self.sampler.__aexit__()

    async def _take(self, message: Any) -> None:
        match message:
            case Play():
                token = PLAYING.set(message.number)
                playing = self._playing[message.number] = asyncio.get_running_loop().create_task(self._play(message))
                PLAYING.reset(token)
                playing.add_done_callback(lambda task: self._played(message.number, task))
            case CancelPlay():
                if message.number in self._playing:
                    self._playing[message.number].cancel()
            case Serve() if self.sampler is not None:
                self.sampler.take(message.servers)
            case Serve():
                self.sampler = Sampler(message.servers.endpoints, message.servers.request_timeout)
                self.sampler.take(message.servers)
                await self.sampler.__aenter__()
            case Give():
                self._make(message.policy)
            case Played():  # of a request that could not be read
                self.link.send(message)
            case Failed():
                raise RuntimeError(message.error)

    def _make(self, spec: PolicySpec) -> None:
        try:
            policy = policy_of(spec, None if spec.chat is None else chat_of(spec.chat), self.sampler)
        except Exception as error:  # a package that this Python lacks, a template that it cannot read
            log.exception("the policy cannot be made")
            self.link.send(Failed(0, f"its policy cannot be made: {in_one_line(error, None)}", traceback.format_exc()))
            return
        self.env.policy = policy
        if self.keeps_late:
            self.env.scores = lambda trace: self.link.send(Scores(PLAYING.get(), trace))
        keep_event_loop_free()  # all is loaded

    async def _play(self, asked: Play) -> None:
        try:
            task = Task(env=self.env.name, example_id=asked.example_id, index=asked.index, row=unpack_row(asked.row))
            rollouts = await self.env.play(task, asked.members, asked.attempt)
            bare = replace(task, row={})  # the orchestrator has it
            members = [[replace(run, task=bare, siblings=()) for run in (each, *each.siblings)] for each in rollouts]
            self.link.send(Played(asked.number, members))
        except Exception as error:
            self.link.send(Failed(asked.number, f"{type(error).__name__}: {error}", traceback.format_exc()))

    def _played(self, number: int, task: asyncio.Task[None]) -> None:
        """A request has ended."""
        del self._playing[number]
        if task.cancelled():
            self.link.send(Played(number))
