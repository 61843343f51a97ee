"""Attention of a packed row in blocks: tokens that attend together, in batches of blocks of similar size.

A sample by itself is one block with plain causal attention. A trunk with short branches is one block with a mask; long branches attend to
their trunk in blocks of their own.

Shapes: K tokens computed, S blocks of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

TREE_TOKENS = 64  # a trunk and its branches form one attention block up to this many tokens in total
BRANCH_TOKENS = 32  # branches attend in one block up to this many tokens: fewer, larger products
FILL = 0.75  # a block joins a bucket if it fills at least this share of both sides; the rest is padding
SLACK = 4  # a block may always be this many tokens shorter

TRUNK = -1  # branch number of a trunk's tokens
PADDING = -2  # branch number of padded keys


@dataclass(slots=True)
class Bucket:
    """Attention blocks of similar size, padded to one batch."""

    queries: Tensor  # [S, Q] int64 positions in the computed row, padded by repeating the last
    keys: Tensor  # [S, L] int64, padded in the same way
    mask: Tensor | None  # [S, 1, Q, L] bool, True where the query sees the key; None: plain causal with Q = L
    query_positions: Tensor  # [S or 1, Q] int32
    key_positions: Tensor  # [S or 1, L] int32
    longest: int  # largest distance of a query from a key, + 1
    _windows: dict[int, Tensor] = field(default_factory=dict)

    def visible(self, window: int | None) -> Tensor | None:
        """The mask for a layer that sees only the last `window` tokens; None: plain causal."""
        if window is None or self.longest <= window:
            return self.mask
        if window not in self._windows:
            self._windows[window] = self.causal() & (self._distance() < window)[:, None]
        return self._windows[window]

    def causal(self) -> Tensor:
        """The mask as a tensor, also for plain causal attention."""
        return (self._distance() >= 0)[:, None] if self.mask is None else self.mask

    def _distance(self) -> Tensor:
        """[S or 1, Q, L] of each query from each key. Plain causal attention does without: of 16k tokens alone this would take 1 GiB."""
        return self.query_positions[:, :, None] - self.key_positions[:, None, :]


@dataclass(slots=True)
class Block:
    """Computed tokens that attend together. Each range is (first, length); keys are those `before`, then the queries."""

    queries: tuple[int, int]
    before: tuple[int, int]  # the trunk, if it attends in a block of its own
    plain: bool  # one sequence with a plain causal mask

    @property
    def size(self) -> tuple[int, int]:
        """Number of queries and of keys."""
        return self.queries[1], self.before[1] + self.queries[1]


def blocks_of(trunk: tuple[int, int], branches: list[tuple[int, int]]) -> Iterator[Block]:
    """The blocks of a tree. Its branches lie behind its trunk, end to end."""
    alone = (trunk[0], 0)  # no keys before the queries
    if not branches:
        yield Block(trunk, alone, True)
        return
    whole = trunk[1] + sum(length for _, length in branches)
    if whole <= TREE_TOKENS:
        yield Block((trunk[0], whole), alone, False)
        return
    yield Block(trunk, alone, True)
    first, together = branches[0][0], 0
    for start, length in branches:
        if together and together + length > BRANCH_TOKENS:
            yield Block((first, together), trunk, False)
            first, together = start, 0
        together += length
    yield Block((first, together), trunk, False)


def buckets(
    blocks: Sequence[Block], positions: np.ndarray, branch: np.ndarray, order: np.ndarray, device: torch.device | str
) -> Iterator[Bucket]:
    """Group blocks of similar size and pad them. `positions` and `branch` are [K]. Fills `order` [K] as a side effect."""
    done = 0
    for plain in (True, False):
        for group in _grouped([block for block in blocks if block.plain == plain]):
            q, k = (max(sizes) for sizes in zip(*(block.size for block in group), strict=True))
            yield _bucket(group, q, k, done, positions, branch, order, device)
            done += len(group) * q


def _grouped(blocks: Sequence[Block]) -> list[list[Block]]:
    todo, groups = sorted(blocks, key=lambda block: block.size, reverse=True), []
    while todo:
        q, k = todo[0].size
        take: list[Block] = []
        rest: list[Block] = []
        for block in todo:
            queries, keys = block.size
            fits = queries >= FILL * q - SLACK and FILL * k - SLACK <= keys <= k
            (take if fits else rest).append(block)
        groups.append(take)
        todo = rest
    return groups


def _bucket(
    blocks: Sequence[Block],
    q: int,
    k: int,
    done: int,
    positions: np.ndarray,
    branch: np.ndarray,
    order: np.ndarray,
    device: torch.device | str,
) -> Bucket:
    """Pad blocks to q queries and k keys each. `done`: rows of the buckets before."""
    first, queried = np.array([block.queries for block in blocks], dtype=np.int64).T[:, :, None]  # [S, 1] each
    trunk, led = np.array([block.before for block in blocks], dtype=np.int64).T[:, :, None]
    place, at = np.arange(q)[None], np.arange(k)[None]
    real = place < queried
    queries = first + np.minimum(place, queried - 1)
    behind = np.minimum(at, led + queried - 1)
    keys = np.where(behind < led, trunk + behind, first + behind - led)
    order[queries[real]] = done + np.flatnonzero(real)
    if blocks[0].plain:  # by index, not by position, so that padded keys lie in the future of every real query
        query_positions, key_positions, mask, longest = place, at, None, q
    else:
        query_positions, key_positions = positions[queries], positions[keys]
        distance = query_positions[:, :, None] - key_positions[:, None, :]
        longest = int(distance.max()) + 1
        key_branch, query_branch = np.where(at < led + queried, branch[keys], PADDING), branch[queries]
        same = (key_branch[:, None, :] == query_branch[:, :, None]) | (key_branch[:, None, :] == TRUNK)
        mask = to_tensor((same & (distance >= 0))[:, None], device)
    return Bucket(
        queries=to_tensor(queries, device),
        keys=to_tensor(keys, device),
        mask=mask,
        query_positions=to_tensor(query_positions.astype(np.int32), device),
        key_positions=to_tensor(key_positions.astype(np.int32), device),
        longest=longest,
    )


def to_tensor(array: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(array).to(device)
