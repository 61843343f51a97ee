"""Checks whether the parameters that vLLM serves are those that the trainer wrote.

It finds each tensor of a version in the engine's parameters. vLLM keeps several tensors in one parameter (`qkv_proj`, `gate_up_proj`),
pads vocabularies, and gives each worker of a tensor-parallel engine a slice. The workers' partial checksums add up to that of the whole
tensor (`settle`). Tensors that vLLM renames, casts or rearranges are left out; the result names them with their share. Some models' loaders
rearrange values but keep name and shape. So `faithful` finds, in the model that vLLM itself loaded, the tensors whose served values equal
those in their file.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlx.weights import files
from rlx.weights.attest import as_checksum, checksum, partial_sum

ROWS = "org_vocab_size"  # attribute of vLLM's embeddings and heads, whose weights may have more rows than tokens
EXPERT = re.compile(r"(.+\.experts)\.([0-9]+)\.(\w+)\.weight")  # a matrix of one expert: the layer's experts, its number, which matrix
STACKS = {  # which matrix of an expert is in which stack of all experts, and in which half of the stack's rows
    "gate_proj": ("w13", 0), "up_proj": ("w13", 1), "down_proj": ("w2", None),
    "w1": ("w13", 0), "w3": ("w13", 1), "w2": ("w2", None),
}  # fmt: skip
FUSED = {"gate_up_proj": "w13", "down_proj": "w2"}  # checkpoints that stack the experts themselves
BATCH = 64  # tensors that the threads of `faithful` have at a time
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
    """A worker of a tensor-parallel engine, and which of the data-parallel engines of its server that is."""

    rank: int = 0
    ranks: int = 1
    engine: int = 0
    engines: int = 1

    @property
    def of_experts(self) -> Split:
        """Whose slice of each expert's matrices this worker has: all workers of all engines divide them, and nothing else."""
        return Split(self.engine * self.ranks + self.rank, self.engines * self.ranks)


ALONE = Split()


def faithful(
    model: torch.nn.Module,
    kept: Mapping[torch.nn.Module, Tensor],
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable[tuple[str, Tensor]],
    split: Split = ALONE,
) -> dict[str, dict[str, Any]]:
    """The tensors that the engine serves with the same values as in `tensors`, apart from the dtype: by name, as served (`compare`).

    `tensors`: the tensors that the engine has just loaded. `shapes`: all their shapes. `kept`: original weights of layers whose own weight
    is a packed copy, which cannot be read (`kept.kept_weights`). The sums are those of whole tensors, also for a worker that has a slice.
    A tensor of equal values, as a new model's biases, is the same in any order. It counts only if no other tensor of its module has moved.
    """
    engine = Engine.of(model, kept, shapes, split)

    uniform: set[str] = set()

    def same(entry: tuple[str, Tensor]) -> tuple[str, dict[str, Any]] | None:
        name, tensor = entry
        if _uniform(tensor):
            uniform.add(name)
        place = engine.find(name)
        if place is None:
            return None
        served, start, dim = place
        mine = tensor if dim is None else tensor.narrow(dim, start, served.shape[dim])
        found = checksum(mine.to(served.device, served.dtype))
        if found != checksum(served):
            return None
        # A worker's slice lies on its GPU, which may have no room for the whole tensor.
        whole = found if dim is None else checksum(tensor.to(served.dtype))
        return name, {"shape": list(tensor.shape), "dtype": str(served.dtype).removeprefix("torch."), "sum": whole}

    found = dict(one for one in each(same, tensors, _host_bytes(engine.parameters.values())) if one is not None)
    moved = {name.rpartition(".")[0] for name in shapes if name not in found}
    return {name: fact for name, fact in found.items() if name not in uniform or name.rpartition(".")[0] not in moved}


def _uniform(tensor: Tensor) -> bool:
    """Whether all values are equal."""
    flat = tensor.reshape(-1)
    return len(flat) > 1 and bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all())


def places(
    model: torch.nn.Module,
    kept: Mapping[torch.nn.Module, Tensor],
    shapes: Mapping[str, Sequence[int]],
    comparable: Collection[str],
    split: Split = ALONE,
) -> dict[str, Place]:
    """Where the `comparable` tensors are served. A writer of their values need not know how vLLM loads them."""
    engine = Engine.of(model, kept, shapes, split)
    found = {name: engine.find(name) for name in comparable}
    return {name: place for name, place in found.items() if place is not None}


def compare(
    model: torch.nn.Module,
    kept: Mapping[torch.nn.Module, Tensor],
    written: Mapping[str, Mapping[str, Any]],
    comparable: Collection[str],
    split: Split = ALONE,
    summed: Mapping[str, str] = MappingProxyType({}),
) -> Compared:
    """Compare the served tensors with `written` (by name: `shape`, `dtype`, `sum`).

    Only tensors in `comparable` are compared. `summed`: checksums that this update has computed already, of tensors where they are served.
    Shares are of all elements that were written, and of those that the engine has beside them.
    Raises ValueError, which names the tensors with other values.
    """
    if not written:
        return Compared(0.0, {}, {})
    engine = Engine.of(model, kept, {name: fact["shape"] for name, fact in written.items()}, split)
    left_out: dict[str, tuple[str, float]] = {}
    parts: dict[str, tuple[int, str]] = {}
    sizes = {name: torch.Size(fact["shape"]).numel() for name, fact in written.items()}
    places = {name: engine.find(name) for name in written}
    beside = engine.unclaimed([place for place in places.values() if place is not None])
    total = sum(sizes.values()) + sum(beside.values())
    whole: dict[str, Tensor] = {}
    for name, fact in written.items():
        place = places[name]
        why = ""
        if place is None:
            why = "served under another name or shape"
        elif name not in comparable:
            why = "rearranged by the engine"
        elif str(place.served.dtype) != f"torch.{fact['dtype']}":
            why = f"cast to {str(place.served.dtype).removeprefix('torch.')}"
        elif place.dim is None:
            whole[name] = place.served
        elif (part := partial_sum(place.served, fact["shape"], place.start, place.dim)) is None:
            why = "a slice of odd size"
        else:
            parts[name] = (part, fact["sum"])
        if why:
            left_out[name] = (why, sizes[name] / total)
    left_out |= {name: ("not among the trained tensors", size / total) for name, size in beside.items()}
    left = [name for name in whole if name not in summed]
    sums = {**summed, **dict(zip(left, _checksums([whole[name] for name in left]), strict=True))}
    wrong = [name for name in whole if sums[name] != written[name]["sum"]]
    refuse(wrong, len(written))
    return Compared(1 - sum(share for _, share in left_out.values()) if total else 0.0, left_out, parts)


def each(function: Callable[[Any], Any], entries: Iterable[Any], size: int) -> Iterator[Any]:
    """`function` of each entry, in order: by several threads if there are many bytes in host memory (`size`)."""
    if size < files.ALONE:
        yield from map(function, entries)
        return
    entries = iter(entries)
    with ThreadPoolExecutor(min(files.THREADS, os.cpu_count() or 1), "compare") as pool:  # torch sums without Python's lock
        while batch := list(itertools.islice(entries, BATCH)):
            yield from pool.map(torch.no_grad()(function), batch)


def _host_bytes(tensors: Iterable[Tensor]) -> int:
    tensors = list(tensors)
    return 0 if any(tensor.device.type != "cpu" for tensor in tensors) else sum(tensor.nbytes for tensor in tensors)


def _checksums(tensors: Sequence[Tensor]) -> list[str]:
    """The checksum of each tensor: in host memory by several threads, because nothing is generated meanwhile."""
    return list(each(checksum, tensors, _host_bytes(tensors)))


def settle(found: Sequence[Compared], engines: int = 1) -> tuple[float, dict[str, float]]:
    """The share of the elements that all workers of a server compared, and what is left out: names (`*` for the layer's number) and why.

    `found`: what each worker found, engine by engine. The workers of each engine have the slices of a tensor, those of all engines together
    the slices of an expert's. Raises ValueError as `compare`.
    """
    every = [Compared(*one) for one in found]
    workers = len(every) // engines
    alike = [every[start : start + workers] for start in range(0, len(every), workers)]
    missing: dict[str, tuple[str, float]] = {}
    for one in every:
        missing |= one.left_out
    names = sorted(set().union(*(one.parts for one in every)) - missing.keys())
    whole = {name: every[0].parts[name][1] for name in names}

    def differs(name: str) -> bool:
        groups = [every] if EXPERT.fullmatch(name) else alike
        return any(as_checksum(sum(one.parts[name][0] for one in group)) != whole[name] for group in groups)

    refuse([name for name in names if differs(name)], len(names))
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


class Engine(NamedTuple):
    """The parameters of one worker, and how vLLM names and joins the tensors of the files."""

    parameters: Mapping[str, Tensor]
    vocabularies: Collection[str]  # those that may have more rows than tokens
    packed: Mapping[str, Sequence[str]]  # names of those that hold several tensors → names of the tensors
    names: Mapping[str, str]  # of the files' tensors → as vLLM renames them
    shapes: Mapping[str, Sequence[int]]  # of the files' tensors, by the new names
    split: Split

    @classmethod
    def of(
        cls, model: torch.nn.Module, kept: Mapping[torch.nn.Module, Tensor], shapes: Mapping[str, Sequence[int]], split: Split
    ) -> Engine:
        parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        parameters |= {f"{name}.weight": kept[module] for name, module in model.named_modules() if module in kept}
        vocabularies = {f"{name}.weight" for name, module in model.named_modules(remove_duplicate=False) if hasattr(module, ROWS)}
        names: dict[str, str] = {}
        if (table := getattr(model, "hf_to_vllm_mapper", None)) is not None:
            table = dataclasses.replace(table, orig_to_new_stacked={})  # joined tensors are found by their own names
            for name in shapes:
                (names[name],) = table.apply_list([name]) or (name,)  # the table drops some
        return cls(
            parameters,
            vocabularies,
            getattr(model, "packed_modules_mapping", {}),
            names,
            {names.get(name, name): shape for name, shape in shapes.items()},
            split,
        )

    def find(self, name: str) -> Place | None:
        """The part of a parameter that serves the tensor `name`, or this worker's slice of it; None if it is not found."""
        name = self.names.get(name, name)
        shape = list(self.shapes[name])
        whole = self.parameters.get(name)
        if whole is not None:
            return _vocabulary(whole, shape, self.split) if name in self.vocabularies else _slice(whole, shape, self.split)
        path, _, leaf = name.rpartition(".")
        layer, _, own = path.rpartition(".")
        for fused, parts in self.packed.items():
            whole = self.parameters.get(f"{layer}.{fused}.{leaf}")
            names = [f"{layer}.{part}.{leaf}" for part in parts]
            if own in parts and whole is not None and all(part in self.shapes for part in names):
                sizes = [self.shapes[part][0] for part in names]
                if whole.shape[0] * self.split.ranks != sum(sizes) or any(size % self.split.ranks for size in sizes):
                    return None  # with more workers than key heads, some have the same
                start = sum(sizes[: list(parts).index(own)]) // self.split.ranks
                return _slice(whole[start : start + shape[0] // self.split.ranks], shape, self.split)
        return self._expert(name, shape)

    def _expert(self, name: str, shape: Sequence[int]) -> Place | None:
        """The same for a matrix of an expert, in the stack of all experts of its layer.

        Not if this worker has some of the experts alone (expert parallelism).
        """
        found = EXPERT.fullmatch(name)
        if found is None:
            path, _, own = name.rpartition(".")
            stack = self._stack(path, FUSED.get(own, "")) if path.endswith(".experts") else None
            return _slice(stack, shape, ALONE) if stack is not None else None
        path, number, own = found[1], int(found[2]), found[3]
        kind, half = STACKS.get(own, ("", None))
        stack = self._stack(path, kind)
        if stack is None or number >= len(stack) or f"{path}.{len(stack)}.{own}.weight" in self.shapes:
            return None
        mine = stack[number]
        if half is not None:
            mine = mine.tensor_split(2)[half]
        return _slice(mine, shape, self.split.of_experts)

    def _stack(self, experts: str, kind: str) -> Tensor | None:
        """[experts, rows, columns]; vLLM keeps it in the layer `experts` or in one inside it."""
        names = (f"{experts}.{kind}_weight", f"{experts}.routed_experts.{kind}_weight")
        return next((self.parameters[name] for name in names if name in self.parameters), None)

    def unclaimed(self, places: Iterable[Place]) -> dict[str, int]:
        """Elements of each parameter that none of the files' tensors fills, in all workers together if each has a slice.

        Padding of a vocabulary does not count. Nor does a parameter whose tensor is known but has another shape.
        """
        claimed: Counter[int] = Counter()
        for place in places:
            claimed[storage(place.served)] += place.served.numel()
        rest: dict[str, int] = {}
        seen = set()
        for name, parameter in self.parameters.items():
            where = storage(parameter)
            if where in seen or not parameter.numel():
                continue
            seen.add(where)
            path, _, leaf = name.rpartition(".")
            layer, _, own = path.rpartition(".")
            parts = [f"{layer}.{part}.{leaf}" for part in self.packed.get(own, ())]
            padded = claimed[where] and name in self.vocabularies
            known = name in self.shapes or (parts and all(part in self.shapes for part in parts))
            if not padded and not known and (left := parameter.numel() - claimed[where]) > 0:
                rest[name] = left * self.split.ranks
        return rest


def storage(tensor: Tensor) -> int:
    """Which memory it lies in."""
    return tensor.untyped_storage().data_ptr()


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
