"""A checksum of a tensor's values that is the same wherever the tensor lies, so that what is served can be held against what was trained.

The trainer writes one for every tensor of a version into its manifest, from the tensors in its memory; the engine computes them again of
the parameters it serves, on their own device. Knows torch. Knows nothing of engines or files.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

ROW = 1 << 16  # 64-bit words that are summed up at once: half a MB, which stays near the core
ROWS = 64  # rows at a time on a GPU: its temporary tensors take 32 MiB
STEP = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: its multiples are spread over all 64 bits


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """The odd number of every place in a row, int64 [ROW]."""
    return torch.arange(ROW, device=device).mul_(STEP - 2**64).bitwise_or_(1)


def _sums_of_rows(words: Tensor) -> list[int]:
    """The sum of every row of `words` [N] times their factors; integers wrap around, so it is the same in any order. Quick on a CPU."""
    factors = _factors(words.device)
    return [int(torch.dot(part, factors[: len(part)])) for part in words.split(ROW)]


def _sums_of_blocks(words: Tensor) -> list[int]:
    """The same, quick on a GPU, which has no product of integer vectors."""
    factors = _factors(words.device)
    rows = len(words) // ROW
    sums = [(block * factors).sum(1) for block in words[: rows * ROW].view(rows, ROW).split(ROWS)]
    tail = words[rows * ROW :]
    return torch.cat([*sums, (tail * factors[: len(tail)]).sum().view(1)]).tolist()


def checksum(tensor: Tensor) -> str:
    """16 hexadecimal digits: the sum, modulo 2^64, of the tensor's bytes as 64-bit words, each times an odd number that its place gives.

    Values at other places give another sum, so do values of another dtype. It finds what was copied wrongly, not what somebody forged.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        padded = data.new_zeros(-(-len(data) // 8) * 8)
        padded[: len(data)] = data
        data = padded
    words = data.view(torch.int64)
    sums = _sums_of_rows(words) if words.device.type == "cpu" else _sums_of_blocks(words)
    return f"{sum(row * (number * STEP % 2**64 | 1) for number, row in enumerate(sums)) % 2**64:016x}"


def facts(tensor: Tensor) -> dict[str, Any]:
    """What the manifest says of a tensor: `shape`, `dtype` and `sum`."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "sum": checksum(tensor)}
