"""FSDP2 for the policy: shards every decoder layer, embedding, head and the rest over ranks; gradients are summed, never averaged.

A single process needs no sharding if it computes in its parameters' dtype, or trains adapters, which cast themselves. Otherwise it shards
over itself, which casts one layer at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.fx.experimental import _config as symbols
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rlx.config.schema import AcConfig
from rlx.models.families import fp32_parameters
from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IN_PLACE = {"gemma3n", "gemma3n_text"}  # families that torch does not catch: they write into views with a version of their own
PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten._grouped_mm}


def checkpoint_activations(model: PolicyModel, ac: AcConfig, *, offload: bool = False, random: bool = False) -> None:
    """Recompute every `ac.freq`-th decoder layer in backward instead of storing its activations; 0 is off.

    `offload` keeps what these layers store in host memory. `random`: the layers draw numbers (dropout), which must be the same when they
    are recomputed.
    """
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    if ac.mode == "selective":
        if ac.freq and model.hf.config.model_type in IN_PLACE:
            raise ValueError(f"{type(model.hf).__name__} writes into results that selective checkpointing keeps; set trainer.ac.mode=full")
        how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_products)
    for layer in model.layers[:: ac.freq] if ac.freq else ():
        layer.forward = _recomputed(layer.forward, how, offload)


def _recomputed(forward: Callable[..., Any], how: dict[str, Any], offload: bool) -> Callable[..., Any]:
    """A plain function around `checkpoint`: torch.compile does not look into a functools.partial, so it would compile nothing."""

    def forward_again(*args: Any, **keys: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()) if offload else nullcontext():
            return checkpoint(forward, *args, **how, **keys)

    return forward_again


def _is_kept(op: Any) -> bool:
    """Whether selective checkpointing keeps an operation's result: it costs more to compute than to store."""
    return op.overloadpacket in PRODUCTS or "attention" in str(op) or "attn" in str(op)


def _keep_products(context: Any, op: Any, *args: Any, **keys: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(op) else CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(model: PolicyModel, device: torch.device, **keys: Any) -> None:
    """Compile every decoder layer for all lengths. `keys` go to torch.compile.

    The blocks in which a row attends on other devices than CUDA differ from row to row, so there rows are padded.
    """
    if model.layout_kind(device) == "shared":
        model.pad_rows()
    for layer in model.layers:
        # Its forward, not the layer: the hooks of FSDP run around it. Inside they would break the graph, and with recomputed activations
        # nothing at all would be compiled.
        layer.forward = _sizes_apart(torch.compile(layer.forward, dynamic=True, **keys))


def _sizes_apart(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Sizes that are equal in one row by chance are not taken for the same in all rows, which would need another graph for the next row.

    torch reads the switch while it traces, which it does at a call. It is that of the whole process, so it is set for the call alone.
    """

    def forward(*args: Any, **keys: Any) -> Any:
        with symbols.patch(use_duck_shape=False):  # type: ignore[attr-defined]  # torch installs it
            return compiled(*args, **keys)

    return forward


def shard(
    model: PolicyModel,
    mesh: Mesh,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
) -> None:
    """Shard in place over the mesh's `fsdp` axis.

    Parameters keep their dtype and are gathered in `compute_dtype`, or in float32 if their family wants that (`rlx.models.families`);
    gradients are summed in `reduce_dtype`.
    `cpu_offload` keeps shards and gradients in host memory. Without `reshard_after_forward`, parameters stay gathered until backward.
    """
    # Imported here, because it takes seconds and a single process may not need it.
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    # Inputs are not cast: temperatures must stay float32, and hidden states already have the embedding's dtype.
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    # Without a GPU nothing can be pinned. There the parameters are in host memory anyway, and only the tests ask for this.
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if cpu_offload else OffloadPolicy()
    how: dict[str, Any] = {"mesh": mesh.fsdp, "mp_policy": precision, "offload_policy": offload}
    embedding, head = model.hf.get_input_embeddings(), model.head[0]
    layers: Any = model.layers
    plain = type(embedding) is torch.nn.Embedding  # others have more in it: Inkling's has a norm
    # A tied matrix is needed from the beginning to the end of both passes, so it stays in the root, which is gathered all that time.
    own = [embedding, head] if head.weight is not embedding.weight else []
    if own:
        _score_within(head)
        model.head_is_fsdp_unit = True
    placed = _placement_of_divided(mesh.shards) if mesh.shards else None
    exact = [tensor for _, tensor in fp32_parameters(model.hf, compute_dtype) if isinstance(tensor, torch.nn.Parameter)]
    if exact:  # a unit has one dtype for each of its process groups
        apart = _shards_of(mesh.duplicate_fsdp_mesh())
        placed = _placement_of_exact(exact, apart, placed)
        how["shard_placement_fn"] = placed
    for module in (*model.layers, *own):
        fully_shard(module, reshard_after_forward=reshard_after_forward, **how | {"shard_placement_fn": placed})
    fully_shard(model, **how)
    # What waits is summed in `reduce_dtype`, on the device.
    model.sums_copies_late = reduce_dtype == torch.float32 and not cpu_offload
    if own:
        embedding.set_unshard_in_backward(not plain)  # the gradient of a table needs the ids alone
        head.set_reshard_after_forward(False)  # its backward comes next
    if mesh.expert is not None:  # the exchange of tokens waits for the device, so a gather that begins after it would be late
        for one, other in pairwise(layers):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups if exact else ():
                if group.mesh_info is apart:
                    group.mp_policy = replace(precision, param_dtype=torch.float32)
            # None of these calls is recursive. The loss is already divided by global counts, so gradients must be summed. gloo has no
            # averaging sum, and there a factor of 1 without force-sum would still average.
            if mesh.world_size > 1:  # one rank would divide by 1 into a copy of all gradients
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True, recurse=False)  # for experts and adapters that a rank did not use


def _shards_of(mesh: DeviceMesh) -> Any:
    """What FSDP calls a mesh of shards, or of several copies of them."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0) if mesh.ndim > 1 else FSDPMeshInfo(mesh, shard_mesh_dim=0)


def _placement_of_exact(
    exact: Sequence[torch.nn.Parameter], apart: Any, others: Callable[[torch.nn.Parameter], Any] | None
) -> Callable[[torch.nn.Parameter], Any]:
    """Where FSDP shards a parameter: `exact` ones over the process groups `apart`, others as `others` says."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    from torch.distributed.tensor import DTensor

    kept = {id(parameter) for parameter in exact}

    def placed(parameter: torch.nn.Parameter) -> Any:
        if id(parameter) not in kept:
            return None if others is None else others(parameter)
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"the model keeps a parameter {list(parameter.shape)} in float32, which trainer.tp and trainer.ep cannot while they divide "
                "it; set both to 1, or model.dtype=float32"
            )
        return ShardPlacementResult(None, apart)

    return placed


def _placement_of_divided(shards: Mapping[str, DeviceMesh]) -> Callable[[torch.nn.Parameter], Any]:
    """Where FSDP shards a parameter: one that is divided over the ranks of an axis only over the mesh of that axis in `shards`."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    from torch.distributed.tensor import DTensor, Shard

    infos = {axis: _shards_of(mesh) for axis, mesh in shards.items()}

    def placed(parameter: torch.nn.Parameter) -> Any:
        if not isinstance(parameter, DTensor):
            return None
        (divided,) = parameter.placements
        assert isinstance(divided, Shard)
        assert parameter.device_mesh.mesh_dim_names
        (axis,) = parameter.device_mesh.mesh_dim_names
        ranks, part = shards[axis].size(-1), list(parameter.to_local().shape)
        # Rather another dimension of a matrix, so that a shard is one block of the whole; of experts rather the first, because a checkpoint
        # may have each in a tensor of its own. Only the first dimension may be divided unevenly, and not if it is divided twice.
        other = 1 - divided.dim if parameter.ndim == 2 else parameter.ndim - 1
        wanted = [other, 0] if parameter.ndim == 2 else [0, other]
        even = [dim for dim in wanted if part[dim : dim + 1] and (part[dim] % ranks == 0 or (dim == 0 and divided.dim != 0))]
        if not even:
            raise ValueError(
                f"a part {part} of a parameter {list(parameter.shape)}, divided over the {axis} axis, would be shared unevenly by {ranks} "
                f"ranks; set trainer.{'tp' if axis == 'tensor' else 'ep'}=1, or a number of trainer processes that gives even shares"
            )
        return ShardPlacementResult(Shard(even[0]), infos[axis])

    return placed


def free_gathered(model: torch.nn.Module) -> None:
    """Free what a forward without backward has left: some parameters stay gathered until backward, and FSDP notes every layer's forward.

    A sharded model must have had a forward before.
    """
    if (reset := getattr(model, "reset_iter_state", None)) is not None:  # FSDP's
        reset()


def _score_within(head: torch.nn.Module) -> None:
    """Let the head's own forward run an op on its parameters: FSDP gathers them for it, also in backward."""
    plain = head.forward

    def forward(hidden: torch.Tensor, score: Callable[..., Any] | None = None) -> Any:
        return plain(hidden) if score is None else score(hidden, head)

    head.forward = forward
