"""Checks whether the parameters that vLLM serves are those that the trainer wrote.

It finds each tensor of a version in the engine's parameters. vLLM keeps several tensors in one parameter (`qkv_proj`, `gate_up_proj`),
pads vocabularies, and gives each worker of a tensor-parallel engine a slice. The workers' partial checksums add up to that of the whole
tensor (`settle`). Tensors that vLLM renames, casts or rearranges are left out; the result names them with their share. Some models' loaders
rearrange values but keep name and shape. So `faithful` finds, in the model that vLLM itself loaded, the tensors whose served values equal
those in their file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlx.weights import files
from rlx.weights.attest import as_checksum, checksum, partial_sum

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")  # may have more rows than tokens
SHOWN = 5  # names listed in a message


class Place(NamedTuple):
    """Where a tensor is served."""

    served: Tensor
    start: int  # of the slice that this worker has, in the dimension `dim`
    dim: int | None  # None: the whole tensor


class Compared(NamedTuple):
    """What one worker found. Plain values: it crosses processes."""

    share: float  # of the elements: compared, here or by the sum of all workers' parts
    left_out: dict[str, tuple[str, float]]  # by name: why, and its share of the elements
    parts: dict[str, tuple[int, str]]  # tensors of which this worker has a slice: its partial sum, and the checksum of the whole tensor


class Split(NamedTuple):
    """A worker of a tensor-parallel engine."""

    rank: int = 0
    ranks: int = 1


ALONE = Split()


def faithful(
    model: torch.nn.Module,
    kept: Mapping[torch.nn.Module, Tensor],
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable[tuple[str, Tensor]],
    split: Split = ALONE,
) -> frozenset[str]:
    """Names of the tensors that the engine serves with the same values as in `tensors`, apart from the dtype.

    `tensors`: the tensors that the engine has just loaded. `shapes`: all their shapes. `kept`: original weights of layers whose own weight
    is a packed copy, which cannot be read (`kept.kept_weights`).
    """
    parameters, packed = _parameters(model, kept)
    names = []
    for name, tensor in tensors:
        place = _find(name, parameters, packed, shapes, split)
        if place is None:
            continue
        served, start, dim = place
        mine = tensor if dim is None else tensor.narrow(dim, start, served.shape[dim])
        if checksum(mine.to(served.device, served.dtype)) == checksum(served):
            names.append(name)
    return frozenset(names)


def compare(
    model: torch.nn.Module,
    kept: Mapping[torch.nn.Module, Tensor],
    written: Mapping[str, Mapping[str, Any]],
    comparable: frozenset[str],
    split: Split = ALONE,
) -> Compared:
    """Compare the served tensors with `written` (by name: `shape`, `dtype`, `sum`).

    Only tensors in `comparable` are compared. Raises ValueError, which names the tensors with other values.
    """
    parameters, packed = _parameters(model, kept)
    shapes = {name: fact["shape"] for name, fact in written.items()}
    left_out: dict[str, tuple[str, float]] = {}
    parts: dict[str, tuple[int, str]] = {}
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    total = sum(sizes.values())
    whole: dict[str, Tensor] = {}
    for name, fact in written.items():
        place = _find(name, parameters, packed, shapes, split)
        why = ""
        if place is None:
            why = "served under another name or shape"
        elif str(place.served.dtype) != f"torch.{fact['dtype']}":
            why = f"cast to {str(place.served.dtype).removeprefix('torch.')}"
        elif name not in comparable:
            why = "rearranged by the engine"
        elif place.dim is None:
            whole[name] = place.served
        elif (part := partial_sum(place.served, fact["shape"], place.start, place.dim)) is None:
            why = "a slice of odd size"
        else:
            parts[name] = (part, fact["sum"])
        if why:
            left_out[name] = (why, sizes[name] / total)
    wrong = [name for name, found in zip(whole, _checksums(list(whole.values())), strict=True) if found != written[name]["sum"]]
    refuse(wrong, len(written))
    return Compared(1 - sum(share for _, share in left_out.values()) if total else 0.0, left_out, parts)


def _checksums(tensors: Sequence[Tensor]) -> list[str]:
    """The checksum of each tensor: in host memory by several threads, because nothing is generated meanwhile."""
    if any(tensor.device.type != "cpu" for tensor in tensors) or sum(tensor.nbytes for tensor in tensors) < files.ALONE:
        return [checksum(tensor) for tensor in tensors]
    with ThreadPoolExecutor(min(files.THREADS, os.cpu_count() or 1), "compare") as pool:  # torch sums without Python's lock
        return list(pool.map(torch.no_grad()(checksum), tensors))


def settle(found: Sequence[Compared]) -> tuple[float, dict[str, float]]:
    """The share of the elements that all workers of an engine compared, and what is left out: names (`*` for the layer's number) and why.

    Raises ValueError as `compare`.
    """
    every = [Compared(*one) for one in found]
    missing: dict[str, tuple[str, float]] = {}
    for one in every:
        missing |= one.left_out
    names = sorted(set().union(*(one.parts for one in every)) - missing.keys())
    whole = {name: every[0].parts[name][1] for name in names}
    refuse([name for name in names if as_checksum(sum(one.parts[name][0] for one in every)) != whole[name]], len(names))
    left_out: dict[str, float] = {}
    for name, (why, share) in missing.items():
        pattern = f"{re.sub(r'[.][0-9]+(?=[.])', '.*', name)} ({why})"
        left_out[pattern] = left_out.get(pattern, 0.0) + share
    some = any(one.share or one.left_out for one in every)
    return (1.0 if some else 0.0) - sum(left_out.values()), left_out


def refuse(wrong: Sequence[str], total: int) -> None:
    """Raise ValueError if there are wrong tensors."""
    if wrong:
        names = ", ".join(wrong[:SHOWN]) + (f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
        raise ValueError(f"the served weights are not those that were trained: {len(wrong)} of {total} tensors differ: {names}")


def _parameters(model: torch.nn.Module, kept: Mapping[torch.nn.Module, Tensor]) -> tuple[dict[str, Tensor], Mapping[str, Sequence[str]]]:
    """All parameters by name, and the mapping of those that hold several of the files' tensors."""
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    parameters |= {f"{name}.weight": kept[module] for name, module in model.named_modules() if module in kept}
    return parameters, getattr(model, "packed_modules_mapping", {})


def _find(
    name: str,
    parameters: Mapping[str, Tensor],
    packed: Mapping[str, Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
    split: Split,
) -> Place | None:
    """The part of a parameter that serves the tensor `name`, or this worker's slice of it; None if it is not found."""
    shape = list(shapes[name])
    whole = parameters.get(name)
    if whole is not None:
        return _vocabulary(whole, shape, split) if name.endswith(VOCABULARY) else _slice(whole, shape, split)
    path, _, leaf = name.rpartition(".")
    layer, _, own = path.rpartition(".")
    for fused, parts in packed.items():
        whole = parameters.get(f"{layer}.{fused}.{leaf}")
        names = [f"{layer}.{part}.{leaf}" for part in parts]
        if own in parts and whole is not None and all(part in shapes for part in names):
            sizes = [shapes[part][0] for part in names]
            if whole.shape[0] * split.ranks != sum(sizes) or any(size % split.ranks for size in sizes):
                return None  # with more workers than key heads, some have the same
            start = sum(sizes[: list(parts).index(own)]) // split.ranks
            return _slice(whole[start : start + shape[0] // split.ranks], shape, split)
    return None


def _slice(served: Tensor, shape: Sequence[int], split: Split) -> Place | None:
    """`served` as a tensor of this shape, or as this worker's slice of one, along the rows or the columns."""
    mine = list(served.shape)
    if mine == list(shape):
        return Place(served, 0, None)
    for dim in range(min(2, len(mine))):
        if [size * (split.ranks if place == dim else 1) for place, size in enumerate(mine)] == list(shape):
            return Place(served, split.rank * served.shape[dim], dim)
    return None


def _vocabulary(served: Tensor, shape: Sequence[int], split: Split) -> Place | None:
    """The same for a table whose rows are padded before they are divided."""
    start = min(split.rank * served.shape[0], shape[0])
    mine = served[: min(served.shape[0], shape[0] - start)]
    if list(served.shape[1:]) != list(shape[1:]) or served.shape[0] * split.ranks < shape[0]:
        return None
    divided = split.ranks > 1 and served.shape[0] < shape[0]
    return Place(mine, start, 0) if divided else Place(served[: shape[0]], 0, None)
