"""Two exchanges between data-parallel engines that vLLM has for GPUs alone: there they are NCCL's, here gloo's.

In a layer with experts, every engine computes its slices of all experts for the tokens of all engines: the tokens are gathered before, and
the parts of the results added up after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange_on_cpu() -> None:
    """Give the CPU engines that are made in this process, and in those forked from it, the two exchanges."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
        assert dim == 0, dim
        if isinstance(input_, list):
            return [gather(one, sizes, self.world_size, self.device_group) for one in input_]
        return gather(input_, sizes, self.world_size, self.device_group)

    def reduce_scatterv(self: Any, input_: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        assert dim == 0, dim
        return add_up(input_, sizes, self.rank_in_group, self.world_size, self.device_group)

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def gather(mine: Tensor, sizes: Sequence[int] | None, ranks: int, group: Any) -> Tensor:
    """[sum of `sizes`, …]: the rows of all ranks, in their order. `mine` [rows of this rank, …]; `sizes`: rows of each; None: all alike."""
    sizes = sizes or [len(mine)] * ranks
    padded = mine.new_zeros((max(sizes), *mine.shape[1:]))  # gloo gathers equal sizes
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def add_up(parts: Tensor, sizes: Sequence[int] | None, rank: int, ranks: int, group: Any) -> Tensor:
    """[`sizes[rank]`, …]: this rank's rows of the sum over all ranks. `parts` [sum of `sizes`, …]."""
    sizes = sizes or [len(parts) // ranks] * ranks
    whole = parts.contiguous().clone()
    dist.all_reduce(whole, group=group)
    start = sum(sizes[:rank])
    return whole[start : start + sizes[rank]]
