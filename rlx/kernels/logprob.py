"""The op that every objective needs: log-probability of given tokens and entropy, without ever storing [N, V] logits.

`logprob(hidden [N, D], head [V, D], labels [N], temperature [N]) -> (logp [N], entropy [N])`. Losses see [N] tensors only, so they may be
any function of per-token log-probabilities, sequence-level ratios included. This file holds the op and chooses its backend.
`tiles.py` walks over tiles; `rows_torch.py` and `rows_triton.py` compute inside a tile; `liger.py` calls Liger.
`rlx.kernels.reference` is the naive twin.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from rlx.kernels import rows_torch
from rlx.kernels.tiles import LogitTransform, TileOps, tiled_logprob

BACKENDS = ("auto", "torch", "triton", "liger")
WIDE = 4096  # a vocabulary that is worth the seconds of compiling Triton kernels


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
    `backend` is one of `BACKENDS`, see `choose_backend`. `tile` is (tokens, vocabulary) of one tile; None chooses by device and V.

    If the head is frozen and hidden is not, forward stores what backward needs, so nothing is computed twice, unless the loss has an
    entropy gradient. Raises ValueError if dtypes differ or the requested backend cannot compute these inputs.
    """
    for name, tensor in (("head", head), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise ValueError(
                f"hidden is {hidden.dtype} but {name} is {tensor.dtype}; cast one, or the product would silently use another dtype"
            )
    assert hidden.shape[1] == head.shape[1], (hidden.shape, head.shape)
    assert bias is None or bias.shape == head.shape[:1], (bias.shape, head.shape)
    assert labels.shape == temperature.shape == hidden.shape[:1], (labels.shape, temperature.shape, hidden.shape)
    backend = choose_backend(backend, hidden.device, hidden.dtype, len(head), has_bias=bias is not None, softcap=softcap)
    if backend == "liger" and len(hidden):
        from rlx.kernels.liger import liger_logprob

        return liger_logprob(hidden, head, labels, temperature, scale=scale)
    rows: TileOps = rows_torch
    if backend == "triton":
        from rlx.kernels import rows_triton

        rows = rows_triton
    return tiled_logprob(hidden, head, labels, temperature, bias=bias, form=LogitTransform(scale, softcap), rows=rows, tile=tile)


def choose_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    vocabulary: int | None = None,
    *,
    has_bias: bool = False,
    softcap: float | None = None,
) -> str:
    """`torch`, `triton` or `liger` for such inputs and such a head; a `vocabulary` of None counts as large.

    `auto` chooses Triton on CUDA if it is installed, else torch. It also chooses torch for a vocabulary narrower than `WIDE`.

    Raises ValueError with the reason if the requested backend cannot compute these inputs.
    """
    if name == "auto":
        wide = vocabulary is None or vocabulary >= WIDE
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
        return "its kernels compute in float32, but these tensors are float64"
    if device.type != "cuda":
        from triton import knobs

        if not knobs.runtime.interpret:
            return f"it needs CUDA, but this is {device.type}"
    return None
