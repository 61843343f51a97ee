"""The ranks that compute each packed row together, by tensor parallelism (`trainer.tp`) inside of context parallelism (`trainer.cp`).

    everywhere           a rank has an equal piece of the row's tokens: embedding, norms, experts, head
    divided layers       the ranks of a tensor group (neighbours) gather their pieces to a span; each has a part of every divided matrix,
                         and the sum of their results is scattered to pieces again (Megatron-LM's sequence parallelism, arXiv 2205.05198)
    attention            the ranks of a context group exchange tokens for heads: each has all tokens of the row, and an equal part of the
                         heads (DeepSpeed-Ulysses, arXiv 2309.14509); another exchange leads back to spans
    log-probabilities    a rank scores the trained tokens of its own piece; then every rank of the row has all of them

Attention sees whole rows, so segment boundaries, shared prompts, sliding windows and softcaps need nothing special. Every rank computes the
same loss from the same log-probabilities, and gradients flow back only into its own piece. So the gradient of a parameter that is not
divided is a plain sum over all ranks, in which each token counts once.

Eight ranks with trainer.tp=2 and trainer.cp=2: rows of ranks 0 … 3 and 4 … 7; tensor groups (0 1) (2 3) …, context groups (0 2) (1 3) ….
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd


@dataclass(frozen=True, slots=True)
class Axis:
    """A rank's place in a group."""

    group: dist.ProcessGroup | None
    rank: int
    size: int


ALONE = Axis(None, 0, 1)


@dataclass(slots=True)
class SequenceParallelGroup:
    """A rank's place among those that compute each row. Shapes: K tokens of a row; n of a piece, t·n of a span, c·t·n of the padded row."""

    everyone: Axis  # all c·t ranks
    context: Axis = ALONE  # c ranks
    tensor: Axis = ALONE  # t ranks
    whole: bool = False  # every rank computes all tokens with whole matrices, as if it were alone: for a model's own forward

    @property
    def keys(self) -> str:
        """The configuration keys that make this row, for messages."""
        axes = {"trainer.cp": self.context.size, "trainer.tp": self.tensor.size}
        return " with ".join(f"{key}={size}" for key, size in axes.items() if size > 1)

    @contextlib.contextmanager
    def kept_whole(self) -> Iterator[None]:
        """Within this, neither sequences nor matrices are divided. Without gradients only."""
        self.whole = True
        try:
            yield
        finally:
            self.whole = False

    def piece(self, row: Tensor) -> Tensor:
        """row [1, K] → this rank's piece [1, n]. Zeros fill the last pieces."""
        return self._cut(row, self.everyone)

    def span(self, row: Tensor) -> Tensor:
        """row [1, K] → the piece of this rank's tensor group [1, t·n]."""
        return self._cut(row, self.context)

    def own(self, index: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """index [N] into a row of `tokens` → (which of the N lie in this rank's piece [m], their places in the piece [m])."""
        length = self._length(tokens)
        which = (index // length == self.everyone.rank).nonzero()[:, 0]
        return which, index[which] - self.everyone.rank * length

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """A span with this rank's h heads, [1, h, t·n, d] each, → all tokens with its part of these heads, [1, h / c, K, d].

        Key and value heads are repeated if c does not divide their number. Raises ValueError if c does not divide the query heads.
        """
        size = self.context.size
        if size == 1:
            return query[:, :, :tokens], key[:, :, :tokens], value[:, :, :tokens]
        if query.shape[1] % size:
            raise ValueError(f"{self.keys} does not divide the query heads of a layer; set trainer.cp to a divisor of them")
        repeats = math.lcm(key.shape[1], size) // key.shape[1]
        parts = [query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)] if repeats > 1 else [query, key, value]
        # For rank r of the group: its block of heads, of this rank's tokens.
        blocks = [part.squeeze(0).unflatten(0, (size, -1)).transpose(1, 2).flatten(2) for part in parts]  # [c, t·n, heads / c · d]
        row = self._exchange(torch.cat(blocks, -1)).flatten(0, 1)[:tokens]
        widths = [block.shape[-1] for block in blocks]
        query, key, value = (
            whole.unflatten(1, (-1, part.shape[-1])).transpose(0, 1)[None] for whole, part in zip(row.split(widths, -1), parts, strict=True)
        )
        return query, key, value

    def to_span(self, attended: Tensor, length: int) -> Tensor:
        """All tokens with this rank's part of the heads, [1, K, h / c, d], → a span of `length` with its h heads, [1, t·n, h, d]."""
        _, tokens, heads, width = attended.shape
        size = self.context.size
        padded = F.pad(attended.squeeze(0).flatten(1), (0, 0, 0, length * size - tokens))
        received = self._exchange(padded.unflatten(0, (size, length))) if size > 1 else padded[None]  # [c, t·n, heads / c · d]
        return received.transpose(0, 1).reshape(1, length, size * heads, width)

    def part_of_heads(self, per_head: Tensor) -> Tensor:
        """[all heads] → those whose attention this rank computes."""
        return per_head.chunk(self.tensor.size)[self.tensor.rank].chunk(self.context.size)[self.context.rank]

    def gather(self, piece: Tensor) -> Tensor:
        """[1, n, d] or [n, d] of each rank of the tensor group → their span [1, t·n, d] or [t·n, d]; before divided matrices."""
        return piece if self.whole else _Gather.apply(piece.flatten(0, -2), self.tensor).unflatten(0, (*piece.shape[:-2], -1))

    def scatter(self, partial: Tensor) -> Tensor:
        """The sum over the tensor group: [1, t·n, d] or [t·n, d] → this rank's piece of it; after divided matrices."""
        return _Scatter.apply(partial.flatten(0, -2), self.tensor).unflatten(0, (*partial.shape[:-2], -1))

    def for_everyone(self, values: Sequence[Tensor], which: Tensor, count: int) -> tuple[Tensor, ...]:
        """What each rank computed for its own tokens, [m] each at the places `which`, → all of it on every rank, [count] each.

        In backward a rank keeps the gradient of its own values, because every rank of the row has the whole gradient.
        """
        return tuple(_Everyone.apply(torch.stack(tuple(values)), which, count, self.everyone.group).unbind())

    def _length(self, tokens: int) -> int:
        return -(-tokens // self.everyone.size)

    def _cut(self, row: Tensor, axis: Axis) -> Tensor:
        padded = self._length(row.shape[1]) * self.everyone.size
        length = padded // axis.size
        return F.pad(row, (0, padded - row.shape[1]))[:, axis.rank * length : (axis.rank + 1) * length]

    def _exchange(self, blocks: Tensor) -> Tensor:
        """[c, …]: block r goes to rank r of the context group, and block s of the result came from rank s."""
        assert self.context.group is not None
        return all_to_all_single_autograd(blocks.contiguous(), None, None, self.context.group)


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


def _gathered(x: Tensor, axis: Axis) -> Tensor:
    """[n, d] of each rank → [t·n, d]."""
    whole = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    dist.all_gather_single(whole, x.contiguous(), group=axis.group)
    return whole


def _scattered(x: Tensor, axis: Axis) -> Tensor:
    """[t·n, d] of each rank → this rank's piece of the sum, [n, d]."""
    piece = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    dist.reduce_scatter_single(piece, x.contiguous(), group=axis.group)
    return piece


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gathered(piece, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradients[0], ctx.axis), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _scattered(partial, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradients[0], ctx.axis), None
