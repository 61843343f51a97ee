"""The messages between the orchestrator and an environment's worker, and the socket that carries them.

    orchestrator                                     worker (a process that has loaded the environment)
    Load (its standard input), Serve, Give, Play, CancelPlay   →
                                                               ←   Loaded, Failed, Scores, Played; Beat (a socket of its own)

A frame is the length of its message, the number of the request that it is about (0: none), and the message in msgpack.
Only plain values and arrays of numbers cross: no classes, no code.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from rlx.config.schema_rollout import EnvConfig
from rlx.inference.sampler import Servers
from rlx.json_values import from_json, to_json
from rlx.policy.spec import PolicySpec
from rlx.trace import Trace
from rlx.types import Rollout

HEAD = struct.Struct("<IQ")  # bytes of the message, number of the request
LARGE = 2**24  # bytes that may wait to be read before the other end is held up


@dataclass(frozen=True)
class Settings:
    """What an environment needs to know of its run."""

    sampling: dict[str, Any] = field(default_factory=dict)  # default parameters of requests, by vLLM's names
    timeout: float = 600.0  # seconds for one rollout, unless the environment's configuration sets `rollout_timeout`
    concurrency: int = 1  # rollouts that may be in flight in one process
    keeps_late: bool = False  # what was sampled of a rollout that runs out of time counts (`envs.NAME.on_timeout`)


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Any message. `number`, where there is one: of the request."""

    number = 0


class Load(Message):
    """What a worker reads from its standard input."""

    name: str
    config: EnvConfig
    settings: Settings
    send_rows: bool


class Give(Message):
    """The policy that plays from now on. Before the first `Play`."""

    policy: PolicySpec


class Serve(Message):
    """The servers that the policy samples on are these now. Before `Give`, unless an endpoint plays."""

    servers: Servers


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


class Loaded(Message):
    """The environment is loaded."""

    rows: list[bytes]  # `pack_row` of each, in order, if they were asked for
    columns: bool  # a slice of the rows is a dict of columns, as in `datasets`
    scores_groups: bool
    digest: str  # of a sample of the rows: all workers of an environment must have the same
    tools: list[Any]  # `Environment.tools`
    sources: str  # folder or file of the environment's own code; empty: not known
    agents: list[str]  # `Environment.agents`


class Failed(Message):
    """Playing raised, which is a defect of rlx: an environment's errors are results. Without a request: it could not be loaded."""

    number: int
    error: str
    trace: str = ""


class Scores(Message):
    """What is trained of a rollout whose rewards compute now: they may block or end the worker. Only if `Settings.keeps_late`."""

    number: int
    trace: Trace


class Played(Message):
    """The answer to a `Play`."""

    number: int
    rollouts: list[list[Rollout]] = []  # of each member, with the episode's further runs behind it; without the row of its task
    error: str = "the environment cancelled the rollout's own task"  # why there are none


class Beat(Message):
    """How a worker does, once a second."""

    stuck: float = 0.0  # seconds since which its event loop computes one step
    delay: float = 0.0  # seconds that whatever is ready waits for its turn in the event loop
    asking: int = 0  # requests to the inference servers in flight
    away: float = 0.0  # seconds so far in which no server took its requests
    warnings: list[str] = []  # of the policy, for the run's own log


ToWorker = Give | Serve | Play | CancelPlay
FromWorker = Loaded | Failed | Scores | Played


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


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def decoder(kind: Any) -> Callable[[Any], Any]:
    """Reads messages of these types."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_typed).decode


def pack_row(row: Any) -> bytes:
    """A row of a data set as bytes. Raises CodecError if it holds other than plain values (`rlx.json_values`)."""
    return encode(to_json(dict(row)))


def unpack_row(packed: bytes) -> dict[str, Any]:
    """The row behind `pack_row`."""
    return from_json(msgspec.msgpack.decode(packed))


class PackedRows(Sequence[Any]):
    """The rows of an environment, unpacked when they are read. A slice is a dict of columns if `columns`, as in `datasets`."""

    def __init__(self, packed: list[bytes], columns: bool) -> None:
        self._packed, self._columns = packed, columns

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, int):
            return unpack_row(self._packed[place])
        rows = [unpack_row(row) for row in self._packed[place]]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())} if self._columns else rows


def frame(message: Message) -> bytes:
    """A message as it travels. Raises what encoding raises."""
    body = encode(message)
    return HEAD.pack(len(body), message.number) + body


class Link:
    """One end of the socket. What is sent before `messages` is read leaves then."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        """`kind`: the union of the messages that arrive here."""
        self._sock, self._decode = sock, decoder(kind)
        self._early = bytearray()
        self._writer: asyncio.StreamWriter | None = None

    async def messages(self) -> AsyncIterator[Any]:
        """The messages that arrive, until the other end is gone. It may be left, and read again in another loop."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._sock.dup(), limit=LARGE)
        self._writer.transport.set_write_buffer_limits(high=0)  # the loops would collect what is written otherwise
        self._writer.write(bytes(self._early))
        self._early.clear()
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    size, number = HEAD.unpack(await reader.readexactly(HEAD.size))
                    yield self._read(number, await reader.readexactly(size))
        finally:
            self._writer.close()
            self._writer = None

    def send(self, message: Message) -> None:
        """Send now: what follows may block the loop. Raises what encoding raises."""
        if self._writer is None:
            self._early += frame(message)
        else:
            self._writer.write(frame(message))

    def finish(self) -> None:
        """Tell the other end that nothing more will come."""
        with contextlib.suppress(OSError):  # it is gone
            self._sock.shutdown(socket.SHUT_WR)

    def _read(self, number: int, body: bytes) -> Any:
        """The message. One that cannot be read costs its own request, or ends the worker."""
        try:
            return self._decode(body)
        except Exception as error:  # not only ValidationError: a text that is not UTF-8, nesting that is too deep
            said = f"a message between the environment's worker and the orchestrator cannot be read: {type(error).__name__}: {error}"
            return Played(number, error=said) if number else Failed(0, said)
