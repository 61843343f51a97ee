"""The log-probability op by Liger's fused linear scaled cross entropy, where it computes the same function.

It knows one temperature for all tokens, and no bias or bound on the logits. On compute capability 9.0 it is a kernel for bfloat16;
elsewhere a loop over 512 tokens in plain torch that rounds logits to the dtype of its inputs, for 16 bit wrong by 1e-2 nats: refused.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot take such inputs; null where it can."""
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed (pip install liger-kernel)"
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if hopper and dtype != torch.bfloat16:
        return f"its kernel for compute capability 9.0 takes bfloat16, and these tensors are {dtype}"
    if hopper and find_spec("cutlass") is None:
        return "its kernel for compute capability 9.0 needs nvidia-cutlass-dsl, which is not installed"
    if not hopper and dtype not in (torch.float32, torch.float64):
        return f"on {device.type} it rounds logits to {dtype}, which only its kernel for compute capability 9.0 does not"
    return None


def liger_logprob(
    hidden: Tensor, head: Tensor, labels: Tensor, temperature: Tensor, *, bias: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """(logp [N], entropy [N]), float32; shapes as in `rlx.kernels.logprob.logprob`, N above 0.

    Raises ValueError for a bias, a bound on the logits, or tokens at different temperatures.
    """
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    lowest, highest = (float(t) for t in temperature.aminmax())
    reasons = []
    if bias is not None:
        reasons.append("this head has a bias")
    if softcap is not None:
        reasons.append(f"these logits are bounded by {softcap}")
    if lowest != highest:
        reasons.append(f"it knows one temperature, and these tokens have {lowest:.6g} to {highest:.6g}")
    if reasons:
        raise ValueError(f"model.logprob_backend is liger: {' and '.join(reasons)}; set model.logprob_backend=auto")
    nll, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, head, labels, lowest / scale, return_entropy=True)
    return -nll, entropy.float()
