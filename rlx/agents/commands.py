"""Commands of this machine that run for a box: what they say, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST_OUTPUT = 2**20  # bytes of a command's output that are kept, half from its beginning and half from its end
HALF = MOST_OUTPUT // 2
LINGERING = 0.5  # seconds to read what a command has said when it has ended and something that it started holds its pipes
OUT, ERR = 1, 2


class Running(asyncio.SubprocessProtocol):
    """A process that runs, what it has said without the middle, and its end."""

    transport: asyncio.SubprocessTransport

    def __init__(self) -> None:
        self.kept, self.left_out = {OUT: bytearray(), ERR: bytearray()}, {OUT: 0, ERR: 0}
        self.ended, self.closed = asyncio.Event(), asyncio.Event()  # closed: nothing holds its pipes

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        kept = self.kept[fd]
        kept += data
        more = max(len(kept) - MOST_OUTPUT, 0)
        del kept[HALF : HALF + more]
        self.left_out[fd] += more

    def process_exited(self) -> None:
        self.ended.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()

    def text(self, fd: int) -> str:
        """What it has said, with a note of what is left out."""
        note = f"\n[{self.left_out[fd]:,} bytes left out]\n".encode() if self.left_out[fd] else b""
        return (self.kept[fd][:HALF] + note + self.kept[fd][HALF:]).decode(errors="replace")

    def end(self) -> None:
        """End it, and what it has started but for what has left its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.transport.get_pid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Result:
    """What a command left."""

    code: int  # negative: the signal that ended it
    stdout: str
    stderr: str
    late: bool = False  # it ran out of time and was ended


async def run(
    argv: Sequence[str],
    given: bytes = b"",
    *,
    timeout: float | None = None,
    until: asyncio.Event | None = None,
    grace: float = 0.0,
    pass_fds: Sequence[int] = (),
) -> Result:
    """Run a command in a process group of its own. `given`: its standard input.

    It is ended after `timeout`, or `grace` after `until` is set.
    """
    running, loop = Running(), asyncio.get_running_loop()
    running.transport, _ = await loop.subprocess_exec(lambda: running, *argv, start_new_session=True, pass_fds=pass_fds)
    stdin: Any = running.transport.get_pipe_transport(0)
    if not stdin.is_closing():  # uvloop has closed it if the command was quicker
        stdin.write(given)
        stdin.close()
    ending = asyncio.ensure_future(running.ended.wait())
    asked = asyncio.ensure_future((until or asyncio.Event()).wait())
    try:
        await asyncio.wait({ending, asked}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            await asyncio.wait({ending}, timeout=grace)
        if late := not ending.done():
            running.end()
        await ending
        with contextlib.suppress(TimeoutError):  # what it has left behind may hold the pipes
            await asyncio.wait_for(running.closed.wait(), LINGERING)
        return Result(running.transport.get_returncode() or 0, running.text(OUT), running.text(ERR), late)
    finally:
        asked.cancel()
        ending.cancel()
        running.end()
        running.transport.close()
