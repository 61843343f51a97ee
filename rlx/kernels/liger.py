"""The log-probability op on Liger's fused linear scaled cross entropy, for inputs where both compute the same function.

Liger supports one temperature for all tokens, and neither a bias nor a softcap. On compute capability 9.0 it is a bfloat16 kernel that
returns the entropy in bfloat16. Elsewhere it is a plain torch loop over 512 tokens that rounds logits to its inputs' dtype. For 16-bit
inputs both err by 1e-2 nats, but `rlx.kernels.logprob` promises float32, so they are refused. Only float32 off capability 9.0 remains.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor


def why_not(device: torch.device, dtype: torch.dtype, *, has_bias: bool = False, softcap: float | None = None) -> str | None:
    """Why this backend cannot compute such inputs with such a head; None if it can."""
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed (pip install liger-kernel)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        if dtype == torch.bfloat16:
            return "its kernel for compute capability 9.0 rounds the entropy to bfloat16, but float32 is needed"
        return f"its kernel for compute capability 9.0 takes bfloat16, but these tensors are {dtype}"
    if dtype == torch.float64:
        return "it computes in float32, but these tensors are float64"
    if dtype != torch.float32:
        return f"on {device.type} it rounds logits and entropy to {dtype}, but float32 is needed"
    reasons = ["this head has a bias"] if has_bias else []
    if softcap is not None:
        reasons.append(f"these logits are bounded by {softcap:g}")
    return " and ".join(reasons) or None


def liger_logprob(hidden: Tensor, head: Tensor, labels: Tensor, temperature: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """(logp [N], entropy [N]) of inputs that `why_not` accepts; shapes as in `rlx.kernels.logprob.logprob`, N above 0.

    Raises ValueError for tokens at different temperatures.
    """
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    lowest, highest = (float(t) for t in temperature.aminmax())
    if lowest != highest:
        raise ValueError(
            f"model.logprob_backend is liger: it supports one temperature, but these tokens have {lowest:.6g} to {highest:.6g}; "
            "set model.logprob_backend=auto"
        )
    nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, head, labels, lowest / scale, return_entropy=True)
    return -nll, entropy
