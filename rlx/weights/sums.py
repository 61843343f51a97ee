"""The checksum of a tensor's bytes, computed without torch. `attest.py` computes the same one with torch, also on a GPU.

It is the sum, modulo 2^64, of the bytes as 64-bit words (zero-padded), each times an odd factor that depends on its place. Integers
wrap around, so the order of the additions does not matter. It detects copying errors, not forgery.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

ROW = 1 << 16  # words per partial sum: half a MB, which fits the cache
STEP = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: its multiples spread over all 64 bits


def combined(rows: Iterable[int]) -> str:
    """16 hexadecimal digits from the rows' sums."""
    return f"{sum(row * (number * STEP % 2**64 | 1) for number, row in enumerate(rows)) % 2**64:016x}"


@functools.cache
def _factors() -> np.ndarray:
    """The odd factor of each place in a row, int64 [ROW]."""
    import numpy as np

    return (np.arange(ROW, dtype=np.int64) * np.int64(STEP - 2**64)) | 1


def sum_of_file(file: IO[bytes], size: int) -> str:
    """The checksum of the next `size` bytes of a file, or of fewer at the end of the file."""
    import numpy as np

    factors, rows = _factors(), []
    row = np.zeros(ROW, np.int64)
    content = row.data.cast("B")
    while size > 0:
        wanted, got = min(size, len(content)), 0
        while got < wanted and (more := file.readinto(content[got:wanted])):  # type: ignore[attr-defined]
            got += more  # a network's file system may give less than was asked for
        if not got:
            break
        content[got : got + -got % 8] = bytes(-got % 8)
        size -= got
        words = -(-got // 8)
        rows.append(int(np.dot(row[:words], factors[:words])))
    return combined(rows)


def sum_of_bytes(content: np.ndarray) -> str:
    """The checksum of an array of bytes, uint8 [n]."""
    factors = _factors()
    return combined(_sum_of_row(content[at : at + 8 * ROW], factors) for at in range(0, len(content), 8 * ROW))


def _sum_of_row(part: np.ndarray, factors: np.ndarray) -> int:
    import numpy as np

    words = part[: len(part) // 8 * 8].view(np.int64)
    total = int(np.dot(words, factors[: len(words)]))
    if rest := len(part) % 8:
        last = np.zeros(8, np.uint8)
        last[:rest] = part[-rest:]
        total += int(last.view(np.int64)[0]) * int(factors[len(words)])
    return total
