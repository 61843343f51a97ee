"""Lets two forward passes of a mixture of experts be compared: the second takes the first one's experts where it could as well.

In 16 bits two ways to compute a token differ by rounding. If two of its experts have nearly equal scores, rounding alone decides which one
it meets, and the results are those of different networks. That is no error. A choice that rounding cannot explain is not taken over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDINGS = 4  # of layers and sums on the way to a score
TOPK = torch.ops.aten.topk.default  # by which routers choose, also groups of experts


@contextmanager
def noted() -> Iterator[list[Tensor]]:
    """Collects the choices of a forward pass, in their order: indices […, k] over all computed tokens."""
    with _Noted() as mode:
        yield mode.found


@contextmanager
def repeated(choices: Sequence[Tensor], tokens: int, where: Tensor, share: float, eps: float) -> Iterator[None]:
    """Repeats the choices of another pass over `tokens` tokens. where [L]: the places in it of the present tokens; -1: it left one out.

    A choice is repeated if the present scores are nearly as good: worse by at most this share of their standard deviation, and some times
    `eps`, the rounding of a number, of the best one.
    """
    with _Repeated(choices, tokens, where, share, eps):
        yield


class _Noted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is TOPK:
            self.found.append(out[1])
        return out


class _Repeated(TorchDispatchMode):
    def __init__(self, choices: Sequence[Tensor], tokens: int, where: Tensor, share: float, eps: float) -> None:
        super().__init__()
        self.choices, self.tokens, self.where, self.share, self.eps = iter(choices), tokens, where, share, eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not TOPK or (choice := next(self.choices, None)) is None:
            return out
        scores, (values, own) = args[0], out
        rest, k = own.numel() // own.shape[-1] // len(self.where), own.shape[-1]  # groups of experts for each token
        if choice.numel() != self.tokens * rest * k or own.numel() != len(self.where) * rest * k:
            return out
        other = choice.reshape(self.tokens, -1)[self.where.clamp(min=0)].reshape(own.shape)
        if int(other.max()) >= scores.shape[-1]:
            return out
        theirs = scores.gather(-1, other)
        worse = (values.float().amin(-1) - theirs.float().amin(-1)).abs()
        known = (self.where >= 0)[:, None].expand(-1, rest).reshape(worse.shape)
        limit = self.share * _spread(scores) + ROUNDINGS * self.eps * values.float().abs().amax(-1)
        near = (known & (worse <= limit))[..., None]
        return torch.where(near, theirs, values), torch.where(near, other, own)


def _spread(scores: Tensor) -> Tensor:
    """[…] standard deviation of the last dimension, without experts that are masked."""
    scores = scores.float()
    finite = scores.isfinite()
    count = finite.sum(-1, keepdim=True)
    mean = scores.masked_fill(~finite, 0).sum(-1, keepdim=True) / count
    return ((scores - mean).masked_fill(~finite, 0).square().sum(-1) / count.squeeze(-1)).sqrt()
