"""The mesh: which of the trainer's processes does what. Built once by the trainer role; everybody else asks it.

    axis      what it is for
    data      which samples a rank packs and trains on; ranks with one `data_rank` see the same samples
    loss      the all-reduce of the loss's sums and maxima: every rank that sees different tokens
    fsdp      the shards of parameters, gradients and optimizer state, gathered layer by layer
    tensor    parts of one matrix product                                    (size 1 for now)
    context   parts of one sequence                                          (size 1 for now)
    expert    experts of one layer                                           (size 1 for now)

One process is a mesh like any other: it has no process group, and its collectives return at once what they were given.
What concerns the whole run (barrier, any, broadcast_bytes) travels between hosts' memories over gloo, never through the GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rlx.config.schema import Config
from rlx.parallel.rendezvous import Place, meet
from rlx.paths import RunPaths
from rlx.waiting import Preempted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PIECE = 1 << 30  # bytes of one broadcast
MARGIN = 600.0  # seconds by which collectives outwait rank 0, so that its own wait is what times out
PATIENCE = 5.0  # seconds in which a rank that lost another is ended from outside, so that the one that failed is blamed


class RankLost(RuntimeError):
    """Another rank has left in the midst of what all do together; its own log says why."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One process's view: its place, and along which axes it works with whom.

    Two ranks of FSDP: `rank` 0 and 1, `world_size` 2, `data_rank` 0 and 1, `num_data_ranks` 2, `fsdp` and `loss_group` of both.
    One process: `rank` 0, `world_size` 1, `fsdp` None, `loss_group` None.
    """

    device: torch.device  # where this process computes
    rank: int = 0
    world_size: int = 1
    data_rank: int = 0
    num_data_ranks: int = 1
    loss_group: dist.ProcessGroup | None = None  # None: nobody to add to
    fsdp: DeviceMesh | None = None  # None: parameters are whole, and there is no process group
    tensor: DeviceMesh | None = None  # None: size 1, as the next two
    context: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    alive: Callable[[], AbstractContextManager[None]] = nullcontext  # says that this process lives, while it waits for rank 0

    @property
    def first(self) -> bool:
        """Whether this is rank 0: the one that reads and writes what all share."""
        return self.rank == 0

    @property
    def grouped(self) -> bool:
        """Whether there is a process group: several processes, or one that shards over itself."""
        return self.fsdp is not None

    def barrier(self) -> None:
        """Returns when every rank is here."""
        self.any(False)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; returns when every rank has asked."""
        if self.world_size == 1:
            return flag
        flags = torch.tensor(float(flag))
        with self._together():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)

    def broadcast_bytes(self, content: bytes | bytearray | None = None) -> bytes | bytearray:
        """What rank 0 has as `content`, on every rank; other ranks give nothing, and get memory that they may write to."""
        if self.world_size == 1:
            assert content is not None
            return content
        size = torch.tensor(len(content) if content is not None else 0)
        with self._together():
            dist.broadcast(size, src=0)
            received = bytearray(content) if self.first and content is not None else bytearray(int(size))
            if received:
                for piece in torch.frombuffer(received, dtype=torch.uint8).split(PIECE):
                    dist.broadcast(piece, src=0)
        return received

    def read(self, read: Callable[[], bytes | bytearray]) -> bytes | bytearray:
        """What `read` gives on rank 0, on every rank: rank 0 alone waits for a file and reads it. It must not be empty.

        When `read` raises Preempted, this does so on every rank; anything else ends rank 0, and the others lose it.
        """
        if not self.first:
            content = self.broadcast_bytes()
            if not content:
                raise Preempted
            return content
        try:
            content = read()
        except Preempted:
            self.broadcast_bytes(b"")
            raise
        assert content, "nothing was read"
        return self.broadcast_bytes(content)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite the tensor with rank 0's, in place, on its own device."""
        if self.world_size > 1:
            dist.broadcast(tensor, src=0)

    def sum(self, tensor: Tensor) -> None:
        """Add up over the loss axis, in place."""
        if self.loss_group is not None:
            dist.all_reduce(tensor, group=self.loss_group)

    def max(self, tensor: Tensor) -> None:
        """The largest over the loss axis, element by element, in place."""
        if self.loss_group is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.loss_group)

    def synchronize(self) -> None:
        """Returns when this process's device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory(self) -> float:
        """Largest memory of this process's device since the last call, GiB; 0 on CPU."""
        if self.device.type != "cuda":
            return 0.0
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def background_group(self) -> dist.ProcessGroup | None:
        """A group of its own for what goes on beside training, whose collectives must not meet training's. Every rank calls this."""
        return dist.new_group(backend="gloo") if self.grouped else None

    def close(self) -> None:
        """Leave the process group."""
        if self.grouped:
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        with nullcontext() if self.first else self.alive():
            try:
                yield
            except RuntimeError as error:
                time.sleep(PATIENCE)
                raise RankLost(f"rank {self.rank} of {self.world_size} lost another rank; the log of the one that left says why") from error


def build_mesh(
    cfg: Config,
    paths: RunPaths,
    place: Place,
    *,
    timeout: float,
    tick: Callable[[], None],
    alive: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Mesh:
    """The mesh of the configuration, on this process's device. The first call of the trainer that touches CUDA.

    `timeout`: seconds for the other ranks to come, and more than any wait of rank 0 takes but that for a batch; `tick` is called while
    waiting for them, `alive` is entered while waiting for rank 0 later. Raises WaitTimeout.
    """
    cuda = cfg.hardware.device == "cuda"
    device = torch.device("cuda", place.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(cfg.seed)
    # One process computes in another dtype than its parameters have, or keeps them elsewhere, by sharding over itself.
    mixed = cfg.model.dtype != cfg.trainer.optimization_dtype or (cfg.trainer.fsdp_cpu_offload and cuda)
    if place.world_size == 1 and not mixed:
        return one_process(device)
    store = None
    if place.world_size > 1 and not place.under_torchrun:
        store = meet(paths, place.rank, place.world_size, timeout=timeout, tick=tick)
    limit = max(cfg.trainer.batch_timeout, timeout) + MARGIN
    return join(device, rank=place.rank, world_size=place.world_size, timeout=limit, store=store, alive=alive)


def one_process(device: torch.device | str) -> Mesh:
    """The mesh of a process that is alone and has no process group."""
    return Mesh(device=torch.device(device))


def join(
    device: torch.device,
    *,
    rank: int,
    world_size: int,
    timeout: float,
    store: dist.Store | None = None,
    alive: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Mesh:
    """Start the process group, which shards over all ranks, and return this rank's mesh.

    The ranks meet at `store`, or where torchrun's variables say; one rank needs neither. A collective that takes longer than `timeout`
    seconds fails. `alive` is entered while this rank waits for rank 0, which may be waiting for somebody else.
    """
    # CUDA has gloo beside it, for gradients and messages that live in host memory.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore() if world_size == 1 else store
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    everyone = dist.init_device_mesh(device.type, (world_size,), mesh_dim_names=("fsdp",))
    return Mesh(
        device=device,
        rank=rank,
        world_size=world_size,
        data_rank=rank,
        num_data_ranks=world_size,
        loss_group=everyone.get_group() if world_size > 1 else None,
        fsdp=everyone,
        alive=alive,
    )
