"""The walk over tiles of tokens × vocabulary behind `rlx.kernels.logprob`, and its gradient.

With raw product x = hWᵀ + b, logits z = softcap(scale·x)/τ, p = softmax(z), H the entropy, c = ∂L/∂logp, e = ∂L/∂H:
    ∂L/∂z = c (onehot(y) − p) − e p (log p + H),    dh = (∂L/∂z · ∂z/∂x) W,    dW = (∂L/∂z · ∂z/∂x)ᵀ h
For each token, forward stores m = max z, s = Σ exp(z − m) and the mean of z − m. Backward recomputes each tile from them:
p = exp(z − m) / s and log p + H = z − m − mean. Storing the log-sum-exp instead would lose precision: logits with a common offset of
−1000 round it to 3e-5 in float32. The probabilities would then miss a sum of 1 by as much, and the common part of the head's rows would
enter the gradient with that error. The vocabulary is the outer loop: a slice of the head and its gradient stay in cache while the tokens
pass by, and the head's gradient needs no extra buffer.

With a frozen head (LoRA), backward needs only ∂logp/∂h = ∂z_y/∂x W[y] − Σ p ∂z/∂x W. Forward accumulates it, rescaling as the maximum
moves, so backward is one product with c. An entropy gradient is not part of it; in that case backward recomputes the tiles.

Memory beyond inputs and gradients: one tile of float32 logits and the temporary tensors of the row functions; a float32 [N, D] sum (only
if hidden is 16 bit or the head frozen); a float32 gradient of one slice of the head. Work: 8 N·D·V operations, 4 with a frozen
head; naive 6. `TileOps` defines the computation inside a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# (vocabulary, elements) of one tile. CPU: 4 MiB of float32 logits fit the cache. GPU: up to 512 MiB make long products.
TILE_CPU = (1024, 1024 * 1024)
TILE_CUDA = (8192, 16_384 * 8192)
LOWEST = -1e37  # the initial maximum; finite, so that differences from it are numbers


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """How raw products become logits: softcap(scale · x) / τ."""

    scale: float
    softcap: float | None


@dataclass(slots=True)
class Sums:
    """Running sums over the vocabulary, [n] each: max z, Σ exp(z − max), Σ exp(z − max)·(z − max), and z at the label (0 at first)."""

    maximum: Tensor
    total: Tensor
    weighted: Tensor
    target: Tensor

    @classmethod
    def start(cls, n: int, dtype: torch.dtype, device: torch.device) -> Sums:
        zeros = torch.zeros(3, n, dtype=dtype, device=device)
        return cls(torch.full((n,), LOWEST, dtype=dtype, device=device), *zeros)

    def part(self, rows: slice) -> Sums:
        """Views of a range of tokens."""
        return Sums(self.maximum[rows], self.total[rows], self.weighted[rows], self.target[rows])


@dataclass(frozen=True, slots=True)
class Softmax:
    """Turns logits into probabilities, [n] each: p = exp(z − maximum) / total, and log p + H = z − maximum − mean."""

    maximum: Tensor  # max z
    total: Tensor  # Σ exp(z − max), at least 1
    mean: Tensor  # Σ p (z − max)

    def part(self, rows: slice) -> Softmax:
        """Views of a range of tokens."""
        return Softmax(self.maximum[rows], self.total[rows], self.mean[rows])


class TileOps(Protocol):
    """The computation inside a tile x [n, v] of raw products (without bias). It overwrites the tile.

    `labels` [n] count from the tile's first column and may lie outside it; `inverse_temperature` is [n]; `bias` is [v] or None.
    """

    def accumulate_tile(
        self,
        x: Tensor,
        sums: Sums,
        labels: Tensor,
        inverse_temperature: Tensor,
        bias: Tensor | None,
        form: LogitTransform,
        weights: Tensor | None,
    ) -> Tensor | None:
        """Add the tile to `sums`. With `weights` [n, v], fill it with exp(z − max)·∂z/∂x and return exp(old max − new max) [n]."""
        ...

    def to_gradient(
        self,
        x: Tensor,
        softmax: Softmax,
        c: Tensor,
        e: Tensor | None,
        labels: Tensor,
        inverse_temperature: Tensor,
        bias: Tensor | None,
        form: LogitTransform,
        dtype: torch.dtype,
    ) -> Tensor:
        """∂L/∂x [n, v] in `dtype` (may be x itself), from c and e [n], the gradients of logp and entropy (e None: no entropy gradient)."""
        ...


def tiled_logprob(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    temperature: Tensor,
    *,
    bias: Tensor | None,
    form: LogitTransform,
    rows: TileOps,
    tile: tuple[int, int] | None,
) -> tuple[Tensor, Tensor]:
    """The op on checked inputs; shapes and results as in `rlx.kernels.logprob.logprob`."""
    frozen = torch.is_grad_enabled() and hidden.requires_grad and not head.requires_grad and not (bias is not None and bias.requires_grad)
    tile = tile or _tile(len(head), hidden.is_cuda)
    return _Logprob.apply(hidden, head, bias, labels, temperature, form, rows, tile, frozen)


def _tile(vocabulary: int, cuda: bool) -> tuple[int, int]:
    """(tokens, vocabulary) of one tile. A small vocabulary gets more tokens, so that a toy model needs only one tile."""
    columns, elements = TILE_CUDA if cuda else TILE_CPU
    columns = min(columns, vocabulary)
    return elements // columns, columns


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: Tensor,
        form: LogitTransform,
        rows: TileOps,
        tile: tuple[int, int],
        frozen: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        inverse_temperature = temperature.to(dtype).reciprocal()
        sums = Sums.start(len(hidden), dtype, hidden.device)
        d_logp = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if frozen else None  # Σ exp(z − max) ∂z/∂x W, later ∂logp/∂h
        for columns in _slices(len(head), tile[1]):
            w, b = _operand(head[columns]), None if bias is None else bias[columns]
            for block in _slices(len(hidden), tile[0]):
                x = _product(_operand(hidden[block]), w.T)
                local, part = labels[block] - columns.start, sums.part(block)
                weights = None if d_logp is None else torch.empty(x.shape, dtype=w.dtype, device=x.device)
                shrink = rows.accumulate_tile(x, part, local, inverse_temperature[block], b, form, weights)
                if d_logp is not None and weights is not None and shrink is not None:
                    d_logp[block] *= shrink[:, None]
                    _add_product(d_logp[block], weights, w)
        log_total, mean = sums.total.log(), sums.weighted / sums.total
        logp = sums.target - sums.maximum - log_total  # in this order, so that it is exact if one token has all the mass
        entropy = log_total - mean
        if d_logp is not None:
            d_logp.div_(sums.total[:, None]).neg_()
            d_logp.addcmul_(head[labels].to(dtype), _slope(sums.target, inverse_temperature, form)[:, None])
        ctx.save_for_backward(hidden, head, bias, labels, inverse_temperature, sums.maximum, sums.total, mean, d_logp)
        ctx.form, ctx.rows, ctx.tile = form, rows, tile
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, c: Tensor | None, e: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, bias, labels, inverse_temperature, maximum, total, mean, d_logp = ctx.saved_tensors
        softmax = Softmax(maximum, total, mean)
        need_hidden, need_head, need_bias = ctx.needs_input_grad[:3]
        dtype = total.dtype
        c = torch.zeros_like(total) if c is None else c.to(dtype)
        e = None if e is None else e.to(dtype)
        if d_logp is not None and e is None:
            return (d_logp * c[:, None]).to(hidden.dtype), *[None] * 8
        d_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if need_hidden else None
        d_head = torch.zeros_like(head, memory_format=torch.contiguous_format) if need_head else None
        d_bias = torch.zeros(len(head), dtype=dtype, device=head.device) if need_bias else None
        for columns in _slices(len(head), ctx.tile[1]):
            w, b = _operand(head[columns]), None if bias is None else bias[columns]
            d_w = None
            if d_head is not None:
                d_w = d_head[columns] if d_head.dtype == dtype else torch.zeros(w.shape, dtype=dtype, device=w.device)
            for block in _slices(len(hidden), ctx.tile[0]):
                h = _operand(hidden[block])
                dx = ctx.rows.to_gradient(
                    _product(h, w.T), softmax.part(block), c[block], None if e is None else e[block],
                    labels[block] - columns.start, inverse_temperature[block], b, ctx.form, h.dtype,
                )  # fmt: skip
                if d_hidden is not None:
                    _add_product(d_hidden[block], dx, w)
                if d_w is not None:
                    _add_product(d_w, dx.T, h)
                if d_bias is not None:
                    d_bias[columns] += dx.sum(0, dtype=dtype)
            if d_head is not None and d_w is not None and d_head.dtype != dtype:
                d_head[columns] = d_w
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            d_head,
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
            *[None] * 6,
        )


def _slope(target: Tensor, inverse_temperature: Tensor, form: LogitTransform) -> Tensor:
    """[n] ∂z/∂x at the label, from z at the label."""
    slope = inverse_temperature * form.scale
    if form.softcap is None:
        return slope
    bounded = target / (form.softcap * inverse_temperature)  # tanh
    return slope * (1 - bounded * bounded)


def _operand(matrix: Tensor) -> Tensor:
    """The matrix as the products need it. On CPU, 16-bit matrices become float32: there is no 16-bit product with a float32 result."""
    return matrix if matrix.is_cuda or matrix.dtype in (torch.float32, torch.float64) else matrix.float()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, accumulated and returned in float32 for 16-bit inputs: rounding logits to bfloat16 would err by 1e-2 nats."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in the precision of `total`. The product itself adds, so no extra [n, D] is needed.

    With `out_dtype`, torch accepts a float32 summand for 16-bit factors since 2.10 (pytorch#167931, #154086); `out` may be the summand.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
