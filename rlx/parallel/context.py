"""Context parallelism (DeepSpeed-Ulysses, arXiv 2309.14509): the ranks of a context group compute each packed row together.

    layers               a rank has an equal piece of the row's tokens, and all heads
    attention            a rank has all tokens, and an equal part of the heads; one exchange leads there, another back
    log-probabilities    a rank scores the trained tokens of its own piece; then every rank of the group has all of them

Attention sees whole rows, so segment boundaries, shared prompts, sliding windows and softcaps need nothing special. Every rank of a group
computes the same loss from the same log-probabilities, and gradients flow back only into its own piece. Summed over all ranks, each
token's gradient counts once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd


@dataclass(frozen=True, slots=True)
class Context:
    """A rank's place in its context group. Shapes: K tokens of a row, n of a piece, c ranks of the group."""

    group: dist.ProcessGroup
    rank: int
    size: int  # c

    def piece(self, row: Tensor) -> Tensor:
        """row [1, K] → this rank's piece [1, n]. Zeros fill the last pieces."""
        length = self._length(row.shape[1])
        return F.pad(row, (0, length * self.size - row.shape[1]))[:, self.rank * length : (self.rank + 1) * length]

    def own(self, index: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """index [N] into a row of `tokens` → (which of the N lie in this rank's piece [m], their places in the piece [m])."""
        length = self._length(tokens)
        which = (index // length == self.rank).nonzero()[:, 0]
        return which, index[which] - self.rank * length

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's piece with all heads, [1, heads, n, d] each, → all tokens with its part of the heads, [1, heads / c, K, d].

        Key and value heads are repeated if c does not divide their number. Raises ValueError if c does not divide the query heads.
        """
        if query.shape[1] % self.size:
            raise ValueError(
                f"trainer.cp={self.size} does not divide the {query.shape[1]} query heads of a layer; set trainer.cp to a divisor of them"
            )
        repeats = math.lcm(key.shape[1], self.size) // key.shape[1]
        parts = [query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)] if repeats > 1 else [query, key, value]
        # For rank r of the group: its block of heads, of this rank's tokens.
        blocks = [part[0].unflatten(0, (self.size, -1)).transpose(1, 2).flatten(2) for part in parts]  # [c, n, heads / c · d]
        row = self._exchange(torch.cat(blocks, -1)).flatten(0, 1)[:tokens]
        widths = [block.shape[-1] for block in blocks]
        query, key, value = (
            whole.unflatten(1, (-1, part.shape[-1])).transpose(0, 1)[None] for whole, part in zip(row.split(widths, -1), parts, strict=True)
        )
        return query, key, value

    def to_piece(self, attended: Tensor) -> Tensor:
        """All tokens with this rank's part of the heads, [1, K, heads / c, d], → its piece with all heads, [1, n, heads, d]."""
        _, tokens, heads, width = attended.shape
        length = self._length(tokens)
        padded = F.pad(attended[0].flatten(1), (0, 0, 0, length * self.size - tokens))
        received = self._exchange(padded.unflatten(0, (self.size, length)))  # [c, n, heads / c · d]
        return received.transpose(0, 1).reshape(1, length, self.size * heads, width)

    def part_of_heads(self, per_head: Tensor) -> Tensor:
        """[heads] → this rank's part [heads / c]."""
        return per_head.chunk(self.size)[self.rank]

    def everyone(self, values: Sequence[Tensor], which: Tensor, count: int) -> tuple[Tensor, ...]:
        """What each rank computed for its own tokens, [m] each at the places `which`, → all of it on every rank, [count] each.

        In backward a rank keeps the gradient of its own values, because every rank of the group has the whole gradient.
        """
        return tuple(_Everyone.apply(torch.stack(tuple(values)), which, count, self.group).unbind())

    def _length(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def _exchange(self, blocks: Tensor) -> Tensor:
        """[c, …]: block r goes to rank r of the group, and block s of the result came from rank s."""
        return all_to_all_single_autograd(blocks.contiguous(), None, None, self.group)


class _Everyone(torch.autograd.Function):
    """[k, m] of each rank → [k, count]. Each place is filled by one rank, so the sum is exact."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, which: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(which)
        whole = values.new_zeros(len(values), count).index_copy_(1, which, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (which,) = ctx.saved_tensors
        return gradients[0].index_select(1, which), None, None, None
