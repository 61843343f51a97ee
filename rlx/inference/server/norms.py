"""RMS norms of vLLM's CPU engine by vLLM's own C++ kernels, which it builds for CPUs and leaves unused there.

Only in float32: in 16 bit the kernels round once where the trainer's norms, and those that vLLM uses, round twice. The results of a row do
not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm import ir

from rlx.inference.server.arguments import CPU_NORMS

WIDTH = 8  # the kernels take rows whose length is a multiple of it


def offer_kernels() -> None:
    """Make the kernels known under the name that the engine's arguments prefer, in this process and in those forked from it."""
    if CPU_NORMS not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(CPU_NORMS, supports_args=_supported)(_rms_norm)
        ir.ops.fused_add_rms_norm.register_impl(CPU_NORMS, supports_args=_sum_supported, inplace=True)(_fused_add_rms_norm)


def _supported(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    float32 = weight is not None and weight.dtype == x.dtype == torch.float32
    return float32 and variance_size is None and x.shape[-1] % WIDTH == 0


def _sum_supported(x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    together = x.dtype == x_residual.dtype and x.is_contiguous() and x_residual.is_contiguous()
    return together and _supported(x, weight, epsilon, variance_size)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    x = x.contiguous()  # the kernel takes one row to follow the other
    output = torch.empty_like(x)
    torch.ops._C.rms_norm(output, x, weight, epsilon)
    return output


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
