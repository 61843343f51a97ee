"""The one expensive thing every objective needs: log-probability of given tokens and entropy, without ever holding [N, V] logits.

`logprob(hidden [N, D], head [V, D], labels [N], temperature [N]) -> (logp [N], entropy [N])` walks over tiles of tokens × vocabulary,
keeps the log-sum-exp and the entropy, and recomputes the tiles in backward. Losses see [N] tensors only, so any function of
per-token log-probabilities works, sequence-level ratios included. Plain torch; knows nothing of masks, losses or models.

With z = softcap(h Wᵀ)/τ, p = softmax(z), H the entropy, c = ∂L/∂logp, e = ∂L/∂H:
    ∂L/∂z = c (onehot(y) − p) − e p (log p + H)
Memory beyond inputs and gradients: one tile of float32 logits (two in backward) and a float32 [V, D] gradient of the head.
Work: 8 N·D·V multiply-adds against 6 of the naive form. `rlx.kernels.reference` is the naive twin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Vocabulary and elements of one tile. CPU: 2 MiB of float32 logits, near the cores; GPU: 32 MiB, stays in L2.
TILE_CPU = (2048, 256 * 2048)
TILE_CUDA = (4096, 2048 * 4096)


def logprob(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    temperature: Tensor,
    *,
    softcap: float | None = None,
    tile: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each distribution at its temperature.

    hidden [N, D] and head [V, D] of one floating dtype (gradients flow to both), labels [N] int64 in 0 … V-1, temperature [N] above 0
    → (logp [N], entropy [N]) in nats, float32 (float64 for float64 inputs). N may be 0.
    `softcap` is Gemma 2's bound s·tanh(z/s) on the logits before the temperature. `tile` is (tokens, vocabulary) of one tile.

    Raises ValueError when the dtypes of hidden and head differ.
    """
    if hidden.dtype != head.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and head is {head.dtype}; cast one of them, the product would silently be computed in another"
        )
    assert hidden.shape[1] == head.shape[1], (hidden.shape, head.shape)
    assert labels.shape == temperature.shape == hidden.shape[:1], (labels.shape, temperature.shape, hidden.shape)
    return _Logprob.apply(hidden, head, labels, temperature, softcap, tile or _tile(len(head), hidden.is_cuda))


def _tile(vocabulary: int, cuda: bool) -> tuple[int, int]:
    """(tokens, vocabulary) of one tile: a small vocabulary gets more tokens, so that a toy model takes one tile."""
    columns, elements = TILE_CUDA if cuda else TILE_CPU
    columns = min(columns, vocabulary)
    return elements // columns, columns


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, temperature: Tensor, softcap: float | None, tile: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        inverse_temperature = temperature.to(dtype).reciprocal()
        lse, logp, entropy = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(3))
        for rows in _tiles(len(hidden), tile[0]):
            lse[rows], logp[rows], entropy[rows] = _forward_rows(
                hidden[rows], head, labels[rows], inverse_temperature[rows, None], softcap, tile[1]
            )
        ctx.save_for_backward(hidden, head, labels, inverse_temperature, lse, entropy)
        ctx.softcap, ctx.tile = softcap, tile
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, labels, inverse_temperature, lse, entropy = ctx.saved_tensors
        dtype = lse.dtype
        need_hidden, need_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if need_hidden else None
        grad_head = torch.zeros(head.shape, dtype=dtype, device=head.device) if need_head else None
        for rows in _tiles(len(hidden), ctx.tile[0]):
            h, scale = hidden[rows], inverse_temperature[rows, None]
            c, e = (grad[rows, None].to(dtype) for grad in grads)
            total = torch.zeros(h.shape, dtype=dtype, device=h.device)
            for columns in _tiles(len(head), ctx.tile[1]):
                z, slope = _logits(h, head[columns], scale, ctx.softcap)
                z -= lse[rows, None]  # log p
                p = z.exp()
                dz = p.mul_((z + entropy[rows, None]).mul_(e).add_(c)).neg_()  # −p·(c + e·(log p + H))
                _add_at_labels(dz, labels[rows] - columns.start, c)
                dz *= slope
                dz = dz.to(h.dtype)
                if need_hidden:
                    total += _matmul(dz, head[columns])
                if grad_head is not None:
                    grad_head[columns] += _matmul(dz.T, h)
            if grad_hidden is not None:
                grad_hidden[rows] = total
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), None, None, None, None


def _forward_rows(
    h: Tensor, head: Tensor, labels: Tensor, scale: Tensor, softcap: float | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-sum-exp, logp, entropy), each [n], of one block of tokens: one pass over the vocabulary."""
    first, *rest = _tiles(len(head), width)
    sums, target = _tile_sums(h, head[first], labels, scale, softcap)
    for columns in rest:
        more, at_label = _tile_sums(h, head[columns], labels - columns.start, scale, softcap)
        sums, target = _merge(sums, more), target + at_label
    maximum, total, weighted = sums
    log_total = total.log()
    return maximum + log_total, target - maximum - log_total, log_total - weighted / total


def _tile_sums(h: Tensor, w: Tensor, labels: Tensor, scale: Tensor, softcap: float | None) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Of one tile: (m = max z, Σ exp(z − m), Σ exp(z − m)·(z − m)), and z at the label or 0 where it is elsewhere; each [n]."""
    z, _ = _logits(h, w, scale, softcap)
    at_label = _take_at_labels(z, labels)
    maximum = z.amax(1)
    z -= maximum[:, None]
    exp = z.exp()
    return (maximum, exp.sum(1), exp.mul_(z).sum(1)), at_label


def _merge(a: tuple[Tensor, Tensor, Tensor], b: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of `_tile_sums` over two tiles together, rescaled to their common maximum."""
    maximum = torch.maximum(a[0], b[0])
    total, weighted = torch.zeros_like(maximum), torch.zeros_like(maximum)
    for own_maximum, own_total, own_weighted in (a, b):
        shift = own_maximum - maximum
        factor = shift.exp()
        total += factor * own_total
        weighted += factor * (own_weighted + shift * own_total)
    return maximum, total, weighted


def _logits(h: Tensor, w: Tensor, scale: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Logits at temperature of one tile, [n, v] in float32 (or float64), and ∂z/∂(h·w), [n, v] or [n, 1]."""
    z = _matmul(h, w.T)
    if softcap is None:
        return z.mul_(scale), scale
    bounded = torch.tanh(z / softcap)
    return bounded * (softcap * scale), (1 - bounded * bounded) * scale


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, accumulated and returned in float32 for 16-bit inputs: logits rounded to bfloat16 would be wrong by 1e-2 nats."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _take_at_labels(z: Tensor, labels: Tensor) -> Tensor:
    """[n] z at each label, 0 where the label lies outside this tile of columns."""
    inside = (labels >= 0) & (labels < z.shape[1])
    taken = z.gather(1, labels.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    return torch.where(inside, taken, 0)


def _add_at_labels(dz: Tensor, labels: Tensor, c: Tensor) -> None:
    """Add c [n, 1] at each label that lies inside this tile of columns."""
    inside = (labels >= 0) & (labels < dz.shape[1])
    dz.scatter_add_(1, labels.clamp(0, dz.shape[1] - 1)[:, None], torch.where(inside[:, None], c, 0))


def _tiles(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
