"""The log-probability op by Liger's fused linear scaled cross entropy, where it computes the same function.

It knows one temperature for all tokens, and no bias or bound on the logits. On compute capability 9.0 it is a kernel for bfloat16 that
returns the entropy in bfloat16; elsewhere a loop over 512 tokens in plain torch that rounds logits to the dtype of its inputs. Both are
wrong by 1e-2 nats for 16 bit, where `rlx.kernels.logprob` promises float32: refused. What is left is float32 off capability 9.0.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor


def why_not(device: torch.device, dtype: torch.dtype, *, has_bias: bool = False, softcap: float | None = None) -> str | None:
    """Why this backend cannot take such inputs and such a head; null where it can."""
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed (pip install liger-kernel)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        if dtype == torch.bfloat16:
            return "its kernel for compute capability 9.0 rounds the entropy to bfloat16, and float32 is needed"
        return f"its kernel for compute capability 9.0 takes bfloat16, and these tensors are {dtype}"
    if dtype == torch.float64:
        return "it computes in float32, and these tensors are float64"
    if dtype != torch.float32:
        return f"on {device.type} it rounds logits and entropy to {dtype}, and float32 is needed"
    reasons = ["this head has a bias"] if has_bias else []
    if softcap is not None:
        reasons.append(f"these logits are bounded by {softcap:g}")
    return " and ".join(reasons) or None


def liger_logprob(hidden: Tensor, head: Tensor, labels: Tensor, temperature: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """(logp [N], entropy [N]) of inputs that `why_not` takes; shapes as in `rlx.kernels.logprob.logprob`, N above 0.

    Raises ValueError for tokens at different temperatures.
    """
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    lowest, highest = (float(t) for t in temperature.aminmax())
    if lowest != highest:
        raise ValueError(
            f"model.logprob_backend is liger: it knows one temperature, and these tokens have {lowest:.6g} to {highest:.6g}; "
            "set model.logprob_backend=auto"
        )
    nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, head, labels, lowest / scale, return_entropy=True)
    return -nll, entropy
