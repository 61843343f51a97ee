"""Attention of a packed row in blocks: tokens that attend together, in batches of blocks of similar size.

A sample by itself is one block with plain causal attention. A trunk with short branches is one block with a mask; long branches attend to
their trunk in blocks of their own. The number of these batches depends on the row. A layer is compiled for one number, so rows of compiled
layers have a fixed one: batches that cost little together are merged, and empty ones fill up.

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
PLAIN, MASKED = 2, 6  # buckets of each form if their number is fixed; more of them need less padding, and larger graphs
LONE = 1024  # tokens of a block that may be alone in its bucket then: an empty one beside it would cost as much
EXCEEDED = 2**31  # tokens: more than any window

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
    _summands: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def visible(self, window: int | None) -> Tensor | None:
        """The mask for a layer that sees only the last `window` tokens; None: plain causal."""
        if window is None or self.longest <= window:
            return self.mask
        if window not in self._windows:
            self._windows[window] = self.causal() & (self._distance() < window)[:, None]
        return self._windows[window]

    def summand(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """`visible` as attention on a CPU adds it to the scores: 0, or -inf where a key is hidden. All layers share it."""
        visible = self.visible(window)
        if visible is None:
            return None
        key = (window, dtype)
        if key not in self._summands:
            self._summands[key] = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
        return self._summands[key]

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
    blocks: Sequence[Block], positions: np.ndarray, branch: np.ndarray, order: np.ndarray, device: torch.device | str, *, fixed: bool
) -> Iterator[Bucket]:
    """Group blocks of similar size and pad them. `positions` and `branch` are [K]. Fills `order` [K] as a side effect.

    `fixed`: always `PLAIN` and `MASKED` buckets. No size is 1, for which torch would compile anew: at least two tokens, and two blocks
    unless one is long.
    """
    done = 0
    for plain in (True, False):
        groups = _grouped([block for block in blocks if block.plain == plain])
        if fixed:
            most = PLAIN if plain else MASKED
            groups = _merged(groups, most) + [[] for _ in range(most - len(groups))]
        for group in groups:
            q, k = _widest(group, 2 if fixed else 1)
            if fixed and q < LONE:  # the first token again, which sees only itself, so that its result is the same in every block
                group += [Block((0, 1), (0, 0), plain)] * (2 - len(group))
            yield _bucket(group, q, k, done, positions, branch, order, device, masked=fixed)
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


def _merged(groups: list[list[Block]], most: int) -> list[list[Block]]:
    """At most `most` groups, widest first: two become one as long as there are more, each time those whose padding costs least.

    The cost is in pairs of a query and a key. A row of 64k tokens may have a hundred groups, so all pairs of groups are compared at once.
    """
    groups = [list(group) for group in groups]
    count = np.array([len(group) for group in groups], dtype=np.float64)
    q, k = np.array([_widest(group) for group in groups], dtype=np.float64).reshape(-1, 2).T
    while len(groups) > most:
        alone = count * q * k
        together = (count[:, None] + count) * np.maximum(q[:, None], q) * np.maximum(k[:, None], k)
        cost = together - alone[:, None] - alone
        cost[np.tril_indices(len(groups))] = np.inf
        one, other = divmod(int(cost.argmin()), len(groups))
        groups[one] += groups.pop(other)
        count[one] += count[other]
        q[one], k[one] = max(q[one], q[other]), max(k[one], k[other])
        count, q, k = (np.delete(values, other) for values in (count, q, k))
    return sorted(groups, key=_widest, reverse=True)


def _widest(group: Sequence[Block], least: int = 1) -> tuple[int, int]:
    """Queries and keys to which the blocks of a group are padded."""
    queries, keys = zip(*(block.size for block in group), strict=True) if group else ((), ())
    return max([least, *queries]), max([least, *keys])


def _bucket(
    blocks: Sequence[Block],
    q: int,
    k: int,
    done: int,
    positions: np.ndarray,
    branch: np.ndarray,
    order: np.ndarray,
    device: torch.device | str,
    *,
    masked: bool,
) -> Bucket:
    """Pad blocks to q queries and k keys each. `done`: rows of the buckets before.

    `masked`: layers with a window always mask, whether a row exceeds it or not. That takes a mask of all pairs also of a long sample.
    """
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
        longest=EXCEEDED if masked else longest,
    )


def to_tensor(array: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(array).to(device)
