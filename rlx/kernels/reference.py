"""The naive twin of `rlx.kernels.logprob`: the same function by plain autograd, with all logits in memory.

For tests and for reading; nothing trains with it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def logprob_reference(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    temperature: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each distribution.

    hidden [N, D], head [V, D], labels [N] (int64), temperature [N], bias [V] → (logp [N], entropy [N], nats), in float32 or the
    inputs' float64. The logits are softcap(scale · (hidden headᵀ + bias)) / temperature.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(dtype) @ head.to(dtype).T  # [N, V]
    if bias is not None:
        logits = logits + bias.to(dtype)
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs = torch.log_softmax(logits / temperature.to(dtype)[:, None], dim=-1)
    logp = log_probs.gather(1, labels[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return logp, entropy
