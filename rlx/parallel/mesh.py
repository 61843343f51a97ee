"""The mesh: each trainer process's place, and the ranks that it works with. The trainer role builds it once.

    axis      purpose
    data      which samples a rank packs and trains on; ranks with the same `data_rank` see the same samples
    row       the neighbours in rank that compute each packed row together: they have the same `data_rank`. `rlx.parallel.row` has its two
              axes, context (`trainer.cp`) and tensor (`trainer.tp`)
    loss      the all-reduce of the loss's sums and maxima, over ranks that see different samples: those with the same place in their rows
    fsdp      the shards of parameters, gradients and optimizer state, gathered layer by layer, over data and rows; with
              `trainer.dp_replicate` there are several copies of the shards, each on neighbouring ranks, and gradients are also summed
              over the axis `replicate`
    expert    the neighbours in rank that divide the experts of a layer (`trainer.ep`); they have different samples, or pieces of rows
    shards    of parameters that are already divided over `tensor` or `expert`: the ranks of a copy with the same place in these groups

Four ranks with trainer.cp=2: `data_rank` 0 0 1 1, `row.everyone.rank` 0 1 0 1; loss groups (0 2) and (1 3); shards over all four.

A single process also has a mesh. It has no process group, and its collectives return their input at once.
Collectives of the whole run (barrier, any, broadcast_bytes) use host memory over gloo, never the GPU.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from rlx.config.schema import PlayRoot, TrainingRoot
from rlx.parallel.rendezvous import INTERFACES, Place, create_store
from rlx.parallel.row import ALONE, Axis, SequenceParallelGroup
from rlx.paths import RunPaths
from rlx.polling import Preempted
from rlx.process import host_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
PIECE = 1 << 30  # bytes per broadcast
WAITS = -1  # instead of a number of bytes: rank 0 still waits for them
MARGIN = 600.0  # seconds by which collectives outlast rank 0's waits, so that rank 0's own wait times out first
RANK_LOST_SECONDS = 5.0  # seconds before a rank reports that it lost another, so that the supervisor sees and blames the failed rank first


class RankLost(RuntimeError):
    """Another rank left during a collective, or failed in what it does alone; its own log says why."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One process's view: its place, and its partners along each axis.

    Two FSDP ranks: `rank` 0 and 1, `world_size` 2, `data_rank` 0 and 1, `num_data_ranks` 2, `fsdp` and `loss_group` of both.
    One process: `rank` 0, `world_size` 1, `fsdp` None, `loss_group` None.
    """

    device: torch.device  # where this process computes
    rank: int = 0
    world_size: int = 1
    data_rank: int = 0
    num_data_ranks: int = 1
    loss_group: dist.ProcessGroup | None = None  # None: no other rank to reduce with
    fsdp: DeviceMesh | None = None  # None: parameters are whole, and there is no process group
    row: SequenceParallelGroup | None = None  # None: this rank computes whole rows
    tensor: DeviceMesh | None = None  # None: matrices are not divided
    expert: DeviceMesh | None = None  # None: experts are not divided
    self_mesh: DeviceMesh | None = None  # this rank, with `expert` only
    shards: Mapping[str, DeviceMesh] = field(default_factory=dict)  # for `tensor` and `expert`, where parameters are divided
    alive: Callable[[], AbstractContextManager[None]] = nullcontext  # sends heartbeats while this process waits for rank 0
    timeout: float = math.inf  # seconds after which a collective fails

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which reads and writes shared files."""
        return self.rank == 0

    @property
    def is_group_leader(self) -> bool:
        """Whether this rank speaks for all that see the same samples: the first of its row."""
        return self.row is None or self.row.everyone.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is a process group: of several processes, or of one that shards over itself."""
        return self.fsdp is not None

    @property
    def copies(self) -> bool:
        """Whether several groups of ranks each have a copy of the shards, so that gradients are also summed over the copies."""
        return self.fsdp is not None and self.fsdp.ndim > 1

    def duplicate_fsdp_mesh(self) -> DeviceMesh:
        """Another mesh like `fsdp`, of the same ranks, whose process groups are its own. Every rank calls this."""
        from torch.distributed.device_mesh import DeviceMesh

        assert self.fsdp is not None
        ranks, limit = self.fsdp.mesh, timedelta(seconds=self.timeout) if math.isfinite(self.timeout) else None
        lists = [ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist() for axis in range(ranks.ndim)]
        groups = [dist.new_subgroups_by_enumeration(each, timeout=limit)[0] for each in lists]
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=self.fsdp.mesh_dim_names)

    def barrier(self) -> None:
        """Return when every rank has called this."""
        self.any(False)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank. Returns when every rank has called this."""
        if self.world_size == 1:
            return flag
        flags = torch.tensor(float(flag))
        with self._together():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)

    def run_on_all_or_raise(self, action: Callable[[], T]) -> T:
        """The result of `action`, which has no collectives. Returns when every rank has called this.

        If it raises on some rank, every rank raises: that one its own error, the others RankLost. So all of them make the same next call.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as raised:
            error = raised
        if self.any(error is not None):
            raise error or _failed_elsewhere()
        return cast("T", result)

    def ranks_where(self, flag: bool) -> list[int]:
        """The ranks on which the flag is set. Returns when every rank has called this."""
        return [rank for rank, flag in enumerate(self.all_gather_float(float(flag))) if flag]

    def all_gather_float(self, value: float) -> list[float]:
        """Every rank's value, by rank. Returns when every rank has called this."""
        values = torch.zeros(self.world_size, dtype=torch.float64)
        values[self.rank] = value
        if self.world_size > 1:
            with self._together():
                dist.all_reduce(values)
        return values.tolist()

    def ranks_by_host(self) -> list[list[int]]:
        """The ranks of each host, lowest first. Returns when every rank has called this."""
        found: dict[float, list[int]] = {}
        for rank, host in enumerate(self.all_gather_float(float(zlib.crc32(host_name().encode())))):
            found.setdefault(host, []).append(rank)
        return list(found.values())

    def broadcast_bytes(self, content: bytes | bytearray | None = None) -> bytes | bytearray:
        """Rank 0's `content`, on every rank. Other ranks pass nothing and receive writable memory."""
        if self.world_size == 1:
            assert content is not None
            return content
        assert content is not None or not self.first
        size = torch.tensor(len(content) if content is not None else WAITS)
        with self._together():
            dist.broadcast(size, src=0)
            while size == WAITS:
                dist.broadcast(size, src=0)
            received = bytearray(content) if self.first and content is not None else bytearray(int(size))
            if received:
                for piece in torch.frombuffer(received, dtype=torch.uint8).split(PIECE):
                    dist.broadcast(piece, src=0)
        return received

    def read(self, read: Callable[[Callable[[], None]], bytes | bytearray], tick: Callable[[], None] = lambda: None) -> bytes | bytearray:
        """The result of rank 0's `read`, on every rank: only rank 0 waits for a file and reads it. The result must not be empty.

        `read` may take longer than `limit` if it often calls its argument: that calls `tick`, and tells the other ranks to wait on.
        If `read` raises Preempted, every rank raises it. With any other error the other ranks raise RankLost.
        """
        if not self.first:
            content = self.broadcast_bytes()
            if not content:
                raise Preempted() if self.any(False) else _failed_elsewhere()
            return content
        told = time.monotonic()

        def waits() -> None:
            nonlocal told
            tick()
            if self.world_size > 1 and time.monotonic() - told > self.timeout / 4:
                told = time.monotonic()
                with self._together():
                    dist.broadcast(torch.tensor(WAITS), src=0)

        try:
            content = read(waits)
        except RankLost:
            raise
        except Exception as error:
            self.broadcast_bytes(b"")
            self.any(isinstance(error, Preempted))
            raise
        assert content, "nothing was read"
        return self.broadcast_bytes(content)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite the tensor with rank 0's, in place, on its own device."""
        if self.world_size > 1:
            dist.broadcast(tensor, src=0)

    def sum(self, tensor: Tensor) -> None:
        """Sum over the loss axis, in place."""
        if self.loss_group is not None:
            dist.all_reduce(tensor, group=self.loss_group)

    def sum_of_shards(self, tensor: Tensor) -> None:
        """Sum over the ranks that hold the parts of one copy of the parameters, in place."""
        if self.fsdp is not None and self.world_size > 1:
            dist.all_reduce(tensor, group=self.fsdp.get_group("fsdp"))

    def max(self, tensor: Tensor) -> None:
        """Elementwise maximum over the loss axis, in place."""
        if self.loss_group is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.loss_group)

    def synchronize(self) -> None:
        """Return when this process's device has finished all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory(self) -> float:
        """Peak memory of this process's device since the last call, GiB; 0 on CPU."""
        if self.device.type != "cuda":
            return 0.0
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def background_group(self) -> dist.ProcessGroup | None:
        """A separate group for background work, whose collectives must not mix with training's. Every rank calls this.

        Whoever has it calls `end_background` with it at the end.
        """
        return dist.new_group(backend="gloo") if self.is_distributed else None

    def end_background(self, group: dist.ProcessGroup | None) -> None:
        """Give back the connections and threads of a `background_group` in which no collective is under way. Every rank calls this."""
        if group is not None:
            dist.destroy_process_group(group)

    def close(self) -> None:
        """Leave the process group."""
        if self.is_distributed:
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        with nullcontext() if self.first else self.alive():
            try:
                yield
            except RuntimeError as error:
                time.sleep(RANK_LOST_SECONDS)
                raise RankLost(f"rank {self.rank} of {self.world_size} lost another rank, whose own log says why") from error


def build_mesh(
    cfg: TrainingRoot,
    paths: RunPaths,
    place: Place,
    *,
    timeout: float,
    tick: Callable[[], None],
    alive: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Mesh:
    """The mesh of the configuration, on this process's device. This is the trainer's first call that touches CUDA.

    `timeout` is in seconds, for the other ranks to join. It must exceed every wait of rank 0 outside `read`. `tick` is called while
    waiting for them; `alive` is entered during later waits for rank 0. Raises WaitTimeout.
    """
    cuda = cfg.hardware.device == "cuda"
    device = torch.device("cuda", place.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if place.world_size == 1 and not cfg.fsdp_single_rank:
        torch.manual_seed(cfg.seed)
        return one_process(device)
    one_host = cfg.hardware.nodes == 1
    if one_host and not (isinstance(cfg, PlayRoot) and cfg.inference.base_url):  # NCCL may have to send weights to servers elsewhere
        os.environ.update(INTERFACES)
    several = place.world_size > 1
    store = create_store(paths, place.rank, place.world_size, timeout=timeout, tick=tick, one_host=one_host) if several else None
    limit = max(cfg.trainer.batch_timeout, timeout) + MARGIN
    divided = {"copies": cfg.trainer.dp_replicate, "context": cfg.trainer.cp, "tensor": cfg.trainer.tp, "expert": cfg.trainer.ep}
    mesh = join(device, rank=place.rank, world_size=place.world_size, timeout=limit, store=store, alive=alive, **divided)
    seed_masks(cfg.seed, mesh)
    return mesh


def seed_masks(seed: int, mesh: Mesh) -> None:
    """Seed torch's generators of this rank, which draw the masks of dropout (`lora.dropout`).

    The ranks of a tensor group gather the same tokens before divided matrices, so they draw the same masks. All others have other tokens
    and draw their own. Rank 0 draws as a single process does.
    """
    place = mesh.rank // (1 if mesh.row is None else mesh.row.tensor.size)
    torch.manual_seed(seed if place == 0 else zlib.crc32(f"{seed}/{place}".encode()))  # on a CPU, torch uses 32 bits


def one_process(device: torch.device | str) -> Mesh:
    """The mesh of a single process without a process group."""
    return Mesh(device=torch.device(device))


def join(
    device: torch.device,
    *,
    rank: int,
    world_size: int,
    timeout: float,
    store: dist.Store | None = None,
    alive: Callable[[], AbstractContextManager[None]] = nullcontext,
    copies: int = 1,
    context: int = 1,
    tensor: int = 1,
    expert: int = 1,
) -> Mesh:
    """Start the process group and return this rank's mesh, divided as `divide` says.

    The ranks meet at `store`; a single rank needs none. A collective that takes longer than `timeout`
    seconds fails. `alive` is entered while this rank waits for rank 0, which may itself be waiting for another role.
    """
    # On CUDA, gloo serves gradients and messages in host memory.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore() if world_size == 1 else store
    if store is not None:  # NCCL's communicators form at the first collective, through this store: others may still be reading the model
        store.set_timeout(timedelta(seconds=timeout))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    mesh = Mesh(device=device, rank=rank, world_size=world_size, alive=alive, timeout=timeout)
    return divide(mesh, timeout=timeout, copies=copies, context=context, tensor=tensor, expert=expert)


def divide(mesh: Mesh, *, timeout: float, copies: int = 1, context: int = 1, tensor: int = 1, expert: int = 1) -> Mesh:
    """The mesh with all axes, for ranks that are already in one process group. Every rank calls this.

    Parameters are sharded over all ranks, or over each of `copies` groups of neighbours. `context` · `tensor` neighbours compute each row
    together; `expert` neighbours divide experts.
    """
    kind, world_size, together = mesh.device.type, mesh.world_size, context * tensor
    shape, names = ((world_size,), ("fsdp",)) if copies == 1 else ((copies, world_size // copies), ("replicate", "fsdp"))
    parts = dist.init_device_mesh(kind, shape, mesh_dim_names=names)
    meshes = [parts]
    loss_group, row = dist.group.WORLD if world_size > 1 else None, None
    if together > 1:
        rows = dist.init_device_mesh(kind, (world_size // together, together), mesh_dim_names=("data", "row"))
        grid = dist.init_device_mesh(kind, (world_size // together, context, tensor), mesh_dim_names=("data", "context", "tensor"))
        meshes += [rows, grid]
        loss_group = rows.get_group("data") if world_size > together else None
        row = SequenceParallelGroup(
            _axis(rows, "row"),
            context=_axis(grid, "context") if context > 1 else ALONE,
            tensor=_axis(grid, "tensor") if tensor > 1 else ALONE,
        )
    own: dict[str, DeviceMesh] = {}
    shards: dict[str, DeviceMesh] = {}
    alone = None
    for name, size in (("tensor", tensor), ("expert", expert)):
        if size > 1:
            sizes = (copies, world_size // copies // size, size)
            all_axes = dist.init_device_mesh(kind, sizes, mesh_dim_names=("replicate", "shard", name))
            meshes.append(all_axes)
            own[name], shards[name] = all_axes[name], all_axes["shard"] if copies == 1 else all_axes["replicate", "shard"]
    if expert > 1:
        each = dist.init_device_mesh(kind, (world_size, 1), mesh_dim_names=("all", "alone"))
        meshes.append(each)
        alone = each["alone"]
    for group in (group for each in meshes for group in each.get_all_groups()):  # a group of only some ranks has torch's own limit
        _set_pg_timeout(timedelta(seconds=timeout), group)
    return replace(
        mesh,
        data_rank=mesh.rank // together,
        num_data_ranks=world_size // together,
        loss_group=loss_group,
        fsdp=parts,
        row=row,
        tensor=own.get("tensor"),
        expert=own.get("expert"),
        self_mesh=alone,
        shards=shards,
    )


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    return Axis(mesh.get_group(name), mesh.get_local_rank(name), mesh[name].size())


def _failed_elsewhere() -> RankLost:
    time.sleep(RANK_LOST_SECONDS)
    return RankLost("another rank failed; its log says why")
