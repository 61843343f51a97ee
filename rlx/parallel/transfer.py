"""Broadcasts tensors from one process to others with which it shares no other process group: from the trainer to inference engines.

    both ends      Announced: name, dtype and shape of every tensor, in the order of sending
    rank 0         Group.send(announced, (name, tensor), …)
    other ranks    Group.receive(announced, places)  →  (name, tensor), … of those that have no place

Both ends cut the stream of tensors in the same places. A large tensor is sent by itself; small neighbours travel together. The sender
holds at most `AHEAD` messages, and the receiver as many parts, or two if they are large, so nobody holds a second model. What lies in host
memory is sent from there, without a copy. What lies on a GPU is copied into `AHEAD` pinned buffers first. The buffers of both ends live as
long as the group: new memory is handed out page by page, which takes longer than to receive into it.
The group is gloo's. It is not torch's default group, so it may exist beside any other. A peer that dies ends the transfer with an error.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

log = logging.getLogger("rlx.trainer")

SMALL = 1 << 20  # bytes; a smaller tensor travels with its neighbours
PIECE = 1 << 26  # bytes of one message
AHEAD = 4  # messages (at the receiver: parts) that have begun and not ended
ALIGNED = 16  # bytes: where a tensor may begin in a message
JOIN = 60.0  # seconds for the members of a new group to connect
CONNECT = 20.0  # seconds for a connection to a store
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Announced:
    """What is sent: three sequences of equal length."""

    names: Sequence[str]
    dtypes: Sequence[str]  # as `float32`
    shapes: Sequence[Sequence[int]]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> Announced:
        names, dtypes, shapes = [], [], []
        for name, dtype, shape in tensors:
            names.append(name)
            dtypes.append(str(dtype).removeprefix("torch."))
            shapes.append(list(shape))
        return cls(names, dtypes, shapes)

    def check(self, number: int, name: str, tensor: Tensor) -> None:
        """Raise ValueError unless this is what was announced as the tensor of this number: the other end would read wrong bytes."""
        found = (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        expected = (self.names[number], self.dtypes[number], list(self.shapes[number]))
        if found != expected:
            raise ValueError(f"tensor {number} to send is {found}, but {expected} was announced")

    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [getattr(torch, dtype).itemsize * torch.Size(shape).numel() for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]


@dataclass(frozen=True, slots=True)
class _Part:
    """Neighbouring tensors that travel together: those of the numbers `begin` to `end`, at `places` of `size` bytes."""

    begin: int
    end: int
    places: list[int]
    size: int


def parts(sizes: Sequence[int]) -> list[_Part]:
    """How tensors of these sizes are divided."""
    found: list[_Part] = []
    begin, at = 0, 0
    places: list[int] = []

    def close(end: int) -> None:
        nonlocal begin, places, at
        if end > begin:
            found.append(_Part(begin, end, places, at))
        begin, places, at = end, [], 0

    for number, size in enumerate(sizes):
        if size >= SMALL or at + size > PIECE:
            close(number)
        places.append(at)
        at += -(-size // ALIGNED) * ALIGNED if size < SMALL else size
        if size >= SMALL:
            close(number + 1)
    close(len(sizes))
    return found


def serve_store(timeout: float, host: str = LOOPBACK) -> dist.TCPStore:
    """A store in this process, at a free port. Each operation of others may wait for `timeout` seconds.

    `host`: the name by which others reach it. At `LOOPBACK` only this host can. At any other name every host that reaches this one can, and
    the store checks nobody's identity.
    """
    seconds = timedelta(seconds=timeout)
    if host != LOOPBACK:
        return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=seconds)
    listening = socket.create_server((LOOPBACK, 0))  # by itself, torch listens at every address
    port = listening.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=seconds, master_listen_fd=listening.detach())


def reach_store(where: str, timeout: float) -> dist.TCPStore:
    """The store at `host:port`. Raises OSError or torch's DistError, a RuntimeError, if it does not answer."""
    host, _, port = where.rpartition(":")
    socket.create_connection((host, int(port)), CONNECT).close()  # where nobody listens, torch would try for all of its time
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=CONNECT))
    store.set_timeout(timedelta(seconds=timeout))
    return store


class Group:
    """One sender, rank 0, and its receivers. All members make it at the same time."""

    def __init__(self, store: dist.TCPStore, name: str, rank: int, size: int, timeout: float) -> None:
        """`name`: of this group, unique in the store. A transfer without progress fails after `timeout` seconds. Raises RuntimeError if a
        member does not come."""
        joining, place = timedelta(seconds=min(JOIN, timeout)), dist.PrefixStore(name, store)
        gloo: Any = dist.ProcessGroupGloo
        if store.host == LOOPBACK:  # no other host can connect to a member then
            options = gloo._Options()
            options._devices, options._timeout = [gloo.create_device(hostname=LOOPBACK)], joining
            self._group = gloo(place, rank, size, options)
        else:
            self._group = gloo(place, rank, size, joining)
        self._group._set_default_timeout(timedelta(seconds=timeout))
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(AHEAD)]  # the receiver's, for parts that have no place
        self._pinned: list[Tensor] = []  # the sender's, of bytes, that no message in flight uses

    def send(self, announced: Announced, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send all announced tensors, in order. They must not change before this returns. Raises RuntimeError if a receiver is lost."""
        walk = enumerate(tensors)
        divided = parts(announced.sizes())
        size = min(PIECE, max((part.size for part in divided), default=0))
        self._pinned = [buffer for buffer in self._pinned if len(buffer) >= size]
        flying: deque[tuple[Any, Tensor, Tensor | None]] = deque()  # a message, its bytes, and the pinned buffer that holds them

        def finish_one() -> None:
            work, _, buffer = flying.popleft()
            work.wait()
            if buffer is not None:
                self._pinned.append(buffer)

        for part in divided:
            flat = _flat(part, announced, islice(walk, part.end - part.begin))
            for piece in flat.split(PIECE):
                if not len(piece):
                    continue
                while len(flying) >= AHEAD:
                    finish_one()
                buffer = None
                if not _in_host_memory(piece):
                    buffer = self._pinned.pop() if self._pinned else _pinned(size)
                    piece = buffer[: len(piece)].copy_(piece)
                flying.append((self._group.broadcast(piece, 0), piece, buffer))
        while flying:
            finish_one()
        if (extra := next(walk, None)) is not None:
            raise ValueError(f"{extra[1][0]} was not announced")

    def receive(self, announced: Announced, places: Mapping[str, Tensor] = MappingProxyType({})) -> Iterator[list[tuple[str, Tensor]]]:
        """The tensors, in parts. A part's tensors are valid until the next part is taken. Raises RuntimeError if the sender is lost.

        `places`: where tensors of these names belong, contiguous in host memory. They are received there, and are no part of the result.
        """
        divided = parts(announced.sizes())
        into = {name: place for name, place in places.items() if place.is_contiguous() and place.device.type == "cpu"}
        fitting = {
            name for name, dtype, shape in zip(announced.names, announced.dtypes, announced.shapes, strict=True)
            if name in into and str(into[name].dtype) == f"torch.{dtype}" and list(into[name].shape) == list(shape)
        }  # fmt: skip
        alone = [announced.names[part.begin] if part.end - part.begin == 1 else "" for part in divided]  # of a part with one tensor
        buffered = [number for number in range(len(divided)) if alone[number] not in fitting]
        # A sender waits until a message is expected. Buffers of large parts would take the memory of as many layers.
        ahead = AHEAD if all(divided[number].size <= PIECE for number in buffered) else 2
        turn = {number: place % ahead for place, number in enumerate(buffered)}  # which buffer it is received into
        for place, buffer in enumerate(self._buffers[:ahead]):
            largest = max((divided[number].size for number in buffered[place::ahead]), default=0)
            if len(buffer) < largest:
                self._buffers[place] = torch.empty(largest, dtype=torch.uint8)

        def begin(number: int) -> list[Any]:
            if number in turn:
                flat = self._buffers[turn[number]][: divided[number].size]
            else:
                flat = into[alone[number]].detach().reshape(-1).view(torch.uint8)
            return [self._group.broadcast(piece, 0) for piece in flat.split(PIECE) if len(piece)]

        coming: deque[list[Any]] = deque()
        started = 0
        for number, part in enumerate(divided):
            while started < len(divided) and started < number + ahead:  # so each of them has another buffer
                coming.append(begin(started))
                started += 1
            for work in coming.popleft():
                work.wait()
            if number not in turn:
                continue
            rest = []
            for name, tensor in _views(part, announced, self._buffers[turn[number]]):
                if name in fitting:
                    into[name].detach().copy_(tensor)
                else:
                    rest.append((name, tensor))
            if rest:
                yield rest

    def abort(self) -> None:
        """Close the connections: a transfer in progress fails at the other end as well."""
        if self._group is not None:
            self._group.abort()
            self._group = None  # the connections close when nobody refers to it
            self._buffers = []
            self._pinned = []


def _in_host_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _pinned(size: int) -> Tensor:
    """A buffer of so many bytes that a GPU copies to quickly."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    except RuntimeError as error:
        log.warning("no memory could be pinned for the weights, so sending them takes longer: %s", error)
        return torch.empty(size, dtype=torch.uint8)


def _flat(part: _Part, announced: Announced, tensors: Iterable[tuple[int, tuple[str, Tensor]]]) -> Tensor:
    """The bytes of a part's tensors, uint8 [part.size], on their device: of a single one without a copy."""
    flat = torch.empty(0, dtype=torch.uint8)
    count = 0
    for number, (name, tensor) in tensors:
        announced.check(number, name, tensor)
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if part.end - part.begin == 1 and len(content) == part.size:
            return content
        if not count:
            flat = torch.zeros(part.size, dtype=torch.uint8, device=content.device)
        flat[part.places[count] : part.places[count] + len(content)] = content
        count += 1
    if count < part.end - part.begin:
        raise ValueError(f"{announced.names[part.begin + count]} was announced, but not sent")
    return flat


def _views(part: _Part, announced: Announced, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything in a part that was received."""
    for number, place in zip(range(part.begin, part.end), part.places, strict=True):
        shape, dtype = announced.shapes[number], getattr(torch, announced.dtypes[number])
        size = torch.Size(shape).numel() * dtype.itemsize
        yield announced.names[number], flat[place : place + size].view(dtype).view(shape)
