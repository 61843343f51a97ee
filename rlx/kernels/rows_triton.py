"""The computation inside a tile of logits, as Triton kernels: one pass over the tile forward, one backward. See
`rlx.kernels.tiles.TileOps`.

cuBLAS computes the products around them, with float32 results. The kernels compute in float32. With `TRITON_INTERPRET=1` they run on CPU
tensors (tests). Per tile, forward reads it once; backward reads it once and writes ∂L/∂x in the dtype of the products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlx.kernels.tiles import LogitTransform, Softmax, Sums

BLOCK = 2048  # columns that one program holds at a time
NUM_WARPS = 8


@triton.jit
def _logits(x, inverse_temperature, bias_ptr, columns, inside, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """(z, ∂z/∂x) of some columns of one row of raw products."""
    if HAS_BIAS:
        x += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        raw = x * (scale / softcap)
        small = tl.exp(-2.0 * tl.abs(raw))
        bounded = (1.0 - small) / (1.0 + small)  # tanh |raw|
        slope = (1.0 - bounded * bounded) * (scale * inverse_temperature)
        z = tl.where(raw < 0.0, -bounded, bounded) * (softcap * inverse_temperature)
    else:
        slope = tl.full(x.shape, 1.0, tl.float32) * (scale * inverse_temperature)
        z = x * (scale * inverse_temperature)
    return z, slope


@triton.jit
def absorb_kernel(
    x_ptr, maximum_ptr, total_ptr, weighted_ptr, target_ptr, labels_ptr, inverse_temperature_ptr, bias_ptr, weights_ptr, shrink_ptr,
    num_columns, scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: add its columns to the running sums; with weights, write exp(z − max)·∂z/∂x in a second pass."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * num_columns
    inverse_temperature = tl.load(inverse_temperature_ptr + row)
    label = tl.load(labels_ptr + row)
    before = tl.load(maximum_ptr + row)
    maximum = before
    total = tl.load(total_ptr + row)
    weighted = tl.load(weighted_ptr + row)
    target = tl.load(target_ptr + row)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < num_columns
        x = tl.load(x_ptr + columns, mask=inside, other=0.0)
        z, _ = _logits(x, inverse_temperature, bias_ptr, columns, inside, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        target += tl.sum(tl.where(columns == label, z, 0.0), axis=0)
        higher = tl.maximum(maximum, tl.max(tl.where(inside, z, maximum), axis=0))
        shift = maximum - higher
        factor = tl.exp(shift)
        z -= higher
        exp = tl.where(inside, tl.exp(z), 0.0)
        weighted = factor * (weighted + shift * total) + tl.sum(exp * z, axis=0)
        total = factor * total + tl.sum(exp, axis=0)
        maximum = higher
    tl.store(maximum_ptr + row, maximum)
    tl.store(total_ptr + row, total)
    tl.store(weighted_ptr + row, weighted)
    tl.store(target_ptr + row, target)
    if HAS_WEIGHTS:
        tl.store(shrink_ptr + row, tl.exp(before - maximum))
        weights_ptr += row * num_columns
        for start in range(0, num_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < num_columns
            x = tl.load(x_ptr + columns, mask=inside, other=0.0)
            z, slope = _logits(x, inverse_temperature, bias_ptr, columns, inside, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
            tl.store(weights_ptr + columns, (tl.exp(z - maximum) * slope).to(weights_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gradient_kernel(
    x_ptr, out_ptr, maximum_ptr, total_ptr, mean_ptr, c_ptr, e_ptr, labels_ptr, inverse_temperature_ptr, bias_ptr,
    num_columns, scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and block of columns: raw products in, ∂L/∂x out."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    x = tl.load(x_ptr + row * num_columns + columns, mask=inside, other=0.0)
    inverse_temperature = tl.load(inverse_temperature_ptr + row)
    z, slope = _logits(x, inverse_temperature, bias_ptr, columns, inside, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
    z -= tl.load(maximum_ptr + row)
    c = tl.load(c_ptr + row)
    factor = tl.full(x.shape, 0.0, tl.float32) + c
    if HAS_E:
        factor += tl.load(e_ptr + row) * (z - tl.load(mean_ptr + row))
    gradient = tl.where(columns == tl.load(labels_ptr + row), c, 0.0) - tl.exp(z) * factor / tl.load(total_ptr + row)
    tl.store(out_ptr + row * num_columns + columns, (gradient * slope).to(out_ptr.dtype.element_ty), mask=inside)


def accumulate_tile(
    x: Tensor, sums: Sums, labels: Tensor, inverse_temperature: Tensor, bias: Tensor | None, form: LogitTransform, weights: Tensor | None
) -> Tensor | None:
    """Add the tile to `sums`. With `weights`, fill it and return the factor for all earlier sums. See `TileOps`."""
    assert x.is_contiguous(), x.stride()
    n, v = x.shape
    shrink = None if weights is None else torch.empty_like(sums.maximum)
    absorb_kernel[(n,)](
        x, sums.maximum, sums.total, sums.weighted, sums.target, labels, inverse_temperature, bias, weights, shrink,
        v, form.scale, form.softcap or 1.0,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=form.softcap is not None, HAS_WEIGHTS=weights is not None,
        BLOCK=block_for(v), num_warps=NUM_WARPS,
    )  # fmt: skip
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
    """∂L/∂x: (c·onehot − p·(c + e·(log p + H)))·∂z/∂x, written into x if the dtype allows. See `TileOps`."""
    assert x.is_contiguous(), x.stride()
    n, v = x.shape
    out = x if x.dtype == dtype else torch.empty(n, v, dtype=dtype, device=x.device)
    block = block_for(v)
    gradient_kernel[(n, triton.cdiv(v, block))](
        x, out, softmax.maximum, softmax.total, softmax.mean, c.contiguous(), None if e is None else e.contiguous(),
        labels, inverse_temperature, bias,
        v, form.scale, form.softcap or 1.0,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=form.softcap is not None, HAS_E=e is not None, BLOCK=block, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def block_for(columns: int) -> int:
    """Columns that one program holds at a time: a power of two."""
    return min(BLOCK, triton.next_power_of_2(columns))
