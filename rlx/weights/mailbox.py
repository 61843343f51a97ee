"""How servers and the trainer agree on one transfer of weights: messages in a store that the trainer's rank 0 serves.

    server    Call(where, version, …)                          "I can take version 13"
    trainer   Mailbox.calls()  →  Client(members).…            orders to those that called, one after the other
    server    while order := call.next(): do it; call.done()   init_weight_transfer_engine, start_weight_update, update_weights (once
                                                               or several times), finish_weight_update

The orders and their arguments are those of vLLM's weight transfer, and `Client` is what vLLM's trainer-side engines call a client. Whoever
called is a member of the transfer. A server that dies is no member of the next one; one that restarts calls again.
Messages are JSON, and signed with a secret of the attempt that only the run's user can read (`offer.py`): the store answers everybody who
reaches its port. A message that is not signed, or was signed for another place, is not obeyed. They are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rlx.parallel.transfer import Announced, reach_store
from rlx.waiting import Pause

log = logging.getLogger(__name__)

POLL = 0.001  # seconds
SLOWEST = 0.02  # longest pause of a server between two looks for an order, in seconds
READY = 10.0  # seconds for a server that called to say that it is still there
CALLS, ANNOUNCED = "calls", "announced"
# What the trainer may have a server's workers do, besides saying that they are ready.
ORDERS = frozenset({"init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"})
REMEMBERED = 1000  # calls; older ones are for older versions, which are refused


class Gone(RuntimeError):
    """The trainer does not have the version, or cannot be reached. The servers' weights were not changed."""


class Interrupted(RuntimeError):
    """A transfer ended midway."""


class Forged(RuntimeError):
    """A message is not signed with the secret of this attempt, or not for this place."""


class Messages:
    """Messages in a store, signed with a secret. Nobody else can add or change one, nor take one for another or for a second time."""

    def __init__(self, store: dist.TCPStore, secret: bytes) -> None:
        self.store = store
        self._secret = secret
        self._pushed: Counter[str] = Counter()  # messages so far, by queue
        self._popped: Counter[str] = Counter()

    def set(self, key: str, content: Any) -> None:
        self.store.set(key, self._signed(key, content))

    def get(self, key: str) -> Any:
        """Raises Forged."""
        return self._content(key, self.store.get(key))

    def push(self, queue: str, content: Any) -> None:
        """Append a message to a queue with one writer and one reader."""
        self.store.queue_push(queue, self._signed(f"{queue} {self._pushed[queue]}", content))
        self._pushed[queue] += 1

    def pop(self, queue: str) -> Any:
        """The next message of such a queue. Raises Forged."""
        content = self._content(f"{queue} {self._popped[queue]}", self.store.queue_pop(queue))
        self._popped[queue] += 1
        return content

    def push_of_many(self, queue: str, content: Any) -> None:
        """Append a message to a queue with many writers. Its reader must notice repeated ones."""
        self.store.queue_push(queue, self._signed(queue, content))

    def pop_of_many(self, queue: str) -> Any:
        """Raises Forged."""
        return self._content(queue, self.store.queue_pop(queue))

    def forget(self, *queues: str) -> None:
        """These queues are not used any more."""
        for queue in queues:
            self._pushed.pop(queue, None)
            self._popped.pop(queue, None)

    def _signed(self, place: str, content: Any) -> str:
        body = json.dumps(content)
        return self._signature(place, body.encode()) + body

    def _content(self, place: str, message: bytes) -> Any:
        signature, body = message[:64], message[64:]
        if not hmac.compare_digest(signature, self._signature(place, body).encode()):
            raise Forged(f"a message for {place.split()[0]} is not signed with the secret of this attempt (endpoints/weights.key)")
        return json.loads(body)

    def _signature(self, place: str, body: bytes) -> str:
        return hmac.new(self._secret, place.encode() + b"\n" + body, hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Caller:
    """A server that can take a version."""

    call: str
    server: str
    version: int
    workers: int  # ranks that it needs in a group
    together: int  # servers that were told to take this version


class Mailbox:
    """The trainer's end."""

    def __init__(self, store: dist.TCPStore, announced: Announced, secret: bytes, untrained: Sequence[str] = ()) -> None:
        """`untrained`: what servers have besides (`rlx.weights.untrained`)."""
        self.store = store
        self.messages = Messages(store, secret)
        self._known: dict[str, None] = {}  # calls, in their order
        self.messages.set(ANNOUNCED, [announced.names, announced.dtypes, announced.shapes, list(untrained)])

    @property
    def where(self) -> str:
        """The address: `host:port`."""
        return f"{self.store.host}:{self.store.port}"

    def calls(self) -> list[Caller]:
        """Calls that have arrived since the last time."""
        found = []
        for _ in range(self.store.queue_len(CALLS)):
            try:
                caller = Caller(**self.messages.pop_of_many(CALLS))
            except Forged as error:
                log.warning("a call for weights is ignored: %s", error)
                continue
            if caller.call not in self._known:  # otherwise somebody has repeated it
                self._known[caller.call] = None
                found.append(caller)
        while len(self._known) > REMEMBERED:
            old = next(iter(self._known))
            del self._known[old]
            self.messages.forget(f"{old}/orders", f"{old}/done")
        return found

    def refuse(self, caller: Caller, why: str) -> None:
        """The server gets `Gone`."""
        self.messages.push(f"{caller.call}/orders", {"gone": why})


@dataclass(slots=True)
class Client:
    """Gives orders to the members of one transfer. The four methods without `_` are those of vLLM's `VLLMWeightSyncClient`."""

    mailbox: Mailbox
    members: Sequence[Caller]
    timeout: float  # seconds for one order
    finished: Callable[[], Mapping[str, Any]] = dict  # the arguments of the last order, asked for when it is given
    abandoned: str = ""  # why nobody waits any more

    def ready(self) -> list[Caller]:
        """The members that still wait, as they say when asked. The others are dropped."""
        self.tell("ready")
        deadline = time.monotonic() + READY
        there: list[Caller] = []
        while len(there) < len(self.members) and time.monotonic() < deadline:
            there = [member for member in self.members if self._queue_len(member)]
            time.sleep(POLL)
        for member in self.members:
            if member in there:
                self._answer(member)
            else:
                self.mailbox.refuse(member, "the server did not say in time that it waits for the weights")
        self.members = there
        return there

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self.tell_each("init_weight_transfer_engine", self.places(init_info))
        self.wait()

    def start_weight_update(self) -> None:
        self.tell("start_weight_update")
        self.wait()

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self.tell("update_weights", {"update_info": dict(update_info)})
        self.wait()

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.tell("finish_weight_update", self.finished())
        self.wait()

    def places(self, init_info: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The arguments of `init_weight_transfer_engine` for each member: each needs ranks of its own in the group."""
        rank, found = init_info.get("rank_offset"), []
        for member in self.members:
            mine = {} if rank is None else {"rank_offset": rank}
            found.append({"init_info": {**init_info, **mine}})
            rank = None if rank is None else rank + member.workers
        return found

    def tell(self, order: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Give all members an order."""
        self.tell_each(order, [arguments or {}] * len(self.members))

    def tell_each(self, order: str, arguments: Sequence[Mapping[str, Any]]) -> None:
        """Give an order with arguments for each member."""
        for member, mine in zip(self.members, arguments, strict=True):
            self.mailbox.messages.push(f"{member.call}/orders", {"order": order, "arguments": mine})

    def wait(self) -> None:
        """Return when every member has done what it was told. Raises Interrupted if one cannot."""
        deadline = time.monotonic() + self.timeout
        for member in self.members:
            while not self._queue_len(member):
                if self.abandoned or time.monotonic() > deadline:
                    raise Interrupted(self.abandoned or f"server {member.server} did not answer in {self.timeout:g} s")
                time.sleep(POLL)
            self._answer(member)

    def _queue_len(self, member: Caller) -> int:
        return self.mailbox.store.queue_len(f"{member.call}/done")

    def _answer(self, member: Caller) -> None:
        if error := self.mailbox.messages.pop(f"{member.call}/done")["error"]:
            raise Interrupted(f"server {member.server}: {error}")


class Call:
    """The server's end of one transfer. Its methods block, so they belong in a thread; `end` has them return soon."""

    def __init__(self, where: str, timeout: float, secret: bytes) -> None:
        """`where`: `WeightVersion.where`. `timeout`: seconds to wait for an order within the transfer. Raises Gone."""
        self.where, self.timeout = where, timeout
        self._id = uuid.uuid4().hex
        self._ended = threading.Event()
        self._first: dict[str, Any] = {}
        try:
            self._store = reach_store(where, timeout)
            self._messages = Messages(self._store, secret)
            *announced, self.untrained = self._messages.get(ANNOUNCED)
            self.announced = Announced(*announced)
        except (RuntimeError, OSError) as error:
            raise Gone(f"the trainer at {where} does not answer: {error}") from error

    def ask(self, server: str, version: int, workers: int, together: int) -> None:
        """Ask for a version. Returns when the trainer is about to send it, however long its step takes. Raises Gone."""
        content = {"call": self._id, "server": server, "version": version, "workers": workers, "together": together}
        try:
            self._messages.push_of_many(CALLS, content)
            while (order := self._order()).get("order") == "ready":
                self.done()
        except RuntimeError as error:
            raise Gone(f"the trainer at {self.where} did not send version {version}: {error}") from error
        if "gone" in order:
            raise Gone(order["gone"])
        self._first = order

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next order: a method of vLLM's workers, and its arguments. Raises Interrupted."""
        try:
            order = self._first or self._order(self.timeout)
        except RuntimeError as error:
            raise Interrupted(f"the trainer at {self.where} gave no order: {error}") from error
        self._first = {}
        if "gone" in order:
            raise Interrupted(order["gone"])
        if order["order"] not in ORDERS:
            raise Interrupted(f"the trainer at {self.where} gave the order {order['order']!r}, which is none of {sorted(ORDERS)}")
        return order["order"], order["arguments"]

    def done(self, error: str = "") -> None:
        """Say that the order was obeyed, or why not. Raises Interrupted."""
        try:
            self._messages.push(f"{self._id}/done", {"error": error})
        except RuntimeError as problem:
            raise Interrupted(f"the trainer at {self.where} does not answer: {problem}") from problem

    def end(self) -> None:
        """Nobody waits for the weights any more."""
        self._ended.set()

    def _order(self, timeout: float = math.inf) -> dict[str, Any]:
        """The next message of the trainer. Raises RuntimeError after `timeout` seconds, or when the trainer is lost."""
        queue, deadline, pause = f"{self._id}/orders", time.monotonic() + timeout, Pause(POLL)
        while not self._store.queue_len(queue):
            if self._ended.is_set():
                raise Interrupted("this server ends")
            if time.monotonic() > deadline:
                raise Interrupted(f"it has said nothing for {timeout:g} s (weight_broadcast.timeout)")
            time.sleep(min(pause.seconds(), SLOWEST))
        return self._messages.pop(queue)
