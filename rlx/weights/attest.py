"""The checksum of `sums.py` for torch tensors, the same on every device. It proves that the engine serves what was trained.

The engine computes it on its parameters, on their own device, and compares it with the version's manifest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlx.weights.sums import ROW, STEP, combined

ROWS = 64  # rows per pass on a GPU: the temporary tensors take 32 MiB
PART = 1 << 20  # words per pass over a part of a tensor


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """The odd factor of each place in a row, int64 [ROW]."""
    return torch.arange(ROW, device=device).mul_(STEP - 2**64).bitwise_or_(1)


def _sums_of_rows(words: Tensor) -> list[int]:
    """The sum of each row of `words` [N] times the factors. Integers wrap around, so any order gives the same sum. Fast on a CPU."""
    factors = _factors(words.device)
    return [int(torch.dot(part, factors[: len(part)])) for part in words.split(ROW)]


def _sums_of_blocks(words: Tensor) -> Tensor:
    """The same sums, int64 [rows], fast on a GPU, which has no dot product of integer vectors. The CPU does not wait for them."""
    factors = _factors(words.device)
    rows = len(words) // ROW
    sums = [(block * factors).sum(1) for block in words[: rows * ROW].view(rows, ROW).split(ROWS)]
    tail = words[rows * ROW :]
    return torch.cat([*sums, (tail * factors[: len(tail)]).sum().view(1)])


def checksum(tensor: Tensor) -> str:
    """16 hexadecimal digits. They change if a value changes, moves to another place, or has another dtype."""
    return begun(tensor)()


def begun(tensor: Tensor) -> Callable[[], str]:
    """Begin the checksum of a tensor. What is returned waits for it. Until then a GPU computes beside the CPU."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        padded = data.new_zeros(-(-len(data) // 8) * 8)
        padded[: len(data)] = data
        data = padded
    words = data.view(torch.int64)
    if words.device.type == "cpu":
        return functools.partial(combined, _sums_of_rows(words))
    sums = _sums_of_blocks(words)
    return lambda: combined(sums.tolist())


def copied(source: Tensor, target: Tensor) -> str:
    """Copy `source` to `target`, of the same dtype and shape. Returns the checksum of what `target` holds then.

    In host memory each row is summed just after it was copied, while the processor's cache has it.
    """
    aligned = target.is_contiguous() and target.nbytes % 8 == 0 and target.data_ptr() % 8 == 0 and source.is_contiguous()
    if target.device.type != "cpu" or source.dtype != target.dtype or source.shape != target.shape or not aligned:
        return checksum(target.copy_(source))
    bytes_in, bytes_out = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (source, target))
    factors, sums = _factors(target.device), []
    for begin in range(0, len(bytes_out), 8 * ROW):
        row = bytes_out[begin : begin + 8 * ROW].copy_(bytes_in[begin : begin + 8 * ROW]).view(torch.int64)
        sums.append(int(torch.dot(row, factors[: len(row)])))
    return combined(sums)


def partial_sum(part: Tensor, whole: Sequence[int], start: int, dim: int) -> int | None:
    """What a part of a tensor adds to the checksum of the whole one: the parts' sums, modulo 2^64, are its checksum (`as_checksum`).

    `part` is the slice of a tensor of the shape `whole` that begins at `start` in the dimension `dim` (0 or 1). Returns None if it does not
    begin and end at multiples of 8 bytes (`has_sum`).
    """
    if not part.numel():  # of a worker whose slice is padding alone
        return 0
    if not has_sum(part, whole, start, dim):
        return None
    words, first = (size // 8 for size in _bytes(part, whole, start, dim)[:2])
    first_row = start if len(whole) > 1 and dim == 0 else 0
    data = part.detach().contiguous().reshape(part.shape[0] if len(whole) > 1 else 1, -1).view(torch.uint8)
    total = 0
    places = first + torch.arange(data.shape[1] // 8, device=data.device)
    for number, block in enumerate(data.view(torch.int64).split(step := max(1, PART // max(1, len(places))))):
        row = first_row + number * step + torch.arange(len(block), device=data.device)
        word = row[:, None] * words + places
        total += int((block * _factor(word % ROW) * _factor(word // ROW)).sum())
    return total % 2**64


def has_sum(part: Tensor, whole: Sequence[int], start: int, dim: int) -> bool:
    """Whether `partial_sum` can sum such a part."""
    return not part.numel() or not any(size % 8 for size in _bytes(part, whole, start, dim))


def _bytes(part: Tensor, whole: Sequence[int], start: int, dim: int) -> tuple[int, int, int]:
    """Of a row of the whole tensor, before the part in its rows, and of a row of the part."""
    rows, mine = (whole[0], part.shape[0]) if len(whole) > 1 else (1, 1)
    inner = torch.Size(whole[2:]).numel() if dim == 1 else 1
    before = start * inner if len(whole) == 1 or dim == 1 else 0
    row = torch.Size(whole).numel() // max(rows, 1)
    return row * part.itemsize, before * part.itemsize, part.numel() // mine * part.itemsize


def as_checksum(total: int) -> str:
    """The checksum of a tensor whose partial sums add up to `total`."""
    return f"{total % 2**64:016x}"


def _factor(places: Tensor) -> Tensor:
    return places.mul(STEP - 2**64).bitwise_or_(1)
