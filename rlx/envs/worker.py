"""The worker of an environment: a process that loads it, plays what the orchestrator asks for, and knows no tokens.

    Load → load the environment → its rows and facts → Play … Play → the episodes' requests go out as Ask, the rollouts as Played

`rlx.envs.pool` starts it through `rlx/envs/boot.py`, in this or in another Python, so its imports are light: the standard library, numpy,
msgspec, verifiers, and modules of rlx that need no more. It ends when the orchestrator ends.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import hashlib
import logging
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

from rlx.envs.errors import in_one_line, sources_of
from rlx.envs.load import load_one
from rlx.envs.marks import PLAYING, SPENT, Marks, ThreadMarks, marked_tasks
from rlx.envs.remote import RemoteEpisode, RemotePolicy
from rlx.envs.wire import (
    Answer,
    CancelPlay,
    Link,
    Load,
    Loaded,
    LoadFailed,
    Ping,
    Play,
    Played,
    PlayFailed,
    Pong,
    Refusal,
    Result,
    Rows,
    ToWorker,
    pack_row,
    unpack_row,
)
from rlx.process import die_with_parent
from rlx.stacks import answer_in_child, explain_with, where_rollouts_wait
from rlx.types import Rollout, Task

log = logging.getLogger("rlx.envs.worker")

CHUNK = 1000  # rows sent at a time
SAMPLE = 64  # rows in the digest


def main(name: str, sock: str, marks: str, stacks: str) -> None:
    """Serve until the orchestrator is gone. `sock`, `marks` and `stacks` are file descriptors that it made."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name}: %(message)s", datefmt="%H:%M:%S")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=int(stacks), all_threads=True)  # answers even while C code holds the interpreter
    link = Link(socket.socket(fileno=int(sock)), ToWorker)
    load = _first(link)
    began = time.monotonic()
    try:
        env = load_one(load.name, load.config, load.settings)
        _outlive_signals()
        _introduce(link, env, load, time.monotonic() - began)
    except Exception as error:
        log.exception("loading failed")
        link.send_now(LoadFailed(in_one_line(error, sources_of(load.config.id)), traceback.format_exc()))
        os._exit(1)
    gc.freeze()  # as in the orchestrator: what is loaded stays
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
    Server(link, env, loop).run()
    os._exit(0)  # a thread that hangs must not keep the process


def _loop_class() -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop
    return uvloop.Loop


def _first(link: Link) -> Load:
    """The first message. Leaves if the orchestrator is gone."""
    while (messages := link.receive(60.0)) is not None:
        if messages:
            assert isinstance(messages[0], Load), f"the first message is {messages[0]}"
            return messages[0]
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


class Server:
    """Plays requests concurrently, and sends each rollout as soon as it is scored."""

    def __init__(self, link: Link, env: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.link, self.env, self.loop = link, env, loop
        self.policy = RemotePolicy(link)
        env.policy = self.policy
        self._playing: dict[int, asyncio.Task[None]] = {}

    def run(self) -> None:
        """Serve until the orchestrator closes the link; then let the environment release its resources."""
        self.loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        gone = asyncio.Event()
        self.link.attach(self._handle, gone.set)
        await gone.wait()
        for task in self._playing.values():
            task.cancel()
        await asyncio.gather(*self._playing.values(), return_exceptions=True)
        await self.env.close()

    def _handle(self, message: Any) -> None:
        if isinstance(message, Answer | Refusal):
            self.policy.answered(message)
        elif isinstance(message, Play):
            SPENT.begin(message.number)
            token = PLAYING.set((message.number, message.members[0] + 1 if len(message.members) == 1 else 0))
            playing = self._playing[message.number] = self.loop.create_task(self._play(message))
            PLAYING.reset(token)
            playing.add_done_callback(lambda task: self._played(message.number, task))
        elif isinstance(message, CancelPlay):
            if message.number in self._playing:
                self._playing[message.number].cancel()
        elif isinstance(message, Ping):
            self.link.send(Pong())

    async def _play(self, asked: Play) -> None:
        self.policy.context_length = asked.context_length
        try:
            task = Task(env=self.env.name, example_id=asked.example_id, index=asked.index, row=unpack_row(asked.row))
            rollouts = await self.env.play(task, asked.members, asked.attempt)
            episodes = self.policy.finish(asked.number)
            self.link.send(Played(asked.number, [_result(rollout, episodes.get(rollout.member)) for rollout in rollouts]))
        except Exception as error:
            self.link.send(PlayFailed(asked.number, f"{type(error).__name__}: {error}", traceback.format_exc()))

    def _played(self, number: int, task: asyncio.Task[None]) -> None:
        """A request has ended."""
        del self._playing[number]
        SPENT.end(number)
        self.policy.finish(number)
        if task.cancelled():
            self.link.send(Played(number, []))


def _result(rollout: Rollout, episode: RemoteEpisode | None) -> Result:
    return Result(
        rollout.member,
        rollout.prompt,
        rollout.completion,
        rollout.reward,
        rollout.rewards,
        rollout.metrics,
        rollout.status,
        rollout.stop,
        rollout.error,
        rollout.is_truncated,
        rollout.timing,
        None if episode is None or not episode.kept else episode.kept.pop(0),
        rollout.agent,
        rollout.compared,
        rollout.asked,
        [_result(other, episode) for other in rollout.others],
    )
