"""Writes tensors as a safetensors file, while a second thread computes their checksums.

safetensors' own `save_file` takes four times the processor time (0.70 s against 0.16 s for 538 MB on ext4), because it writes through a
memory map. The format is simple: the length of the header, the header as JSON, the values.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from rlx.weights.sums import sum_of_bytes

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
}  # fmt: skip
ALIGNMENT = 8  # bytes: where the values begin


def save(tensors: Mapping[str, torch.Tensor], path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write contiguous tensors in host memory to a file, in place of what it holds.

    Returns what a manifest says of the file (`size`, and `header` with its `size` and `xxh3`) and of each tensor (`facts`).
    Raises OSError if the disk is full, ValueError for a dtype that the format does not have.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # so every value lies at a multiple of its size
    start = _header(tensors, names)
    with path.open("r+b" if path.exists() else "wb", buffering=0) as file, ThreadPoolExecutor(1, "sums") as pool:
        sums = {name: pool.submit(facts, tensors[name]) for name in names}  # numpy sums without Python's lock

        def write(part: Any) -> None:
            rest = memoryview(part)
            while rest:
                rest = rest[file.write(rest) :]

        write(start)
        for name in names:
            write(_bytes(tensors[name]))
        size = file.tell()
        file.truncate()
        found = {name: fact.result() for name, fact in sums.items()}
    return {"size": size, "header": {"size": len(start), "xxh3": xxhash.xxh3_64_hexdigest(start)}}, found


def facts(tensor: torch.Tensor) -> dict[str, Any]:
    """The manifest's entry for a tensor in host memory: `shape`, `dtype` and `sum`."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "sum": sum_of_bytes(_bytes(tensor))}


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor in host memory, uint8 [n]: without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def _header(tensors: Mapping[str, torch.Tensor], names: list[str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in CODES:
            raise ValueError(f"safetensors has no {tensor.dtype}, which {name} has")
        begin, end = end, end + tensor.numel() * tensor.itemsize
        entries[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
