"""The one expensive thing every objective needs: log-probability of given tokens and entropy, without ever holding [N, V] logits.

`logprob(hidden [N, D], head [V, D], labels [N], temperature [N]) -> (logp [N], entropy [N])`. Losses see [N] tensors only, so any
function of per-token log-probabilities works, sequence-level ratios included. This file is the op and the choice of its backend;
the work is in `tiles.py` (the walk over tiles), `rows_torch.py` or `rows_triton.py` (what happens inside a tile) and `liger.py`.
Knows nothing of masks, losses or models. `rlx.kernels.reference` is the naive twin.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from rlx.kernels import rows_torch
from rlx.kernels.tiles import TILE_CUDA, Form, Rows, tiled_logprob

BACKENDS = ("auto", "torch", "triton", "liger")


def logprob(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    temperature: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
    tile: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each distribution at its temperature.

    hidden [N, D], head [V, D] and bias [V] of one floating dtype (gradients flow to all three), labels [N] int64 in 0 … V-1,
    temperature [N] above 0 → (logp [N], entropy [N]) in nats, float32 (float64 for float64 inputs). N may be 0.
    The logits are softcap(scale · (hidden headᵀ + bias)) / temperature, with softcap(z) = s·tanh(z/s) (Gemma 2) or nothing.
    `backend` is one of `BACKENDS`, see `choose_backend`. `tile` is (tokens, vocabulary) of one tile; null chooses by device and V.

    Where the head is frozen and hidden is not, forward keeps what backward needs and nothing is computed twice, unless the loss has an
    entropy gradient. Raises ValueError when dtypes differ or the backend asked for does not apply.
    """
    for name, tensor in (("head", head), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise ValueError(
                f"hidden is {hidden.dtype} and {name} is {tensor.dtype}; cast one, the product would silently be computed in another"
            )
    assert hidden.shape[1] == head.shape[1], (hidden.shape, head.shape)
    assert bias is None or bias.shape == head.shape[:1], (bias.shape, head.shape)
    assert labels.shape == temperature.shape == hidden.shape[:1], (labels.shape, temperature.shape, hidden.shape)
    backend = choose_backend(backend, hidden.device, hidden.dtype, len(head), has_bias=bias is not None, softcap=softcap)
    if backend == "liger" and len(hidden):
        from rlx.kernels.liger import liger_logprob

        return liger_logprob(hidden, head, labels, temperature, scale=scale)
    rows: Rows = rows_torch
    if backend == "triton":
        from rlx.kernels import rows_triton

        rows = rows_triton
    return tiled_logprob(hidden, head, labels, temperature, bias=bias, form=Form(scale, softcap), rows=rows, tile=tile)


def choose_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    vocabulary: int | None = None,
    *,
    has_bias: bool = False,
    softcap: float | None = None,
) -> str:
    """`torch`, `triton` or `liger` for inputs and a head of this kind; `vocabulary` null is taken for large.

    `auto` takes Triton on CUDA where it is installed, else torch; torch also for a vocabulary narrower than a tile: a toy's logits are
    too few to be worth the seconds that compiling a kernel takes.

    Raises ValueError naming the reason when the backend asked for does not apply.
    """
    if name == "auto":
        wide = vocabulary is None or vocabulary >= TILE_CUDA[0]
        return "triton" if device.type == "cuda" and wide and dtype != torch.float64 and find_spec("triton") is not None else "torch"
    reason = None
    if name == "triton":
        reason = _no_triton(device, dtype)
    elif name == "liger":
        from rlx.kernels.liger import why_not

        reason = why_not(device, dtype, has_bias=has_bias, softcap=softcap)
    elif name != "torch":
        reason = f"it must be one of {', '.join(BACKENDS)}"
    if reason is not None:
        raise ValueError(f"model.logprob_backend is {name}: {reason}; set model.logprob_backend=auto")
    return name


def _no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if dtype == torch.float64:
        return "its kernels compute in float32, and these tensors are float64"
    if device.type != "cuda":
        from triton import knobs

        if not knobs.runtime.interpret:
            return f"it needs CUDA, and this is {device.type}"
    return None
