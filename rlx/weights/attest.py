"""The checksum of `sums.py` for torch tensors, the same on every device. It proves that the engine serves what was trained.

The engine computes it on its parameters, on their own device, and compares it with the version's manifest.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from rlx.weights.sums import ROW, STEP, combined

ROWS = 64  # rows per pass on a GPU: the temporary tensors take 32 MiB


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """The odd factor of each place in a row, int64 [ROW]."""
    return torch.arange(ROW, device=device).mul_(STEP - 2**64).bitwise_or_(1)


def _sums_of_rows(words: Tensor) -> list[int]:
    """The sum of each row of `words` [N] times the factors. Integers wrap around, so any order gives the same sum. Fast on a CPU."""
    factors = _factors(words.device)
    return [int(torch.dot(part, factors[: len(part)])) for part in words.split(ROW)]


def _sums_of_blocks(words: Tensor) -> list[int]:
    """The same sums, fast on a GPU, which has no dot product of integer vectors."""
    factors = _factors(words.device)
    rows = len(words) // ROW
    sums = [(block * factors).sum(1) for block in words[: rows * ROW].view(rows, ROW).split(ROWS)]
    tail = words[rows * ROW :]
    return torch.cat([*sums, (tail * factors[: len(tail)]).sum().view(1)]).tolist()


def checksum(tensor: Tensor) -> str:
    """16 hexadecimal digits. They change if a value changes, moves to another place, or has another dtype."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        padded = data.new_zeros(-(-len(data) // 8) * 8)
        padded[: len(data)] = data
        data = padded
    words = data.view(torch.int64)
    return combined(_sums_of_rows(words) if words.device.type == "cpu" else _sums_of_blocks(words))
