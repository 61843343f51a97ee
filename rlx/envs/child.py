"""One worker as a process: start it, ask for its stacks, measure its memory, end it with everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rlx.descendants import WORKER_TOKEN, kill_all, memory_below
from rlx.envs import boot
from rlx.envs.marks import Mark, Marks
from rlx.envs.stacks import environments_line, threads
from rlx.envs.wire import FromWorker, Link

STACK_WAIT = 5.0  # seconds for a process to write its stacks
PAGE = os.sysconf("SC_PAGE_SIZE")


class Child:
    """A worker's process, the link to it, and the memory in which it marks what it computes."""

    def __init__(self, name: str, python: str | None, log: Path | None) -> None:
        """Start it. `name` is for people. `python`: the interpreter; None: this one. `log`: the file for its output, to append to.

        Call it on the main thread: the kernel ends the child when the thread that started it ends. Raises OSError if it cannot start.
        """
        self.name, self._reaped = name, False
        self._below = 0  # bytes of the processes that it has started
        self.sources = ""  # folder or file of the environment's own code
        ours, theirs = socket.socketpair()
        marks, self._stacks = Marks.create(), os.memfd_create("rlx-stacks")
        self._log = os.memfd_create("rlx-log") if log is None else os.open(log, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._log_from = os.fstat(self._log).st_size
        shared = (theirs.fileno(), marks, self._stacks)
        command = [python or sys.executable, boot.__file__, "worker", name, *map(str, shared)]
        environment = boot.environment(another=python is not None)
        self._token = secrets.token_hex(16)
        try:
            # A session of its own: a signal to its group reaches what the environment starts, and nothing else. Processes in sessions of
            # their own, as verifiers' tool servers are, carry the token.
            self.process = subprocess.Popen(
                command,
                env=environment | {WORKER_TOKEN: self._token},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=shared,
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.pid, self.pidfd = self.process.pid, os.pidfd_open(self.process.pid)
        self.link = Link(ours, FromWorker)
        self.marks = Marks(marks)
        os.close(marks)

    def last_lines(self, count: int = 12) -> str:
        """The end of what it has printed."""
        size = os.fstat(self._log).st_size
        start = max(self._log_from, size - 8192)
        text = os.pread(self._log, size - start, start).decode(errors="replace")
        return "\n".join(text.rstrip().splitlines()[-count:])

    def measure(self) -> None:
        """Measure the memory of the processes that it has started. It takes milliseconds for each GiB, so call it in a thread."""
        self._below = memory_below(self.pid)

    def memory(self) -> int:
        """Resident bytes, and those of the processes that it had started when they were last measured; 0 if it is gone."""
        try:
            with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * PAGE + self._below
        except (OSError, IndexError):
            return 0

    async def stack(self, mark: Mark | None) -> str:
        """The environment's function that runs in the marked thread (None: in the event loop); empty if the process cannot tell.

        The process writes the stacks of all threads, also while C code holds the interpreter. They are added to its log.
        """
        if self._reaped:
            return ""
        begin = os.fstat(self._stacks).st_size
        os.kill(self.pid, signal.SIGUSR1)  # the process is not reaped, so its number is its own
        size, same, dump, deadline = begin, 0, b"", time.monotonic() + STACK_WAIT
        while time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            if self._reaped:
                return ""
            now = os.fstat(self._stacks).st_size
            same, size = same + 1 if now == size else 0, now
            dump = os.pread(self._stacks, size - begin, begin)
            if same > 1 and b"Current thread" in dump:  # it is written in many pieces, and this thread comes last
                break
        with contextlib.suppress(OSError):  # a full disk
            os.write(self._log, dump)
        found = threads(dump.decode(errors="replace"))
        # The event loop may only be waiting for the interpreter, which the rollout's own call in a thread holds.
        own = [call.thread for call in self.marks.calls() if mark is not None and call.play == mark.play]
        return environments_line(found.get(own[0] if own else 0, []), self.sources)

    def kill(self) -> None:
        """End it and its process group. What it started elsewhere ends when it is reaped."""
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        """Release everything of a process that has ended, and end what it left behind. Returns its exit code, negative for a signal."""
        if self._reaped:
            return self.process.wait()
        self.kill()
        code = self.process.wait()
        self._reaped = True
        # In a thread, because looking through /proc would hold up the event loop. By the token alone: its number may be another's now.
        # If this process ends first, its supervisor ends them: they carry the run's token, too.
        threading.Thread(target=kill_all, args=((), self._token), kwargs={"variable": WORKER_TOKEN}, name=f"end {self.name}").start()
        self.link.close()
        self.marks.close()
        for fd in (self.pidfd, self._stacks, self._log):
            os.close(fd)
        return code


def how(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"it left with exit code {code}"
    hint = "; the system may have been out of memory" if code == -signal.SIGKILL else ""
    return f"{signal.Signals(-code).name} ended it{hint}"


def measure_all(children: Sequence[Child]) -> None:
    """`measure` each."""
    for child in children:
        child.measure()
