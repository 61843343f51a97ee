"""Whether the parameters that vLLM serves are those that the trainer wrote: finds each tensor of a version in the engine's parameters.

vLLM keeps several of a model's tensors in one parameter (`qkv_proj`, `gate_up_proj`) and pads vocabularies. What it cuts into parts for
tensor parallelism, renames, casts or rearranges is not found here: then it is not compared, and the share that was says so.
Knows vLLM's `packed_modules_mapping`. Knows nothing of how weights are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlx.weights.attest import checksum

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")  # may have more rows than tokens
SHOWN = 5  # names listed


def compare(model: torch.nn.Module, kept: Mapping[torch.nn.Module, Tensor], written: Mapping[str, Mapping[str, Any]]) -> float:
    """The share of the elements in `written` (by name: `shape`, `dtype`, `sum`) that are served as they were written.

    `kept`: weights of layers that hold a packed copy instead (`cpu_ops.kept_weights`); the copy itself cannot be read.
    Raises ValueError naming tensors whose values are others.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    parameters |= {f"{name}.weight": kept[module] for name, module in model.named_modules() if module in kept}
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    wrong, compared, total = [], 0, 0
    for name, fact in written.items():
        size = torch.Size(fact["shape"]).numel()
        total += size
        served = _find(name, parameters, packed, written)
        if served is None or str(served.dtype) != f"torch.{fact['dtype']}":
            continue
        compared += size
        if checksum(served) != fact["sum"]:
            wrong.append(name)
    if wrong:
        names = ", ".join(wrong[:SHOWN]) + (f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
        raise ValueError(f"what is served is not what was trained: {len(wrong)} of {len(written)} tensors have other values: {names}")
    return compared / total if total else 0.0


def _find(
    name: str, parameters: Mapping[str, Tensor], packed: Mapping[str, Sequence[str]], written: Mapping[str, Mapping[str, Any]]
) -> Tensor | None:
    """The part of a parameter in which the tensor `name` is served."""
    shape = list(written[name]["shape"])
    whole = parameters.get(name)
    if whole is not None:
        served = whole[: shape[0]] if name.endswith(VOCABULARY) else whole
        return served if list(served.shape) == shape else None
    path, _, leaf = name.rpartition(".")
    layer, _, own = path.rpartition(".")
    for fused, parts in packed.items():
        whole = parameters.get(f"{layer}.{fused}.{leaf}")
        names = [f"{layer}.{part}.{leaf}" for part in parts]
        if own in parts and whole is not None and all(part in written for part in names):
            sizes = [written[part]["shape"][0] for part in names]
            start = sum(sizes[: list(parts).index(own)])
            served = whole[start : start + shape[0]]
            return served if whole.shape[0] == sum(sizes) and list(served.shape) == shape else None
    return None
