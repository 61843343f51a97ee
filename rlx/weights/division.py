"""Which rank writes which file of a policy version, and which tensors are in it.

    units (tensors that stay together)  →  of each writer, about the same number of bytes  →  its files, of at most `SHARD_BYTES` each

Every rank computes the same division, from names and sizes alone. It knows nothing of tensors' values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SHARD_BYTES = 5 * 2**30  # largest safetensors file, unless a unit is larger
LAYER = re.compile(r"^.*?\.\d+(?=\.)")  # of `model.layers.3.mlp.gate.weight`: `model.layers.3`


@dataclass(frozen=True, slots=True)
class Part:
    """A file: `model-00002-of-00003.safetensors`, that rank 8 writes, with the trainer's tensors of these names."""

    file: str
    writer: int
    names: tuple[str, ...]


def divide(units: Sequence[Sequence[str]], sizes: Mapping[str, int], writers: Sequence[int], single: str) -> list[Part]:
    """All files of a version. A version of one file has the name `single`.

    `units`: the trainer's tensors by name, in the model's order; those of a unit get into the same file. `sizes`: their bytes.
    The largest units are given away first, each to the writer with the fewest bytes. So the writers' bytes differ by at most one unit.
    """
    total = [sum(sizes[name] for name in unit) for unit in units]
    loads = dict.fromkeys(writers, 0)
    owners: dict[int, int] = {}
    for number in sorted(range(len(units)), key=lambda number: -total[number]):
        owners[number] = min(writers, key=lambda writer: loads[writer])  # the first of several
        loads[owners[number]] += total[number]
    found: list[tuple[int, list[str]]] = []
    for writer in writers:
        size = SHARD_BYTES + 1  # so that the first unit begins a file
        for number, unit in enumerate(units):
            if owners[number] != writer:
                continue
            if size + total[number] > SHARD_BYTES:
                found.append((writer, []))
                size = 0
            found[-1][1].extend(unit)
            size += total[number]
    names = [single] if len(found) == 1 else [f"model-{number + 1:05d}-of-{len(found):05d}.safetensors" for number in range(len(found))]
    return [Part(name, writer, tuple(tensors)) for name, (writer, tensors) in zip(names, found, strict=True)]


def by_layer(names: Iterable[str]) -> list[list[str]]:
    """Units of whole layers; a tensor of no layer is a unit of its own."""
    units: dict[str, list[str]] = {}
    for name in names:
        found = LAYER.match(name)
        units.setdefault(found[0] if found else name, []).append(name)
    return list(units.values())
