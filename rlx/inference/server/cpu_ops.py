"""Faster forms of three operations and of loading in vLLM's CPU engine. A row's result does not depend on the other rows.

Products: oneDNN compiles a kernel for every new number of rows. Each takes milliseconds and a MB, and oneDNN keeps 1024 of them. With
answers of different lengths that number changes at almost every step. So rows go through in blocks of one size, which fit the cache, and
the rest is padded to one of few sizes.
Norms: vLLM has C++ kernels for CPUs but does not use them there; we do.
SwiGLU: one intermediate tensor less.
Loading: vLLM packs a layer's weight and drops the original, so a new version takes a slow path (40 ms for a tiny model). Here the
original is kept, new values are copied into it, and it is packed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 256  # rows; with 1,000 float32 columns that is one MB, which fits the second-level cache
NORMS = "rlx_cpu"  # our name among the implementations of vLLM's norms


def padded_rows(rows: int) -> int:
    """`rows` rounded up to an allowed size: every size up to 16, then steps of an eighth of the power of two below."""
    step = 1 << max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step


def blocks(rows: int) -> list[tuple[int, int, int]]:
    """`(start, stop, size)`: rows start … stop - 1 are multiplied as one block of `size` rows."""
    whole = rows - rows % BLOCK
    parts = [(start, start + BLOCK, BLOCK) for start in range(0, whole, BLOCK)]
    return parts if whole == rows else [*parts, (whole, rows, padded_rows(rows - whole))]


def use_quick_ops() -> None:
    """Replace the products and SwiGLU of vLLM's CPU layers and register `NORMS`, in this process and those forked from it."""
    from vllm import _custom_ops as ops
    from vllm import ir
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def onednn_mm(handler: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` [..., K] times the handler's weight: [..., N]."""
        flat = x.reshape(-1, handler.k)
        output = flat.new_empty((len(flat), handler.n))
        for start, stop, size in blocks(len(flat)):
            if size == stop - start:
                torch.ops._C.onednn_mm(output[start:stop], flat[start:stop], bias, handler.handler_tensor)
            else:
                padded = torch.nn.functional.pad(flat[start:stop], (0, 0, 0, size - (stop - start)))
                product = flat.new_empty((size, handler.n))
                torch.ops._C.onednn_mm(product, padded, bias, handler.handler_tensor)
                output[start:stop] = product[: stop - start]
        return output.view(*x.shape[:-1], handler.n)

    def silu_and_mul(x: Tensor) -> Tensor:
        """silu of the first half of the last dimension, times the second half."""
        half = x.shape[-1] // 2
        return torch.nn.functional.silu(x[..., :half]).mul_(x[..., half:])

    pack = UnquantizedLinearMethod.process_weights_after_loading

    def pack_and_keep(method: UnquantizedLinearMethod, layer: Any) -> None:
        weight = layer.weight
        pack(method, layer)
        if len(weight) and not len(layer.weight):
            layer.__dict__["rlx_weight"] = weight  # in `__dict__`, so that it is not a parameter of the module

    UnquantizedLinearMethod.process_weights_after_loading = pack_and_keep  # type: ignore[method-assign, assignment]
    ops.onednn_mm = onednn_mm  # type: ignore[assignment]
    SiluAndMul.forward_native = staticmethod(silu_and_mul)  # type: ignore[method-assign]
    if NORMS not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(NORMS, supports_args=_plain_norm)(_rms_norm)
        ir.ops.fused_add_rms_norm.register_impl(NORMS, supports_args=_plain_sum_norm, inplace=True)(_fused_add_rms_norm)


def kept_weights(model: torch.nn.Module) -> dict[torch.nn.Module, torch.nn.Parameter]:
    """Layers whose weight was packed, with the original weight. Empty if any layer of the model uses another quantization method."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    methods = {type(getattr(layer, "quant_method", None)) for layer in model.modules()}
    if methods - {type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod}:
        return {}
    return {layer: layer.__dict__["rlx_weight"] for layer in model.modules() if "rlx_weight" in layer.__dict__}


def _plain_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return weight is not None and variance_size is None and weight.dtype == x.dtype


def _plain_sum_norm(x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return _plain_norm(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    x = x.contiguous()  # the kernel requires contiguous rows
    output = torch.empty_like(x)
    torch.ops._C.rms_norm(output, x, weight, epsilon)
    return output


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
