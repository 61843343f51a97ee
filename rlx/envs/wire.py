"""The messages between the orchestrator and an environment's worker, and the socket that carries them.

    orchestrator                                       worker (a process that has loaded the environment)
    Load, Give, Serve, Play, CancelPlay, Ping   →
                                                  ←    Rows, Loaded, LoadFailed, Scores, Played, PlayFailed, Outage, Warned, Standing, Pong

A frame is four bytes of length and one message in msgpack. What is ready at the same moment goes out in one write.
Only plain values and arrays of numbers cross: no classes, no code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from rlx.config.schema_rollout import EnvConfig
from rlx.inference.sampler import Servers
from rlx.plain import from_json, to_json
from rlx.policy.spec import PolicySpec
from rlx.trace import Trace
from rlx.types import Rollout

log = logging.getLogger(__name__)

RECEIVE = 2**14  # bytes read at a time: the loop turns to other work between two reads


@dataclass(frozen=True)
class Settings:
    """What an environment needs to know of its run."""

    sampling: dict[str, Any] = field(default_factory=dict)  # default parameters of requests, by vLLM's names
    timeout: float = 600.0  # seconds for one rollout, unless the environment's configuration sets `rollout_timeout`
    concurrency: int = 1  # rollouts that may be in flight in one process
    keeps_late: bool = False  # what was sampled of a rollout that runs out of time counts (`envs.NAME.on_timeout`)


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Any message."""


class Load(Message):
    """The first message to a worker."""

    name: str
    config: EnvConfig
    settings: Settings
    send_rows: bool


class Play(Message):
    """Play these members of a group."""

    number: int
    example_id: int
    index: int
    row: bytes  # `pack_row`
    members: list[int]
    attempt: int


class CancelPlay(Message):
    """Give up a request. The worker answers with `Played` without results when the episodes have cleaned up."""

    number: int


class Give(Message):
    """The policy that plays from now on. Before the first `Play`."""

    policy: PolicySpec


class Serve(Message):
    """The servers that the policy samples on are these now. Before the first `Play`, unless an endpoint plays."""

    servers: Servers


class Ping(Message):
    """Whether the worker's event loop runs."""


class Rows(Message):
    """Some rows of the data set, in order."""

    rows: list[bytes]  # `pack_row`


class Loaded(Message):
    """The environment is loaded. All its rows were sent before, if they were requested."""

    num_rows: int
    columns: bool  # a slice of the rows is a dict of columns, as in `datasets`
    scores_groups: bool
    digest: str  # of a sample of the rows: all workers of an environment must have the same
    tools: list[Any]  # `Environment.tools`
    sources: str  # folder or file of the environment's own code; empty: not known
    seconds: float  # that loading it took
    agents: list[str] = []  # `Environment.agents`


class LoadFailed(Message):
    """The environment could not be loaded, or its policy not be made."""

    error: str
    trace: str


class Scores(Message):
    """What is trained of a rollout whose rewards compute now: they may block or end the worker. Only if `Settings.keeps_late`."""

    number: int
    member: int
    trace: Trace


class Played(Message):
    """The answer to a `Play`."""

    number: int
    rollouts: list[list[Rollout]]  # of each member, with the episode's further runs behind it; without the row of its task
    error: str = ""  # why there are none; empty: the rollout's task was cancelled


class PlayFailed(Message):
    """Playing raised: a defect of rlx, not of the environment, whose errors are results."""

    number: int
    error: str
    trace: str


class Outage(Message):
    """No server takes requests, or one takes them again."""

    begins: bool


class Warned(Message):
    """A warning of the policy in a worker, for the run's own log."""

    text: str


class Standing(Message):
    """What an endpoint's answers say about it (`rlx.policy.openai.Standing`)."""

    models: list[str]
    refusal: str | None


class Pong(Message):
    """The answer to a `Ping`."""


ToWorker = Load | Give | Serve | Play | CancelPlay | Ping
FromWorker = Rows | Loaded | LoadFailed | Scores | Played | PlayFailed | Outage | Warned | Standing | Pong


def _plain(value: Any) -> Any:
    """A value that msgpack does not know: arrays as bytes, numpy's numbers as Python's, pydantic's models as dicts, others as text."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    if hasattr(value, "model_dump"):
        return value.model_dump()
    return repr(value)


def _typed(kind: Any, value: Any) -> Any:
    """The value of an annotation that msgpack does not know."""
    if kind is Path:
        return Path(value)
    return np.frombuffer(value, get_args(get_args(kind)[1])[0])


class Head(msgspec.Struct, array_like=True, gc=False):
    """The beginning of a message about a request, whatever follows."""

    kind: str
    number: Any = 0  # of the request, if the message is about one


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode = msgspec.msgpack.Decoder().decode
_head = msgspec.msgpack.Decoder(Head).decode


def pack_row(row: Any) -> bytes:
    """A row of a data set as bytes. Raises CodecError if it holds other than plain values (`rlx.plain`)."""
    return encode(to_json(dict(row)))


def unpack_row(packed: bytes) -> dict[str, Any]:
    """The row behind `pack_row`."""
    return from_json(_decode(packed))


class Link:
    """One end of the socket. Used with a running loop after `attach`, and blocking before it."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        """`kind`: the union of the messages that arrive here."""
        self.sock = sock
        self._decode = msgspec.msgpack.Decoder(kind, dec_hook=_typed).decode
        self._in = bytearray()
        self._out = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flushing = False

    # -- without a loop

    def send_now(self, message: Message) -> None:
        """Send before a loop runs. The other end reads."""
        self.sock.setblocking(True)
        self.sock.sendall(_frame(message))

    def receive(self, timeout: float) -> list[Any] | None:
        """The messages that arrive within `timeout` seconds: [] if there are none, None if the other end is gone."""
        self.sock.settimeout(timeout)
        try:
            data = self.sock.recv(RECEIVE)
        except TimeoutError:
            return []
        except ConnectionError:
            return None
        return self._messages(data) if data else None

    # -- in a loop

    def attach(self, handle: Callable[[Any], None], lost: Callable[[], None]) -> None:
        """Hand every message to `handle` from now on, and call `lost` once when the other end is gone. Call it in a running loop."""
        self._loop = asyncio.get_running_loop()
        self._handle, self._lost = handle, lost
        self.sock.setblocking(False)
        self._loop.add_reader(self.sock.fileno(), self._readable)
        if self._out:
            self._flush()

    def send(self, message: Message) -> None:
        """Send soon, together with everything else of this turn of the loop. Raises what encoding raises."""
        self._out += _frame(message)
        if not self._flushing and self._loop is not None:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def send_at_once(self, message: Message, seconds: float = 1.0) -> None:
        """Send now, for at most so many seconds: what follows may block the loop."""
        self.send(message)
        self._flush()
        deadline = time.monotonic() + seconds
        while self._out and time.monotonic() < deadline:
            select.select([], [self.sock], [], 0.05)
            self._flush()

    def close(self) -> None:
        """Close the socket. What was not sent yet is dropped."""
        if self._loop is not None and self.sock.fileno() >= 0:
            self._loop.remove_reader(self.sock.fileno())
            self._loop.remove_writer(self.sock.fileno())
        self._out.clear()
        self.sock.close()

    def finish(self) -> None:
        """Tell the other end that nothing more will come."""
        with contextlib.suppress(OSError):  # it is gone
            self.sock.shutdown(socket.SHUT_WR)

    def drain(self) -> None:
        """Handle what has already arrived."""
        while self.sock.fileno() >= 0 and self._read():
            pass

    def _readable(self) -> None:
        if self._read() is False:
            assert self._loop is not None
            self._loop.remove_reader(self.sock.fileno())
            self._lost()

    def _read(self) -> bool | None:
        """Handle what has arrived. None if nothing is there, False at the end of the stream."""
        try:
            data = self.sock.recv(RECEIVE)
        except BlockingIOError:
            return None
        except ConnectionError:
            return False
        if not data:
            return False
        for message in self._messages(data):
            self._handle(message)
        return True

    def _flush(self) -> None:
        self._flushing = False
        if self.sock.fileno() < 0 or self._loop is None:
            return
        try:
            sent = self.sock.send(self._out)
        except BlockingIOError:
            sent = 0
        except ConnectionError:
            self._out.clear()  # the reader notices the end of the stream
            return
        del self._out[:sent]
        if self._out:
            self._flushing = True
            self._loop.add_writer(self.sock.fileno(), self._writable)

    def _writable(self) -> None:
        assert self._loop is not None
        self._loop.remove_writer(self.sock.fileno())
        self._flush()

    def _messages(self, data: bytes) -> list[Any]:
        self._in += data
        found, start = [], 0
        while len(self._in) - start >= 4:
            end = start + 4 + int.from_bytes(self._in[start : start + 4], "little")
            if len(self._in) < end:
                break
            found.append(memoryview(self._in)[start + 4 : end].tobytes())
            start = end
        del self._in[:start]
        return [message for body in found if (message := self._read_one(body)) is not None]

    def _read_one(self, body: bytes) -> Any:
        """The message. One that cannot be read says so to whoever waits for it: here, or, if it is a question, at the other end (None)."""
        try:
            return self._decode(body)
        except Exception as error:  # not only ValidationError: a text that is not UTF-8, nesting that is too deep
            said = f"{type(error).__name__}: {error}"
        try:
            head = _head(body)
        except Exception:  # nobody knows whose it is, so the worker is replaced, and its requests are played again
            log.error("a message between the environment's worker and the orchestrator cannot be read: %s", said)
            self.sock.shutdown(socket.SHUT_RDWR)
            return None
        what = f"the message {head.kind} between the environment's worker and the orchestrator cannot be read: {said}"
        log.error("%s", what)
        match head.kind:
            case "Played" | "PlayFailed":
                return Played(head.number, [], what)
            case "Rows" | "Loaded" | "LoadFailed":
                return LoadFailed(what, "")
            case "Give" | "Serve":
                self.send(LoadFailed(what, ""))
            case "Play":
                self.send(Played(head.number, [], what))
        return None


def _frame(message: Message) -> bytes:
    body = encode(message)
    return len(body).to_bytes(4, "little") + body
