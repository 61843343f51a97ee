"""Which tokens of a packed row the model computes, and which of them attend to which.

A micro-batch is samples end to end. It can run in these ways, all with the same result:
- `shared`: positions after a sample's last trainable token are left out. Neighbours with a common beginning (the rollouts of one prompt)
  compute it once: a *trunk* with *branches*. This is exact, because a causal model's state depends only on the past.
- `varlen`: without sharing, for torch's FlashAttention with segment boundaries; `mixed`: the same, with long samples by themselves.
- `rows`: one padded row per sample, for models with layers other than attention (a recurrent layer cannot respect boundaries).

Shapes: T tokens of the micro-batch, K tokens computed, S blocks of a bucket.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rlx.models.blocks import TRUNK, Block, Bucket, blocks_of, buckets, to_tensor
from rlx.models.flash import LONG

Kind = Literal["shared", "varlen", "mixed", "rows"]

MIN_SHARED = 3  # shortest common beginning worth a trunk, tokens: the head of a ChatML turn
MIN_SHARE = 1 / 16  # of a sample that the beginning must be, because attention in branches costs more than plain causal attention


@dataclass(frozen=True, slots=True)
class AdapterSpan:
    """Computed tokens `start` … `end` - 1, padding included, belong to the adapter in `slot`."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class VarlenChunk:
    """Computed tokens `start` … `end` - 1: one long sample, or short ones with their boundaries."""

    start: int
    end: int
    cu_seqlens: Tensor | None = None  # [S+1] int32; None: one long sample
    longest: int = 0


@dataclass(slots=True)
class AdapterRouting:
    """The stretches of the row that is computed at the moment. All layers of a model share one; so does a backward that recomputes."""

    stretches: tuple[AdapterSpan, ...] = ()  # empty: as without adapters


@dataclass(slots=True)
class Layout:
    """The plan to run one micro-batch. `token_ids` and `position_ids` are [1, K], or [S, L] for `rows`."""

    token_ids: Tensor
    position_ids: Tensor
    token_index: np.ndarray  # [T] index of each token of the micro-batch in the flattened computed tokens; -1: not computed
    kind: Kind
    buckets: tuple[Bucket, ...] = ()
    order: Tensor | None = None  # [K] index of each computed token's result in the concatenated, flattened outputs of the buckets
    cu_seqlens: Tensor | None = None  # [S+1] int32, `varlen` and `mixed` only
    max_length: int = 0  # longest segment, `varlen` and `mixed` only
    pieces: tuple[VarlenChunk, ...] = ()  # of the computed tokens, in their order, if a sample of a `mixed` row is long
    stretches: tuple[AdapterSpan, ...] = ()  # of the flattened computed tokens, in their order; empty if the model has no slots

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding included."""
        return self.token_ids.numel()


@dataclass(slots=True)
class _Tree:
    """Samples that share their first `trunk` tokens. Each sample is (start in the micro-batch, number of needed tokens)."""

    samples: list[tuple[int, int]]
    trunk: int


def build_layout(
    token_ids: np.ndarray,
    cu_seqlens: np.ndarray,
    loss_mask: np.ndarray,
    kind: Kind,
    device: torch.device | str,
    slots: Sequence[int] | None = None,
) -> Layout:
    """Plan a micro-batch: token_ids [T], cu_seqlens [S+1], loss_mask [T] (True if position t predicts a trainable token).

    `slots` [S]: of a model with several adapters, that of each sample; non-decreasing.
    """
    samples = list(zip(cu_seqlens[:-1].tolist(), _needed(cu_seqlens, loss_mask), strict=True))
    if kind == "rows":
        return _rows(token_ids, samples, device, slots)
    # Samples of two adapters share nothing, not even equal tokens.
    parts = [samples] if slots is None else _by_slot(samples, slots)
    if kind == "shared":
        trees = [tree for part in parts for tree in _trees(token_ids, part)]
    else:
        trees = [_Tree([sample], sample[1]) for sample in samples]
    pieces: list[tuple[int, int, int, int]] = []  # computed: (first in the micro-batch, position, length, branch)
    copies: list[tuple[int, int, int]] = []  # not computed again: (first in the micro-batch, first computed token, length)
    blocks: list[Block] = []
    count = 0
    for tree in trees:
        trunk = (count, tree.trunk)
        pieces.append((tree.samples[0][0], 0, tree.trunk, TRUNK))
        count += tree.trunk
        branches = []
        for number, (start, length) in enumerate(tree.samples):
            if number > 0:
                copies.append((start, trunk[0], min(length, tree.trunk)))
            if length > tree.trunk:
                pieces.append((start + tree.trunk, tree.trunk, length - tree.trunk, number))
                branches.append((count, length - tree.trunk))
                count += length - tree.trunk
        blocks.extend(blocks_of(trunk, branches))
    first, position, lengths, branch = np.array(pieces, dtype=np.int64).T
    rows, positions = _ranges(first, lengths), _ranges(position, lengths)
    where = np.full(len(token_ids), -1, dtype=np.int64)
    where[rows] = np.arange(count)
    if copies:
        copied, computed, each = np.array(copies, dtype=np.int64).T
        where[_ranges(copied, each)] = _ranges(computed, each)
    layout = Layout(
        token_ids=to_tensor(token_ids[rows].astype(np.int64), device)[None],
        position_ids=to_tensor(positions, device)[None],
        token_index=where,
        kind=kind,
    )
    if slots is not None:  # adapters of slots count on all computed tokens
        slot_of = {start: slot for (start, _), slot in zip(samples, slots, strict=True)}
        layout.stretches = _stretches([(slot_of[tree.samples[0][0]], _size(tree)) for tree in trees])
    if kind in ("varlen", "mixed"):
        whole = [length for _, length in samples]
        layout.cu_seqlens, layout.max_length = _bounds(whole, device), max(whole)
        if kind == "mixed" and _is_long(layout.max_length):
            layout.pieces = tuple(_pieces(whole, device))
    else:
        order = np.empty(count, dtype=np.int64)
        layout.buckets = tuple(buckets(blocks, positions, np.repeat(branch, lengths), order, device))
        layout.order = to_tensor(order, device)
    return layout


def _bounds(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)


def _pieces(lengths: Sequence[int], device: torch.device | str) -> Iterator[VarlenChunk]:
    """Every long sample is one, and so are the short ones between two of them."""
    end = 0
    for is_long, some in itertools.groupby(lengths, _is_long):
        group = list(some)
        for together in [[length] for length in group] if is_long else [group]:
            start, end = end, end + sum(together)
            yield VarlenChunk(start, end) if is_long else VarlenChunk(start, end, _bounds(together, device), max(together))


def _is_long(computed: int) -> bool:
    """Whether a sample is computed by itself. Its last token predicts nothing, so of `LONG` tokens one fewer is computed."""
    return computed >= LONG - 1


def _ranges(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Ranges of these `lengths` [n] that begin at `first` [n], end to end."""
    ends = np.cumsum(lengths)
    return np.repeat(first - (ends - lengths), lengths) + np.arange(ends[-1])


def _by_slot(samples: Sequence[tuple[int, int]], slots: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The samples of each slot, in the order of the slots."""
    assert all(one <= other for one, other in pairwise(slots)), "the samples of a row are not ordered by slot"
    return [[sample for sample, slot in zip(samples, slots, strict=True) if slot == each] for each in dict.fromkeys(slots)]


def _size(tree: _Tree) -> int:
    """Tokens that a tree computes."""
    return tree.trunk + sum(max(length - tree.trunk, 0) for _, length in tree.samples)


def _stretches(sizes: Sequence[tuple[int, int]]) -> tuple[AdapterSpan, ...]:
    """One stretch for each slot: `sizes` are (slot, computed tokens) of neighbours."""
    found: list[AdapterSpan] = []
    end = 0
    for slot, size in sizes:
        if found and found[-1].slot == slot:
            found[-1] = AdapterSpan(slot, found[-1].start, end + size)
        else:
            found.append(AdapterSpan(slot, end, end + size))
        end += size
    return tuple(found)


def _needed(cu_seqlens: np.ndarray, loss_mask: np.ndarray) -> list[int]:
    """Number of each sample's tokens up to the last position that predicts a trainable token; at least one."""
    last = np.where(loss_mask, np.arange(1, len(loss_mask) + 1), 0)  # [T] tokens up to here, where a position is trainable
    return np.maximum(np.maximum.reduceat(last, cu_seqlens[:-1]) - cu_seqlens[:-1], 1).tolist()


def _trees(token_ids: np.ndarray, samples: Sequence[tuple[int, int]]) -> Iterator[_Tree]:
    """Runs of neighbours with a common beginning.

    A sample joins the run if that saves at least as many tokens as closing the run, and as beginning a run with its next neighbour.
    """
    commons = _commons(token_ids, samples)
    tree: _Tree | None = None
    for number, (start, length) in enumerate(samples):
        if tree is not None:
            common = min(tree.trunk, commons[number - 1])  # the neighbour before begins with the trunk
            members = len(tree.samples)
            joins = common >= max(MIN_SHARED, MIN_SHARE * length) and members * common >= (members - 1) * tree.trunk
            if joins and number + 1 < len(samples) and common < length:
                joins = 2 * common >= commons[number]
            if joins:
                tree.samples.append((start, length))
                tree.trunk = common
                continue
            yield tree
        tree = _Tree([(start, length)], length)
    if tree is not None:
        yield tree


def _commons(token_ids: np.ndarray, samples: Sequence[tuple[int, int]]) -> list[int]:
    """Length of the common beginning of each sample and the next, each (start, number of tokens)."""
    if len(samples) < 2:
        return []
    start, length = np.array(samples, dtype=np.int64).T
    limit = np.minimum(length[:-1], length[1:])
    offset = _ranges(np.zeros_like(limit), limit)
    differs = token_ids[_ranges(start[:-1], limit)] != token_ids[_ranges(start[1:], limit)]
    until = np.where(differs, offset, np.repeat(limit, limit))
    return np.minimum.reduceat(until, np.cumsum(limit) - limit).tolist()


def _rows(
    token_ids: np.ndarray, samples: Sequence[tuple[int, int]], device: torch.device | str, slots: Sequence[int] | None = None
) -> Layout:
    longest = max(length for _, length in samples)
    rows = np.zeros((len(samples), longest), dtype=np.int64)
    where = np.full(len(token_ids), -1, dtype=np.int64)
    for i, (start, length) in enumerate(samples):
        rows[i, :length] = token_ids[start : start + length]
        where[start : start + length] = np.arange(i * longest, i * longest + length)
    positions = torch.arange(longest, device=device).expand(len(samples), longest)
    stretches = _stretches([(slot, longest) for slot in slots or ()])
    return Layout(token_ids=to_tensor(rows, device), position_ids=positions, token_index=where, kind="rows", stretches=stretches)
