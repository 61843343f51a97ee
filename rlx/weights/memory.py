"""The trainer's end of weights that reach the servers without files: `weight_broadcast.type` gloo, nccl or ipc.

    step 12 ends        offer(13)      endpoints/weights.json says who has version 13; the orchestrator tells the servers
    a server calls      send()         every rank gathers tensor by tensor, rank 0 sends each to all servers that called

The weights are those of the offered version until the next step changes them. `called` is asked where every rank may stop: after a step,
while waiting for a batch, and between two micro-batches before the weights change. A server that calls for an older version is refused;
the orchestrator then takes the newer one, or the files that checkpoints and evaluated versions have in any case.
So nothing holds a second copy of the model, and a restarted server is served like any other.
A transfer that breaks (a server died) leaves the trainer as it was. The servers that are left call again, and form a new group.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from rlx.parallel.transfer import LOOPBACK, Announced, Group, serve_store
from rlx.paths import RunPaths
from rlx.weights.attest import checksum
from rlx.weights.export import Export
from rlx.weights.mailbox import Caller, Client, Mailbox
from rlx.weights.offer import new_secret, write_offer

if TYPE_CHECKING:
    import torch

    from rlx.models.policy import PolicyModel
    from rlx.parallel.mesh import Mesh

log = logging.getLogger("rlx.trainer")

SOON = 0.25  # seconds to wait after a step for the servers to call: they have just been told
TOGETHER = 0.5  # seconds to wait for the other servers once one has called: one transfer serves all
POLL = 0.001  # seconds


class Source:
    """The trained weights, tensor by tensor. Iterating gathers sharded tensors, so every rank does it, in the same order.

    Names, shapes and checksums are those of files (`export.py`). If experts are fused, the tensors of a layer are gathered at once.
    It has the methods of vLLM's `WeightSource`.
    """

    def __init__(self, model: PolicyModel, mesh: Mesh, dtype: torch.dtype) -> None:
        """`dtype`: of the parameters that servers have; buffers keep theirs. Raises ValueError if they cannot be sent layer by layer."""
        self.model, self.mesh = model, mesh
        self.export = Export(model, dtype)
        if self.export.converts and not self.export.by_layer:
            raise ValueError(
                f"a tensor in the checkpoints of {type(model.hf).__name__} needs tensors of several layers, so its weights cannot be sent "
                f"from memory; set weight_broadcast.type=filesystem"
            )
        self.sums: dict[str, dict[str, Any]] = {}  # what was sent, as in a manifest; on rank 0
        self.taken = 0  # tensors so far, of all transfers
        self._rest: Iterator[tuple[str, torch.Tensor]] = iter(())

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and whole shape of every tensor, without gathering."""
        described = [self.export.described(unit) for unit in self.export.units()]
        return [(name, tensor.dtype, tuple(tensor.shape)) for unit in described for name, tensor in unit.items()]

    def announced(self) -> Announced:
        return Announced.of(self.metadata())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.sums = {}
        self._rest = self._gathered()
        for name, tensor in self._rest:
            if self.mesh.first:
                self.sums[name] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "sum": checksum(tensor)}
            yield name, tensor
            self.taken += 1

    def finish(self) -> None:
        """Gather what an interrupted iteration has left: the other ranks do."""
        for _ in self._rest:
            pass

    def begin(self) -> None:
        """Before a transfer: nothing is gathered yet. Waits for the optimizer's step, because NCCL's sender reads on streams of its own."""
        self.mesh.synchronize()
        self._rest = self._gathered()

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights = dict(self.model.named_weights())
        for unit in self.export.units():
            yield from self.export.convert({name: self._whole(name, weights[name]) for name in unit}).items()

    def _whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        shard = tensor.to(self.export.published(name, tensor))
        return shard.full_tensor() if hasattr(shard, "full_tensor") else shard


class Sender(Protocol):
    """Sends the weights to the members of a client. Like vLLM's `TrainerWeightTransferEngine`: every rank makes and calls it."""

    client: Any

    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


MakeSender = Callable[[Client, Source], Sender]


class GlooSender:
    """Sends through the CPU, over the network or within a host."""

    def __init__(self, client: Client, source: Source) -> None:
        """Form a group with the client's members. Raises RuntimeError if one of them does not come."""
        self.client, self.source = client, source
        self._group: Group | None = None
        if not source.mesh.first:
            return
        size = 1 + sum(member.workers for member in client.members)
        name = f"group/{client.members[0].call}"
        info = {"where": client.mailbox.where, "name": name, "rank_offset": 1, "world_size": size, "timeout": client.timeout}
        client.tell_each("init_weight_transfer_engine", client.places(info))
        self._group = Group(client.mailbox.store, name, 0, size, client.timeout)

    def send_weights(self) -> None:
        announced = self.source.announced()
        if self._group is None:
            for _ in self.source:
                pass
            return
        # Nobody waits for answers: the group notices a server that is lost, and the servers tell the fleet how it went.
        self.client.tell("start_weight_update")
        self.client.tell("update_weights", {"update_info": asdict(announced)})
        self._group.send(announced, self.source)
        self.client.tell("finish_weight_update", self.client.finished())

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.abort()


def sender_of(kind: str) -> MakeSender:
    """What makes the senders of `weight_broadcast.type`."""
    if kind == "gloo":
        return GlooSender
    from rlx.inference.server.senders import vllm_sender  # on GPUs the transfer is vLLM's own, at both ends

    return vllm_sender(kind)


class Offers:
    """The weights of one run, offered to its servers. Every rank has it and makes the same calls."""

    def __init__(
        self,
        model: PolicyModel,
        mesh: Mesh,
        paths: RunPaths,
        dtype: torch.dtype,
        timeout: float,
        make: MakeSender = GlooSender,
        host: str = LOOPBACK,
        untrained: Sequence[str] = (),
    ) -> None:
        """`timeout`: seconds for a transfer. `host`: the name by which the servers reach this host. `untrained`: `ModelFiles.untrained`."""
        self.mesh, self.paths, self.timeout, self.make = mesh, paths, timeout, make
        self.source = Source(model, mesh, dtype)
        self.version: int | None = None
        self.seconds = 0.0  # that transfers have held the trainer since the last `offer`
        self._mailbox: Mailbox | None = None
        if mesh.first:
            paths.offer.unlink(missing_ok=True)  # of an earlier attempt
            self._mailbox = Mailbox(serve_store(timeout, host), self.source.announced(), new_secret(paths), untrained)
        self._callers: list[Caller] = []
        self._sender: Sender | None = None
        self._members: list[tuple[str, int]] = []  # of the sender's group
        self._taken = True  # somebody has called for the latest offer
        self._late = -math.inf  # monotonic time of the latest call that was refused as too old

    def offer(self, version: int) -> None:
        """From now on, servers may call for this version. Call it when everything is on disk that a reader of the version must find."""
        self.version, self.seconds = version, 0.0
        if self._mailbox is not None:
            self._callers, callers = [], self._callers
            self._sort(callers)
            write_offer(self.paths, version, self._mailbox.where)

    def close(self) -> None:
        """Refuse all calls from now on."""
        if self._mailbox is not None:
            self.version = None
            self.paths.offer.unlink(missing_ok=True)
            self.called()
        if self._sender is not None:
            self._sender.shutdown()

    def called(self) -> bool:
        """Whether servers wait for the weights; on rank 0. Cheap. Refuses calls for other versions."""
        if self._mailbox is None:
            return False
        self._sort(self._mailbox.calls())
        return bool(self._callers)

    def _sort(self, callers: Iterable[Caller]) -> None:
        assert self._mailbox is not None
        for caller in callers:
            if caller.version == self.version:
                self._callers.append(caller)
            else:
                has = "no version any more" if self.version is None else f"version {self.version}"
                self._mailbox.refuse(caller, f"the trainer has {has}, not version {caller.version}")
                self._late = time.monotonic()

    def send_soon(self) -> None:
        """Send the version that was just offered, if the servers call at once. Every rank calls this.

        Servers that did not take the previous version are busy (an evaluation), so they are not waited for. Those whose call has just been
        refused as too old call again at once, and would miss every version if they were not waited for.
        """
        began = time.monotonic()
        soon = SOON if self._taken else 0.0
        self._taken = False
        while self.mesh.first and not self.called() and time.monotonic() < max(began + soon, self._late + SOON):
            time.sleep(POLL)
        self.send()

    def send(self) -> None:
        """Send the weights to the servers that called, if any did. Every rank calls this, where the weights are those of the version."""
        began = time.monotonic()
        members = self._gather() if self.called() else []
        if not self.mesh.any(bool(members)):
            return
        self.source.begin()
        try:
            self._send(members)
        except (RuntimeError, OSError) as error:
            if not self.mesh.first:
                raise
            why = str(error)  # only its text: the error itself would keep the connections open
            log.warning("version %s did not reach the servers: %s; those that are left will ask again", self.version, why)
            self._drop(why, members)
        else:
            log.info("version %s was sent to %d servers in %.2f s", self.version, len(members), time.monotonic() - began)
        self.source.finish()
        self._taken = True
        self.seconds += time.monotonic() - began

    def _gather(self) -> list[Caller]:
        """The servers to send to: those that called, and others that call within a moment."""
        assert self._mailbox is not None
        deadline = time.monotonic() + TOGETHER
        while len(self._callers) < max(caller.together for caller in self._callers) and time.monotonic() < deadline:
            time.sleep(POLL)
            self.called()
        callers = sorted(self._callers, key=lambda caller: caller.server)  # the same servers form the same group
        self._callers = []
        return Client(self._mailbox, callers, self.timeout).ready()

    def _send(self, members: list[Caller]) -> None:
        identities = [(caller.server, caller.workers) for caller in members]
        client = Client(self._mailbox, members, self.timeout, lambda: {"sums": self.source.sums})  # type: ignore[arg-type]
        changed = self._sender is None or (self.mesh.first and identities != self._members)
        if self.mesh.any(changed):
            if self._sender is not None:
                self._sender.shutdown()
            self._sender = None
            self._sender, self._members = self.make(client, self.source), identities
        assert self._sender is not None
        self._sender.client = client
        self._sender.send_weights()

    def _drop(self, why: str, members: list[Caller]) -> None:
        if self._sender is not None:
            self._sender.client.abandoned = why
            self._sender.shutdown()
        self._sender, self._members = None, []
        for member in members:  # those that have received everything wait for an order
            assert self._mailbox is not None
            self._mailbox.refuse(member, f"the transfer broke: {why}")
