"""How the parts of one server on several hosts find each other, and how each learns that another is gone.

The engines of a server with `hardware.data_parallel` may run in several processes: the head, which answers requests, and parts without an
address of their own ("headless"). The head writes its address to the run directory; each part connects and keeps the connection open.
vLLM itself watches only the engines that it started: after the death of another, its requests would wait for ever.

Knows nothing of vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_urlsafe

from rlx.inference.endpoints import bind
from rlx.paths import RunPaths, listed, write_text
from rlx.process import host_name
from rlx.waiting import wait_for

ADDRESS = "RLX_DATA_PARALLEL_ADDRESS"  # environment variable of the head: where the other hosts reach it; else by the host's name
PORT = "RLX_DATA_PARALLEL_RPC_PORT"  # environment variable of the head: the port at which engines ask for it; else a free one
LOOPBACK = "127.0.0.1"
CONNECT = 10.0  # seconds for one connection
SILENT = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))  # a host that is gone for 30 s counts as lost
LONGEST = 2**16  # bytes of a message
SERVING = "serving"


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the head tells its parts, through a file that only the user can read."""

    address: str  # of the head's host, as a number
    rpc_port: int  # where vLLM's engines ask the head for their place
    port: int  # where parts connect
    key: str  # which they must show
    token: str  # of the attempt; a part ignores the files of earlier ones


def meeting_file(paths: RunPaths, replica: int) -> Path:
    return paths.endpoints / f"data_parallel_{replica}.json"


def own_address(several_hosts: bool, environ: Mapping[str, str]) -> str:
    """The address at which a head is reached. Raises OSError, with a message for the user, if other hosts could not reach it."""
    name = environ.get(ADDRESS) or (host_name() if several_hosts else LOOPBACK)
    try:
        found = socket.gethostbyname(name)
    except OSError as error:
        raise OSError(
            f"{name}, the name of this host, has no address: {error.strerror}; set {ADDRESS} to one that the others reach"
        ) from error
    if several_hosts and found.startswith("127."):
        raise OSError(f"other hosts cannot reach {name}: it is {found} here; set {ADDRESS} to an address that they reach")
    return found


def own_port(environ: Mapping[str, str]) -> int:
    """The port at which engines ask the head for their place; 0: any free one. Raises OSError, with a message for the user."""
    text = environ.get(PORT) or "0"
    if not (text.isdecimal() and int(text) < 2**16):
        raise OSError(f"{PORT}={text} is no port: set it to a number below 65536, or leave it out for a free one")
    return int(text)


def end(why: str) -> None:
    """End this process at once."""
    print(why, file=sys.stderr, flush=True)
    os._exit(1)


class Line:
    """A connection between a head and a part. Messages are lines of JSON. A thread reads them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in SILENT:
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._file = sock.makefile("rb")

    def say(self, **message: str | int) -> None:
        """Send a message; nothing happens if the other end is gone, because its reader finds that out."""
        with contextlib.suppress(OSError):
            self._sock.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict | None:
        """The next message; None if the other end is gone."""
        try:
            return json.loads(self._file.readline(LONGEST) or "null")
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class Head:
    """The head's end. `lost` is called from a thread with the reason whenever a part is gone. At first it ends the process."""

    def __init__(self, file: Path, address: str, parts: int, token: str, rpc_port: int = 0) -> None:
        """Listen, and publish the meeting. `parts`: how many there are, without the head. Raises OSError if a port is taken."""
        self._kept = bind(address, rpc_port)
        self._server = bind(address, 0)
        self._server.setblocking(True)
        self.meeting = Meeting(address, self._kept.getsockname()[1], self._server.getsockname()[1], token_urlsafe(24), token)
        self.lost: Callable[[str], None] = end
        self._parts, self._lines, self._serving = parts, dict[int, Line](), False
        self._closed: str | None = None  # why the server ends
        self._lock = threading.Lock()
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(asdict(self.meeting)), 0o600)
        threading.Thread(target=self._accept, name="parts", daemon=True).start()

    def let_port_go(self) -> None:
        """Free the port at which engines ask for their place, for vLLM, which is about to bind it. Until then nobody else can take it."""
        self._kept.close()

    def serving(self) -> None:
        """Tell the parts that the server serves."""
        with self._lock:
            self._serving = True
            for line in self._lines.values():
                line.say(state=SERVING)

    def close(self, why: str) -> None:
        """Take the file away and tell the parts why the server ends."""
        self.lost = lambda _: None
        self._file.unlink(missing_ok=True)
        with self._lock:
            self._closed = why  # a part that is being let in just now hears it, too
            for line in self._lines.values():
                line.say(why=why)
                line.close()
        self._server.close()
        self._kept.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._listen, args=(Line(sock),), name="part", daemon=True).start()

    def _listen(self, line: Line) -> None:
        hello = line.hear()
        if not isinstance(hello, dict) or hello.get("key") != self.meeting.key or hello.get("part") not in range(1, self._parts + 1):
            line.close()  # a stranger
            return
        part, name = hello["part"], hello["name"]
        with self._lock:
            if self._closed is not None or part in self._lines:
                line.say(why=f"part {part} of this server is there already" if self._closed is None else self._closed)
                line.close()
                return
            self._lines[part] = line
            line.say(state=SERVING if self._serving else "starting")
        why = "its connection closed: the process was killed, or its host is gone; its log may say more"
        while (message := line.hear()) is not None:
            why = message.get("why", why)
        self.lost(f"a part of this server is gone, {name}: {why}")


class Part:
    """A part's end. `lost` is called once, from a thread, with the reason: the head is gone."""

    def __init__(self, line: Line, meeting: Meeting, lost: Callable[[str], None] = end) -> None:
        self.meeting, self.lost = meeting, lost
        self.serving = False  # whether the server serves
        self._joined, self._over = False, False  # whether the head has answered; whether it is gone
        self._line = line
        threading.Thread(target=self._listen, name="head", daemon=True).start()

    @classmethod
    def join(
        cls, file: Path, part: int, name: str, token: str, timeout: float, tick: Callable[[], None], lost: Callable[[str], None] = end
    ) -> Part:
        """Connect with the head that wrote `file`, and hear its answer; wait at most `timeout` seconds. Raises WaitTimeout.

        `part`: this part's number, from 1. `tick` is called while waiting. A file of an earlier attempt, or of a head that is gone, is
        ignored until a new one comes.
        """

        asked: Part | None = None

        def reach() -> Part | None:
            nonlocal asked
            if asked is None or (asked._over and not asked._joined):
                asked = cls._ask(file, part, name, token, lost)
            return asked if asked is not None and asked._joined else None

        try:
            return wait_for(reach, f"the head of this server ({file})", timeout, poll=0.1, tick=tick)
        except BaseException:
            if asked is not None:
                asked.leave("it no longer waits for the head's answer")
            raise

    @classmethod
    def _ask(cls, file: Path, part: int, name: str, token: str, lost: Callable[[str], None]) -> Part | None:
        """Connect with the head that wrote `file` and tell it this part's name; None if there is no such head yet."""
        try:
            meeting = Meeting(**json.loads(file.read_text())) if listed(file) else None
            if meeting is None or meeting.token != token:
                return None
            sock = socket.create_connection((meeting.address, meeting.port), CONNECT)
        except (OSError, ValueError, TypeError):
            return None
        sock.settimeout(None)
        line = Line(sock)
        line.say(key=meeting.key, part=part, name=name)
        return cls(line, meeting, lost)

    def leave(self, why: str) -> None:
        """Tell the head why this part ends."""
        self.lost = lambda _: None
        self._line.say(why=why)
        self._line.close()

    def _listen(self) -> None:
        why = "its connection closed: the process was killed, or its host is gone"
        while (message := self._line.hear()) is not None:
            self._joined = True
            self.serving |= message.get("state") == SERVING
            why = message.get("why", why)
        self._over = True
        if self._joined:
            self.lost(f"the head of this server is gone: {why}")
