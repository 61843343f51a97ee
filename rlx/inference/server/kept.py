"""Layers of vLLM's CPU engine whose weights stay readable after they were packed.

vLLM packs a layer's weight and drops the original. What is served could then not be compared with what was trained, and a new version
would take a slow path (40 ms for a tiny model). Here the original is kept, new values are copied into it, and it is packed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

COLUMNS = 4  # of each packed weight that are compared exactly: a copy that was not made anew differs in each. Every version has others
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.04, torch.float16: 0.005}  # of a product with signs, × the norm of the weight's row
TURNS = itertools.count()  # comparisons so far
SHOWN = 5  # names listed in a message


def keep_weights() -> None:
    """Have the CPU layers that are made in this process, and in those forked from it, keep the weights that they pack."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    pack, pack_experts = UnquantizedLinearMethod.process_weights_after_loading, UnquantizedFusedMoEMethod.process_weights_after_loading

    def pack_and_keep(method: UnquantizedLinearMethod, layer: Any) -> None:
        weight = layer.weight
        pack(method, layer)
        if len(weight) and not len(layer.weight):
            layer.__dict__["rlx_weight"] = weight  # in `__dict__`, so that it is not a parameter of the module

    def pack_experts_anew(method: UnquantizedFusedMoEMethod, layer: Any) -> None:
        # vLLM packs experts when it makes their kernel. If there is one, it would put the plain values of an update in the packed place.
        method.moe_kernel = None
        pack_experts(method, layer)

    UnquantizedLinearMethod.process_weights_after_loading = pack_and_keep
    UnquantizedFusedMoEMethod.process_weights_after_loading = pack_experts_anew


def kept_weights(model: torch.nn.Module) -> dict[torch.nn.Module, torch.nn.Parameter]:
    """Layers whose weight was packed, with the original weight. Empty if any layer of the model uses another quantization method."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    methods = {type(getattr(layer, "quant_method", None)) for layer in model.modules()}
    if methods - {type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod}:
        return {}
    return {layer: layer.__dict__["rlx_weight"] for layer in model.modules() if "rlx_weight" in layer.__dict__}


def own_copy(packed: Mapping[torch.nn.Module, Tensor]) -> set[torch.nn.Module]:
    """The layers that multiply with a copy of their original weight, so that writing into the original changes no product."""
    found = set()
    for layer, weight in packed.items():
        one = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        one[0, 0] = 1
        method: Any = layer.quant_method
        before, first = method.apply(layer, one), weight[0, 0].clone()
        weight[0, 0] = 1 if first == 0 else -first
        after = method.apply(layer, one)
        weight[0, 0] = first
        if torch.equal(before, after):
            found.add(layer)
    return found


def check_packed(
    model: torch.nn.Module, packed: Mapping[torch.nn.Module, Tensor], asked: Mapping[torch.nn.Module, Question] = MappingProxyType({})
) -> None:
    """Raise ValueError if a layer multiplies with other values than its original weight has (`kept_weights`): it was not packed again.

    `asked`: questions to the layers, as far as they were made already (`question`).
    """
    names = {module: name for name, module in model.named_modules()}
    wrong = [names[layer] for layer, weight in packed.items() if not _multiplies_with(layer, weight, asked.get(layer))]
    if wrong:
        shown = ", ".join(wrong[:SHOWN]) + (f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
        raise ValueError(
            "the served weights are not those that were trained: "
            f"{len(wrong)} of {len(packed)} packed layers multiply with other values than their weights have: {shown}"
        )


def heads(model: torch.nn.Module) -> list[Any]:
    """The layers that multiply with a packed copy of a vocabulary: vLLM's heads, whatever their model calls them (`lm_head`, `embed_out`).

    A model without one computes its logits with the embedding itself (Gemma 2, Cohere).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    tables = [layer for layer in model.modules() if isinstance(getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod)]
    return [layer for layer in tables if isinstance(layer, ParallelLMHead)] or tables


def check_heads(model: torch.nn.Module, asked: Mapping[torch.nn.Module, Question] = MappingProxyType({})) -> None:
    """Raise ValueError if the packed copy that a CPU head multiplies with has other values than its weight.

    After an update the weight itself is right, so only the packed copy shows that an update has forgotten it. `asked`: see `check_packed`.
    """
    if not all(_multiplies_with(head, head.weight, asked.get(head)) for head in heads(model)):
        raise ValueError("the served weights are not those that were trained: the head multiplies with other values than its weight has")


class Question(NamedTuple):
    """What a layer is asked to multiply, and what its product must be if it multiplies with the values of a weight [out, in].

    A product with a vector of one 1 gives a column exactly: a few columns, spread over all, show a copy of an older version, however
    little the weights have changed. A product with random signs has all columns in it, but is rounded: it shows what is wrong by more than
    `TOLERANCE` times the norm of its row, or of the usual row if that is larger.
    """

    inputs: Tensor  # [columns + 1, in]
    columns: Tensor  # [columns, out]
    mixed: Tensor  # [out], in float32


def question(weight: Tensor, turn: int) -> Question:
    """`turn`: for `COLUMNS` other columns and other signs each time."""
    weight = weight.detach()
    width = weight.shape[1]
    columns = sorted({(place * width // COLUMNS + turn) % width for place in range(COLUMNS)})
    inputs = torch.zeros(len(columns) + 1, width, dtype=weight.dtype, device=weight.device)
    inputs[range(len(columns)), columns] = 1
    inputs[-1] = torch.randint(2, (width,), generator=torch.Generator().manual_seed(turn)) * 2 - 1
    return Question(inputs, weight[:, columns].T.contiguous(), torch.nn.functional.linear(inputs[-1:], weight)[0].float())


def _multiplies_with(layer: Any, weight: Tensor, asked: Question | None) -> bool:
    """Whether a layer multiplies with the values of `weight` [out, in]."""
    asked = question(weight, next(TURNS)) if asked is None else asked
    found = layer.quant_method.apply(layer, asked.inputs).to(weight.dtype)
    exact = found[:-1]
    finite = exact.isfinite()  # 0 * inf is not
    return torch.equal(exact[finite], asked.columns[finite]) and _is_product(found[-1].float(), asked.mixed, weight.detach())


def _is_product(found: Tensor, expected: Tensor, weight: Tensor) -> bool:
    """Whether `found` [out] is the product `expected` [out] of `weight` [out, in] and signs, but for rounding."""
    finite = expected.isfinite()
    tolerance = TOLERANCE[weight.dtype]
    # Most rows differ by less than a small part of the usual product. Norms, which read the weights once more, are for the others.
    usual = expected[finite].abs().median() if finite.any() else 0.0
    doubtful = finite & ~((found - expected).abs() <= tolerance * usual)
    norms = torch.linalg.vector_norm(weight[doubtful], dim=1, dtype=torch.float32)
    return bool(((found - expected).abs()[doubtful] <= tolerance * norms).all())
