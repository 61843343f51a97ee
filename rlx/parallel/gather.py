"""A sharded tensor made whole on one rank.

A tensor that is divided by rows among the ranks of one group is sent to the rank that wants it: the others receive nothing and allocate
nothing. Any other division (rows that are divided twice, over `tensor` or `expert`) is gathered by every rank, because torch knows how it
lies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def whole_on(tensor: Tensor, owner: int, rank: int) -> Tensor | None:
    """The whole of a tensor on the rank `owner`; None on other ranks. Every rank calls this with the same tensors in the same order.

    `rank` is the caller's. A tensor that is not a DTensor is whole everywhere.
    """
    if not hasattr(tensor, "full_tensor"):  # importing DTensor's class takes seconds
        return tensor if rank == owner else None
    sharded: Any = tensor
    axis = _rows_over(sharded)
    if axis is None:
        whole = sharded.full_tensor()
        return whole if rank == owner else None
    return _rows_to(owner, rank, sharded.to_local(), sharded.shape, sharded.device_mesh, axis)


def _rows_over(tensor: Any) -> int | None:
    """The one axis of a DTensor's mesh over which its rows are divided, if it is copied along all others; otherwise None."""
    from torch.distributed.tensor import Replicate, Shard

    divided = [axis for axis, placement in enumerate(tensor.placements) if type(placement) is not Replicate]
    by_rows = len(divided) == 1 and type(placement := tensor.placements[divided[0]]) is Shard and placement.dim == 0
    return divided[0] if by_rows else None


def _rows_to(owner: int, rank: int, local: Tensor, shape: torch.Size, mesh: DeviceMesh, axis: int) -> Tensor | None:
    """Gather rows to the owner, from the ranks along the mesh's axis that have the owner among them. `local`: this rank's rows."""
    group = mesh.get_group(axis)
    members = dist.get_process_group_ranks(group)
    if owner not in members:  # its own copy of the parameters has all rows
        return None
    if len(members) == 1:
        return local
    most = -(-shape[0] // len(members))  # rows of each rank but the last ones, which may have fewer, or none
    if len(local) < most:
        local = torch.cat([local, local.new_zeros(most - len(local), *shape[1:])])
    if rank != owner:
        dist.gather(local.contiguous(), dst=owner, group=group)
        return None
    rows = local.new_empty(most * len(members), *shape[1:])
    dist.gather(local.contiguous(), list(rows.split(most)), dst=owner, group=group)
    return rows[: shape[0]]
