"""FSDP2 for the policy: every decoder layer and the rest sharded over all ranks, gradients summed, never averaged.

One process needs none of it when it computes in the dtype of its parameters; with another dtype it shards over itself, so that
mixed precision has one implementation. Knows torch.distributed; knows no objective and no file.
"""

from __future__ import annotations

import functools
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from rlx.models.policy import PolicyModel


def start_process_group(device: torch.device, *, rank: int, world_size: int, timeout: float, store: dist.Store | None = None) -> None:
    """Join the other ranks (at `store`, or where torchrun's variables say), or make a group of one that needs no port.

    `timeout` in seconds.
    """
    # CUDA has gloo beside it, for gradients that live in host memory.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


def checkpoint_activations(model: PolicyModel, freq: int) -> None:
    """Recompute every `freq`-th decoder layer in backward instead of keeping its activations; 0 is off."""
    if freq < 1:
        return
    for i, layer in enumerate(model.layers):
        if i % freq == 0:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def shard(
    model: PolicyModel, device: torch.device, *, compute_dtype: torch.dtype, reduce_dtype: torch.dtype, cpu_offload: bool = False
) -> None:
    """Shard in place: parameters keep their dtype, are gathered in `compute_dtype`, and their gradients are summed in `reduce_dtype`.

    `cpu_offload` keeps shards and gradients in host memory.
    """
    # Imported here because it takes seconds that a single process need not spend.
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    # Inputs are not cast: temperatures must stay float32, and hidden states have the embedding's dtype already.
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=True) if cpu_offload and device.type == "cuda" else OffloadPolicy()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    # The root holds embedding, last norm and head: gathered from forward to backward, so the head can be used outside its module.
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # None of these is recursive. The loss is divided by global counts already, so gradients are summed as they are;
            # gloo has no averaging sum at all, and a factor of 1 without force-sum still averages there.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True, recurse=False)  # experts that one rank did not use
