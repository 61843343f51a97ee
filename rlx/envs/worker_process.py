"""One worker as a process, and what the pool knows of it: start it, hear it, ask for its stacks, end it with everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlx.envs import boot
from rlx.envs.base import failed
from rlx.envs.wire import Beat, Failed, FromWorker, Link, Load, Played, decoder, encode
from rlx.process_tree import WORKER_TOKEN, kill_all, memory_below
from rlx.stack_dump import own_line
from rlx.trace import Trace
from rlx.types import Rollout, Status, Task

STACKS = 5.0  # seconds for a process to write its stacks
CROWDED = 0.2  # seconds of waiting for a turn in a worker's event loop above which its rollouts count as waiting for each other
PAGE = os.sysconf("SC_PAGE_SIZE")

_beat = decoder(Beat)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
_REQUEST = re.compile(r'^  File "<request (\d+)>"', re.MULTILINE)
_RLX = f"{Path(__file__).resolve().parent.parent}/"


@dataclass(slots=True, eq=False)
class InFlight:
    """One request, from `WorkerPool.play` to its answer."""

    number: int
    task: Task
    members: tuple[int, ...]
    attempt: int
    answer: asyncio.Future[list[Rollout]]
    crowd: int = 0  # it may be what ended its worker, so at most so many of such play together; 0: nothing is known against it
    began: float = field(default_factory=time.monotonic)  # monotonic seconds
    sampled: Trace | None = None  # of a member whose rewards compute, if that is kept

    def settle(self, message: Played | Failed) -> None:
        """Answer it with what its worker says."""
        if self.answer.done():
            return
        if isinstance(message, Failed):
            self.answer.set_exception(RuntimeError(f"{message.error}\n{message.trace}"))
        elif message.rollouts:
            own = [[replace(rollout, task=self.task) for rollout in runs] for runs in message.rollouts]
            self.answer.set_result([replace(first, siblings=tuple(others)) if others else first for first, *others in own])
        else:
            self.fail("environment", message.error)

    def fail(self, cause: str, error: str) -> None:
        """Answer that it failed. Of several members the first has, and the others are cancelled: nobody knows which it was."""
        stop = {"timeout": "timeout", "environment": "environment_error"}.get(cause, f"worker_{cause}")
        status: Status = "timeout" if cause == "timeout" else "error"
        timing = {"total": time.monotonic() - self.began}
        first = failed(self.task, self.members[0], None, status, stop, error, timing)
        if self.sampled is not None:
            first = replace(first, trace=self.sampled)
        lost: Any = ("cancelled", "group_failed", "another rollout of the group failed", timing)
        self.answer.set_result([first, *(failed(self.task, other, None, *lost) for other in self.members[1:])])


class Worker:
    """A worker's process and the link to it."""

    def __init__(self, name: str, place: int | None, load: Load, python: str | None, log: Path | None) -> None:
        """Start it. `name` is for people. `place`: among the environment's workers; None: the one for requests under suspicion.

        `python`: the interpreter; None: this one. `log`: the file for its output, to append to. Call it on the main thread: the kernel
        ends the child when the thread that started it ends. Raises OSError if it cannot start.
        """
        self.name, self.place = name, place
        self.playing: dict[int, InFlight] = {}  # also those that were given up, until it says that they have ended
        self.loaded = self.retiring = False  # retiring: it gets no new requests
        self.verdict: tuple[str, str] | None = None  # the cause, and the text for people, for which we end it
        self.sources = self.error = ""  # folder or file of the environment's code; why it cannot be used, in its own words
        self.began = self.heard = time.monotonic()  # when it was started; when its latest beat came
        self.beat, self._dump = Beat(), b""
        self.memory = 0  # resident bytes, with those of the processes that it has started
        (ours, theirs), (self._beats, beats) = socket.socketpair(), socket.socketpair(type=socket.SOCK_DGRAM)
        self._stacks = open(os.memfd_create("rlx-stacks"), "rb", buffering=0)  # noqa: SIM115
        self._log = tempfile.TemporaryFile("ab+") if log is None else log.open("ab+")  # noqa: SIM115
        self._log_from, self._token = os.fstat(self._log.fileno()).st_size, secrets.token_hex(16)
        shared = (theirs.fileno(), beats.fileno(), self._stacks.fileno())
        with theirs, beats, tempfile.TemporaryFile() as told:
            told.write(encode(load))
            told.seek(0)
            # A session of its own: a signal to the run's group does not reach it. What it starts carries the token.
            self.process = subprocess.Popen(
                [python or sys.executable, boot.__file__, "worker", name, *map(str, shared)],
                env=boot.environment(another=python is not None) | {WORKER_TOKEN: self._token},
                stdin=told,
                stdout=self._log,
                stderr=self._log,
                pass_fds=shared,
                start_new_session=True,
            )
        self.link = Link(ours, FromWorker)

    def hear(self) -> list[str]:
        """Take its latest beat. Returns new warnings."""
        warnings: list[str] = []
        while True:
            try:
                self.beat, self.heard = _beat(self._beats.recv(2**20, socket.MSG_DONTWAIT)), time.monotonic()
            except OSError:
                return warnings
            warnings += self.beat.warnings

    @property
    def stuck(self) -> float:
        """Seconds for which its event loop has computed one step, or nothing was heard of it."""
        return self.beat.stuck + time.monotonic() - self.heard

    @property
    def waiting(self) -> int:
        """Rollouts that wait until it has computed for others: no request of theirs is at the servers."""
        members = sum(len(playing.members) for playing in self.playing.values())
        return max(0, members - self.beat.asking - 1) if self.beat.delay > CROWDED else 0

    def measure(self) -> None:
        """Measure its memory. That of what it has started takes milliseconds for each GiB, so call it in a thread."""
        with contextlib.suppress(OSError, IndexError):  # it is gone
            resident = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="utf-8").split()[1]) * PAGE
            self.memory = resident + memory_below(self.process.pid)

    def last_lines(self, count: int = 12) -> str:
        """The end of what it has printed."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(self._log_from, size - 8192)
        text = os.pread(self._log.fileno(), size - start, start).decode(errors="replace")
        return "\n".join(text.rstrip().splitlines()[-count:])

    async def dump(self, beats: bool) -> None:
        """Let it write the stacks of all its threads, which it does also while C code holds the interpreter.

        `beats`: a thread of it runs, so its event loop alone is stuck: the main thread's stack will do.
        """
        begin, before, deadline = self._stacks.seek(0, os.SEEK_END), b"", time.monotonic() + STACKS
        self.process.send_signal(signal.SIGUSR1)
        while time.monotonic() < deadline and not self._dump:
            await asyncio.sleep(0.1)
            dump = os.pread(self._stacks.fileno(), 2**20, begin)
            self._dump, before = dump if dump == before else b"", dump  # it is written in many pieces
        self._dump = self._dump[self._dump.rfind(b"Current thread") if beats else 0 :]

    @property
    def stacks(self) -> str:
        """What its threads did when it was ended, or when a signal ended it; empty if it left by itself."""
        if not self._dump:
            self._stacks.seek(0)
            self._dump = self._stacks.read().partition(b"Fatal Python error")[2]
        return self._dump.decode(errors="replace")

    def end(self) -> None:
        """Kill it and what it has started."""
        self.process.kill()
        self.process.wait()
        # In a thread, because looking through /proc would hold up the event loop. By the token alone: its number may be another's now.
        # If this process ends first, its supervisor ends them: they carry the run's token, too.
        threading.Thread(target=kill_all, args=((), self._token), kwargs={"variable": WORKER_TOKEN}, name=f"end {self.name}").start()


def how(code: int) -> str:
    """How a process ended, in words."""
    hint = "; the system may have been out of memory" if code == -signal.SIGKILL else ""
    return f"it left with exit code {code}" if code >= 0 else f"{signal.Signals(-code).name} ended it{hint}"


def read_dump(dump: str, sources: str) -> tuple[set[int], str]:
    """(requests that a process computes for, innermost line of the environment's code, or of other code, in their threads).

    Current thread 0x00007f… (most recent call first):
      File "/site-packages/sympy/core/power.py", line 1167 in _eval_expand
      File "/site-packages/rlx_math/__init__.py", line 40 in correct       ← the environment's: "/…/rlx_math/__init__.py:40 in correct"
      File "<request 17>", line 3 in _awaited                              ← whose code it is (`rlx.envs.worker.named`)

    `dump`: what `faulthandler` wrote. `sources`: folder or file of the environment's code; empty if it is not known. Without a request, the
    line is the main thread's.
    """
    stacks = _THREAD.split(dump)  # the main thread's comes last
    found = [stack for stack in stacks if _REQUEST.search(stack)] or stacks[-1:]
    frames = [f"{file}:{line} in {name}" for file, line, name in _FRAME.findall(found[0]) if not file.startswith((_RLX, "<request"))]
    return set(map(int, _REQUEST.findall(dump))), own_line(frames, Path(sources) if sources else None)
