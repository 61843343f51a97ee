"""Processes of this machine that run for a box: what they say, how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

MOST_OUTPUT = 2**20  # bytes of a command's output that are kept, half from its beginning and half from its end
HALF = MOST_OUTPUT // 2


class Kept:
    """What a stream has said, without its middle where that is more than MOST_OUTPUT bytes."""

    def __init__(self) -> None:
        self.data, self.left_out = bytearray(), 0

    async def read(self, stream: asyncio.StreamReader | None) -> None:
        """Read a stream to its end."""
        assert stream is not None
        while data := await stream.read(2**16):
            self.data += data
            more = max(len(self.data) - MOST_OUTPUT, 0)
            del self.data[HALF : HALF + more]
            self.left_out += more

    def text(self) -> str:
        """What is kept, with a note of what is not."""
        note = f"\n[{self.left_out:,} bytes left out]\n".encode() if self.left_out else b""
        return (self.data[:HALF] + note + self.data[HALF:]).decode(errors="replace")


async def exit_code(process: asyncio.subprocess.Process) -> int:
    """The exit code as soon as there is one. `Process.wait` would wait for whoever holds its pipes."""
    over = asyncio.Event()
    with contextlib.suppress(ProcessLookupError):  # it was quicker
        fd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(fd, over.set)
        try:
            await over.wait()
        finally:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
    while process.returncode is None:
        await asyncio.sleep(0.001)
    return process.returncode


async def give(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
    stream.close()


def end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def release(process: asyncio.subprocess.Process) -> None:
    """Close the pipes of a process that has ended, though something that it started may hold their other ends."""
    process._transport.close()  # type: ignore[attr-defined]


async def output(command: Sequence[str]) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode(errors="replace").strip()
