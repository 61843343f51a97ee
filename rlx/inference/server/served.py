"""Checks whether the parameters that vLLM serves are those that the trainer wrote.

It finds each tensor of a version in the engine's parameters. vLLM keeps several tensors in one parameter (`qkv_proj`, `gate_up_proj`)
and pads vocabularies. Tensors that vLLM splits for tensor parallelism, renames or casts are skipped; the returned share shows how much was
compared. Some models' loaders rearrange values but keep name and shape. So `faithful` finds, in the model that vLLM itself loaded, the
tensors whose served values equal those in their file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlx.weights.attest import checksum

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")  # may have more rows than tokens
SHOWN = 5  # names listed in a message


def faithful(
    model: torch.nn.Module,
    kept: Mapping[torch.nn.Module, Tensor],
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable[tuple[str, Tensor]],
) -> frozenset[str]:
    """Names of the tensors that the engine serves with the same values as in `tensors`, apart from the dtype.

    `tensors`: the tensors that the engine has just loaded. `shapes`: all their shapes. `kept`: original weights of layers whose own weight
    is a packed copy, which cannot be read (`kept.kept_weights`).
    """
    parameters, packed = _parameters(model, kept)
    names = []
    for name, tensor in tensors:
        served = _find(name, parameters, packed, shapes)
        if served is not None and checksum(tensor.to(served.device, served.dtype)) == checksum(served):
            names.append(name)
    return frozenset(names)


def compare(
    model: torch.nn.Module, kept: Mapping[torch.nn.Module, Tensor], written: Mapping[str, Mapping[str, Any]], comparable: frozenset[str]
) -> float:
    """Compare the served tensors with `written` (by name: `shape`, `dtype`, `sum`). Returns the share of elements that were compared.

    Only tensors in `comparable` are compared. Raises ValueError, which names the tensors with other values.
    """
    parameters, packed = _parameters(model, kept)
    shapes = {name: fact["shape"] for name, fact in written.items()}
    wrong, compared, total = [], 0, 0
    for name, fact in written.items():
        size = torch.Size(fact["shape"]).numel()
        total += size
        served = _find(name, parameters, packed, shapes) if name in comparable else None
        if served is None or str(served.dtype) != f"torch.{fact['dtype']}":
            continue
        compared += size
        if checksum(served) != fact["sum"]:
            wrong.append(name)
    if wrong:
        names = ", ".join(wrong[:SHOWN]) + (f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
        raise ValueError(f"the served weights are not those that were trained: {len(wrong)} of {len(written)} tensors differ: {names}")
    return compared / total if total else 0.0


def _parameters(model: torch.nn.Module, kept: Mapping[torch.nn.Module, Tensor]) -> tuple[dict[str, Tensor], Mapping[str, Sequence[str]]]:
    """All parameters by name, and the mapping of those that hold several of the files' tensors."""
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    parameters |= {f"{name}.weight": kept[module] for name, module in model.named_modules() if module in kept}
    return parameters, getattr(model, "packed_modules_mapping", {})


def _find(
    name: str, parameters: Mapping[str, Tensor], packed: Mapping[str, Sequence[str]], shapes: Mapping[str, Sequence[int]]
) -> Tensor | None:
    """The part of a parameter that serves the tensor `name`; None if it is not found."""
    shape = list(shapes[name])
    whole = parameters.get(name)
    if whole is not None:
        served = whole[: shape[0]] if name.endswith(VOCABULARY) else whole
        return served if list(served.shape) == shape else None
    path, _, leaf = name.rpartition(".")
    layer, _, own = path.rpartition(".")
    for fused, parts in packed.items():
        whole = parameters.get(f"{layer}.{fused}.{leaf}")
        names = [f"{layer}.{part}.{leaf}" for part in parts]
        if own in parts and whole is not None and all(part in shapes for part in names):
            sizes = [shapes[part][0] for part in names]
            start = sum(sizes[: list(parts).index(own)])
            served = whole[start : start + shape[0]]
            return served if whole.shape[0] == sum(sizes) and list(served.shape) == shape else None
    return None
