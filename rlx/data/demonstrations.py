"""Which rows of the environments the warm start learns from. Pure.

`rlx.envs.demonstrations` gets conversations from these rows; `rlx.data.masks` makes samples of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def counts_by_weight(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Split `total` in proportion to `weights`. The rounding remainder goes to the largest fractions, ties in order of names."""
    scale = total / sum(weights.values())
    counts = {name: int(weight * scale) for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: (counts[name] - weights[name] * scale, name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def choose(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """`count` rows in random order. How often two rows appear differs by at most one."""
    state = random.Random(seed)
    chosen: list[int] = []
    while len(chosen) < count:
        chosen += state.sample(range(len(rows)), min(len(rows), count - len(chosen)))
    return [rows[i] for i in chosen]
