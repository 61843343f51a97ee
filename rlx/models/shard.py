"""FSDP2 for the policy: shards every decoder layer, embedding, head and the rest over ranks; gradients are summed, never averaged.

A single process needs no sharding if it computes in its parameters' dtype, or trains adapters, which cast themselves. Otherwise it shards
over itself, which casts one layer at a time, or has copies of all parameters (`copies.py`), which is faster and takes more memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.fx.experimental import _config as symbols
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rlx.config.schema import AcConfig
from rlx.models.exact import kept_exact
from rlx.models.last import read_all
from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten._grouped_mm}


def checkpoint_activations(model: PolicyModel, ac: AcConfig, *, offload: bool = False, random: bool = False) -> None:
    """Recompute every `ac.freq`-th decoder layer in backward instead of storing its activations; 0 is off.

    `offload` keeps what these layers store in host memory. `random`: the layers draw numbers (dropout), which must be the same when they
    are recomputed.
    """
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
    model.keeps_products = ac.mode == "selective" and ac.freq > 0
    if ac.mode == "selective":
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


@contextmanager
def overwritten_products(model: PolicyModel) -> Iterator[set[str]]:
    """Collects what in the model's layers writes into a result that selective checkpointing keeps; nothing if it keeps none."""
    if not model.keeps_products:
        yield set()
        return
    watch = _Overwritten()
    hooks = [layer.register_forward_pre_hook(lambda *_: watch.look(True)) for layer in model.layers]
    hooks += [layer.register_forward_hook(lambda *_: watch.look(False)) for layer in model.layers]
    try:
        with watch:
            yield watch.found
    finally:
        for hook in hooks:
            hook.remove()


class _Overwritten(TorchDispatchMode):
    """Collects the operations that write into a result that would be kept.

    Backward would take the overwritten values for the result. torch notices that only where the result itself is written to, and not
    where a view with a version of its own is, as `torch.matmul` returns for more than three dimensions (Gemma 3n).
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._looks = False
        self._kept: dict[int, tuple[str, Any]] = {}  # by storage, with the results, so that no other tensor gets their place

    def look(self, looks: bool) -> None:
        """Begin to look, or stop. What was kept in a layer counts there alone."""
        self._looks = looks
        self._kept.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keys = kwargs or {}
        if not self._looks:
            return func(*args, **keys)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                kept = self._kept.get(value.untyped_storage()._cdata)
                self.found |= {f"{func} after {kept[0]}"} if kept is not None else set()
        out = func(*args, **keys)
        if _is_kept(func):
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self._kept[tensor.untyped_storage()._cdata] = (str(func), tensor)
        return out


def compile_layers(model: PolicyModel, **keys: Any) -> None:
    """Compile every decoder layer for all lengths, once for each structure of a row (`rlx.models.compiled`). `keys` go to torch.compile."""
    model.compiled = True
    read_all(model.layers[-1])
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

    Parameters keep their dtype and are gathered in `compute_dtype`, or in float32 if their family wants that (`rlx.models.exact`);
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
    # A tied matrix is needed from the beginning to the end of both passes, so it stays in the root, which is gathered all that time.
    own = [embedding, head] if head.weight is not embedding.weight else []
    if own:
        _score_within(head)
        model.scores_within_head = True
    placed = _placement_of_divided(mesh.shards) if mesh.shards else None
    exact = [tensor for _, tensor in kept_exact(model.hf, compute_dtype) if isinstance(tensor, torch.nn.Parameter)]
    if exact:  # a unit has one dtype for each of its process groups
        apart = _shards_of(mesh.again())
        placed = _placement_of_exact(exact, apart, placed)
        how["shard_placement_fn"] = placed
    for module in (*model.layers, *own):
        fully_shard(module, reshard_after_forward=reshard_after_forward, **how | {"shard_placement_fn": placed})
    fully_shard(model, **how)
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
            if hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True, recurse=False)  # for experts and adapters that a rank did not use
            elif mesh.world_size > 1 and may_be_unused(model):
                raise ValueError(
                    f"torch {torch.__version__} reduces only the gradients of what a rank used, and ranks would use different "
                    f"{'adapters' if model.slots is not None else 'experts'}; install torch 2.13"
                )


def may_be_unused(model: PolicyModel) -> bool:
    """Whether a rank may have no token for some of the model's parameters: experts that are modules of their own, or runs' adapters."""
    experts = (module for name, module in model.named_modules() if name.endswith("experts"))
    return model.slots is not None or any(isinstance(module, torch.nn.ModuleList) for module in experts)


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
    if (reset := getattr(model, "reset_iter_state", None)) is not None:  # since torch 2.13; before, the notes grow by some 2 kB a row
        reset()
        return
    for module in model.modules():
        if (reshard := getattr(module, "reshard", None)) is not None:
            reshard()


def _score_within(head: torch.nn.Module) -> None:
    """Let the head's own forward run an op on its parameters: FSDP gathers them for it, also in backward."""
    plain = head.forward

    def forward(hidden: torch.Tensor, score: Callable[..., Any] | None = None) -> Any:
        return plain(hidden) if score is None else score(hidden, head)

    head.forward = forward
