"""How servers and the trainer agree on one transfer of weights: messages in a store that the trainer's rank 0 serves.

    server    Call(where, version, …)                          "I can take version 13"
    trainer   Mailbox.calls()  →  Client(members).…            orders to those that called, one after the other
    server    while order := call.next(): do it; call.done()   init_weight_transfer_engine, start_weight_update, update_weights (once
                                                               or several times), finish_weight_update

The orders and their arguments are those of vLLM's weight transfer, and `Client` is what vLLM's trainer-side engines call a client. Whoever
called is a member of the transfer. A server that dies is no member of the next one; one that restarts calls again.
Messages are JSON, so nobody can make the other end run code.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rlx.parallel.transfer import Announced, reach_store

POLL = 0.001  # seconds
READY = 10.0  # seconds for a server that called to say that it is still there
CALLS, ANNOUNCED = "calls", "announced"


class Gone(RuntimeError):
    """The trainer does not have the version, or cannot be reached. The servers' weights were not changed."""


class Interrupted(RuntimeError):
    """A transfer ended midway."""


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

    def __init__(self, store: dist.TCPStore, announced: Announced) -> None:
        self.store = store
        store.set(ANNOUNCED, json.dumps([announced.names, announced.dtypes, announced.shapes]))

    @property
    def where(self) -> str:
        """The address: `host:port`."""
        return f"{self.store.host}:{self.store.port}"

    def calls(self) -> list[Caller]:
        """Calls that have arrived since the last time."""
        return [Caller(**json.loads(self.store.queue_pop(CALLS))) for _ in range(self.store.queue_len(CALLS))]

    def refuse(self, caller: Caller, why: str) -> None:
        """The server gets `Gone`."""
        self.store.queue_push(f"{caller.call}/orders", json.dumps({"gone": why}))


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
            self.mailbox.store.queue_push(f"{member.call}/orders", json.dumps({"order": order, "arguments": mine}))

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
        if error := json.loads(self.mailbox.store.queue_pop(f"{member.call}/done"))["error"]:
            raise Interrupted(f"server {member.server}: {error}")


class Call:
    """The server's end of one transfer. Its methods block, so they belong in a thread."""

    def __init__(self, where: str, timeout: float) -> None:
        """`where`: `WeightVersion.where`. `timeout`: seconds to wait for the trainer. Raises Gone."""
        self.where, self.timeout = where, timeout
        self._id = uuid.uuid4().hex
        try:
            self._store = reach_store(where, timeout)
            self.announced = Announced(*json.loads(self._store.get(ANNOUNCED)))
        except (RuntimeError, OSError) as error:
            raise Gone(f"the trainer at {where} does not answer: {error}") from error

    def ask(self, server: str, version: int, workers: int, together: int) -> None:
        """Ask for a version. Returns when the trainer is about to send it. Raises Gone."""
        content = {"call": self._id, "server": server, "version": version, "workers": workers, "together": together}
        try:
            self._store.queue_push(CALLS, json.dumps(content))
            while (order := json.loads(self._store.queue_pop(f"{self._id}/orders"))).get("order") == "ready":
                self.done()
        except RuntimeError as error:
            raise Gone(f"the trainer at {self.where} did not send version {version} in {self.timeout:g} s: {error}") from error
        if "gone" in order:
            raise Gone(order["gone"])
        self._first = order

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next order: a method of vLLM's workers, and its arguments. Raises Interrupted."""
        try:
            order = self._first or json.loads(self._store.queue_pop(f"{self._id}/orders"))
        except RuntimeError as error:
            raise Interrupted(f"the trainer at {self.where} gave no order in {self.timeout:g} s: {error}") from error
        self._first = {}
        if "gone" in order:
            raise Interrupted(order["gone"])
        return order["order"], order["arguments"]

    def done(self, error: str = "") -> None:
        """Say that the order was obeyed, or why not. Raises Interrupted."""
        try:
            self._store.queue_push(f"{self._id}/done", json.dumps({"error": error}))
        except RuntimeError as problem:
            raise Interrupted(f"the trainer at {self.where} does not answer: {problem}") from problem
