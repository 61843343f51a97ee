"""How a model is divided: its matrices over a tensor group, its experts over an expert group, as transformers' plans for each family say.

**Matrices** (`base_model_tp_plan`): in a block, `colwise` matrices keep a part of their outputs (heads, inner units), and the `rowwise`
one that follows keeps the same part of its inputs, so its result is a partial sum. Each block gathers its tokens before and scatters the
sum after (`rlx.parallel.row`). Norms, experts, embedding and head are left to all ranks, each with its own tokens. With LoRA, the divided
side of an adapter is divided like its layer's weight.

**Experts** (`base_model_ep_plan`): each rank keeps an equal part of every layer's experts. One all-to-all sends each token to the ranks
of its experts, another brings the results back, also for gradients. A rank's experts see the tokens of the whole group, so the sum over
the other ranks counts each token once.

Divided parameters are DTensors over their group, which FSDP then also shards over the other ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rlx.models.families import backbone
from rlx.parallel.row import SequenceParallelGroup

OUTPUTS, INPUTS = "colwise", "rowwise"
DIVIDED = {  # the dimension of each parameter that is divided; absent: it is whole
    OUTPUTS: {"weight": 0, "bias": 0, "lora_B": 0},
    INPUTS: {"weight": 1, "lora_A": 1},
}


def apply_tensor_parallel(hf: Any, row: SequenceParallelGroup, mesh: DeviceMesh) -> None:
    """Divide the matrices of a model on the meta device, in place, over the ranks of `mesh`, this rank's tensor group.

    Raises ValueError if the family has no such plan, or one that divides attention in another way, or if sizes are not divisible.
    """
    config, size, base = hf.config.get_text_config(), mesh.size(), backbone(hf)
    plan = getattr(config, "base_model_tp_plan", None) or {}
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (count := getattr(config, name, None)) and count % size:
            raise ValueError(f"trainer.tp={size} does not divide {name}={count} of {type(hf).__name__}; set it to a divisor")
    blocks: dict[nn.Module, dict[str, str]] = {}
    for name, module in base.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.)", ".*", name))
        if isinstance(module, nn.Linear) and style in DIVIDED:
            parent, _, leaf = name.rpartition(".")
            blocks.setdefault(base.get_submodule(parent), {})[leaf] = style
    attending = [module for module in base.modules() if hasattr(module, "o_proj") and hasattr(module, "head_dim")]
    undivided = [module for module in attending if module not in blocks]
    if not attending or undivided or any(list(styles.values()).count(INPUTS) != 1 or len(styles) < 2 for styles in blocks.values()):
        raise ValueError(
            f"trainer.tp={size}: transformers has no plan that divides the attention of {type(hf).__name__} by heads; set trainer.tp=1, "
            "or use trainer.cp for long sequences"
        )
    for block, styles in blocks.items():
        for leaf, style in styles.items():
            _divide(block.get_submodule(leaf), style, row, mesh)  # type: ignore[arg-type]
        block.forward = _with_span(block.forward, row)


def _divide(layer: nn.Linear, style: str, row: SequenceParallelGroup, mesh: DeviceMesh) -> None:
    for name, parameter in list(layer.named_parameters(recurse=False)):
        dimension = DIVIDED[style].get(name)
        if dimension is not None:
            if parameter.shape[dimension] % mesh.size():
                raise ValueError(f"trainer.tp={mesh.size()} does not divide a matrix of shape {list(parameter.shape)}; set it to a divisor")
            part = distribute_tensor(parameter.detach(), mesh, [Shard(dimension)], src_data_rank=None)
            layer.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    layer.forward = _of_parts(layer, layer.forward, row, style)  # type: ignore[method-assign, assignment]


def _with_span(forward: Callable[..., Any], row: SequenceParallelGroup) -> Callable[..., Any]:
    """Gather the hidden states, a block's first argument, to the span of the tensor group."""

    def with_span(*args: Any, **keys: Any) -> Any:
        if args:
            return forward(row.gather(args[0]), *args[1:], **keys)
        return forward(**keys | {"hidden_states": row.gather(keys["hidden_states"])})

    return with_span


def _of_parts(layer: nn.Linear, forward: Callable[[Tensor], Tensor], row: SequenceParallelGroup, style: str) -> Callable[[Tensor], Tensor]:
    """Compute with this rank's parts. Those of inputs give partial sums to scatter; the bias is added to the sum.

    A model's own forward (`row.whole`) has whole matrices, gathered one at a time. So a block that may not be divided, because it computes
    something over all its inner units, differs from it.
    """

    def of_parts(input: Tensor) -> Tensor:
        own: dict[str, Any] = layer._parameters
        parameters = dict(own)
        sums = style == INPUTS and not row.whole
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                own[name] = parameter.full_tensor() if row.whole else parameter.to_local()
        if sums:
            own["bias"] = None
        try:
            output = forward(input)
        finally:
            own.update(parameters)
        if not sums:
            return output
        summed, bias = row.scatter(output), parameters.get("bias")
        return summed if bias is None else summed + bias

    return of_parts


EXCHANGE = "all_to_all"
EXPERTS = "ep_dispatch_experts"  # the style of a module of experts in transformers' plans


def apply_expert_parallel(hf: Any, mesh: DeviceMesh, alone: DeviceMesh, *, dense: bool = False) -> None:
    """Divide the experts of a model on the meta device, in place, over the ranks of `mesh`, this rank's expert group.

    `alone` is a mesh of this rank only: no other rank has the same tokens. `dense`: a model without a plan for experts stays as it is.
    Raises ValueError if transformers has no plan for the family, or if the experts are not divisible.
    """
    base, size = backbone(hf), mesh.size()
    plan = getattr(hf.config.get_text_config(), "base_model_ep_plan", None) or {}
    # Parameters first: dividing them sets a module's number of local experts, which the exchange reads when it is installed.
    names = [*dict(base.named_parameters()), *dict(base.named_modules())]
    styles = {name: style for name in names if (style := plan.get(re.sub(r"\.\d+(?=\.)", ".*", name)))}
    experts = [base.get_submodule(name) for name, style in styles.items() if style == EXPERTS]
    if not experts and dense:
        return
    if not experts:
        raise ValueError(f"trainer.ep={size}: transformers has no plan that divides experts of {type(hf).__name__}; set trainer.ep=1")
    for module in experts:
        if module.num_experts % size:
            raise ValueError(
                f"trainer.ep={size} does not divide the {module.num_experts} experts of {type(hf).__name__}; set it to a divisor"
            )
    try:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError:  # before 5.20: the plan by patterns, and one way to exchange
        from transformers.distributed.tensor_parallel import apply_expert_parallelism

        apply_expert_parallelism(base, mesh, alone, plan)
    else:
        apply_expert_parallelism(base, mesh, alone, styles, EXCHANGE)
