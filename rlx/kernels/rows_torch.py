"""The computation inside a tile of logits, in plain torch: for the CPU, and without Triton. See `rlx.kernels.tiles.TileOps`."""

from __future__ import annotations

import torch
from torch import Tensor

from rlx.kernels.tiles import LogitTransform, Softmax, Sums


def accumulate_tile(
    x: Tensor, sums: Sums, labels: Tensor, inverse_temperature: Tensor, bias: Tensor | None, form: LogitTransform, weights: Tensor | None
) -> Tensor | None:
    """Add the tile to `sums`. With `weights`, fill it and return the factor for all earlier sums. See `TileOps`."""
    z, slope = _logits(x, inverse_temperature, bias, form)
    inside, at = _inside(labels, z.shape[1])
    sums.target += torch.where(inside, z.gather(1, at)[:, 0], 0)
    maximum = torch.maximum(sums.maximum, z.amax(1))
    shift = sums.maximum - maximum
    shrink = shift.exp()
    z -= maximum[:, None]
    exp = z.exp()
    sums.weighted += shift * sums.total
    sums.weighted.mul_(shrink).add_(z.mul_(exp).sum(1))
    sums.total.mul_(shrink).add_(exp.sum(1))
    sums.maximum.copy_(maximum)
    if weights is None:
        return None
    torch.mul(exp, slope, out=weights)
    return shrink


def to_gradient(
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
    """∂L/∂x: (c·onehot − p·(c + e·(log p + H)))·∂z/∂x. See `TileOps`."""
    z, slope = _logits(x, inverse_temperature, bias, form)
    z -= softmax.maximum[:, None]
    p = z.exp()  # p · total
    plain = form.softcap is None  # then ∂z/∂x is one number per token, so it can join the other per-token factors
    per_token = slope[:, 0] if plain else torch.ones_like(c)
    share = per_token / softmax.total
    if e is None:
        p *= -(c * share)[:, None]
    else:
        p *= z.mul_(-(e * share)[:, None]).add_(((e * softmax.mean - c) * share)[:, None])
    inside, at = _inside(labels, p.shape[1])
    p.scatter_add_(1, at, torch.where(inside, c * per_token, 0)[:, None])
    if not plain:
        p *= slope
    return p.to(dtype)


def _logits(x: Tensor, inverse_temperature: Tensor, bias: Tensor | None, form: LogitTransform) -> tuple[Tensor, Tensor]:
    """(z [n, v], ∂z/∂x [n, 1] or [n, v]) of a tile of raw products. Overwrites the tile."""
    if bias is not None:
        x += bias
    slope = inverse_temperature[:, None] * form.scale
    if form.softcap is None:
        return x.mul_(slope), slope
    bounded = x.mul_(form.scale / form.softcap).tanh_()
    return bounded * (form.softcap * inverse_temperature)[:, None], (1 - bounded * bounded).mul_(slope)


def _inside(labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """([n] whether the label is in the tile, [n, 1] an index that is always inside it)."""
    return (labels >= 0) & (labels < width), labels.clamp(0, width - 1)[:, None]
