"""Attention whose scores have a softcap (Gemma 2) or sinks (GPT-OSS), which no kernel of torch computes: written out, in parts.

    s = scale · q kᵀ        t = c · tanh(s / c), if there is a softcap c        p = softmax([t, sink])        out = p v

Autograd would keep several numbers for each pair of tokens and head until backward: 1.5 GiB a layer of GPT-OSS at 2,048 tokens. So each
part is checkpointed: backward computes its scores again. At any time only the scores of one part of the queries exist.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Scores of one part, of which up to five float32 copies exist at a time. A CPU's cache should hold them; a GPU waits for small kernels.
PART = {"cpu": 2**21, "cuda": 2**25}


def attend_bounded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """q [S, H, Q, d], k [S, H_kv, L, d], v [S, H_kv, L, d_v], sinks [H] → [S, H, Q, d_v].

    mask [S or 1, 1, Q, L] is True where a query sees a key; None: plain causal, with Q = L.
    """
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    blocks, heads, queries, keys = *q.shape[:3], k.shape[2]
    most = PART[q.device.type]
    several = max(1, most // (heads * queries * keys))
    length = max(1, most // (heads * keys)) if several == 1 else queries
    whole = []
    for first in range(0, blocks, several):
        some = slice(first, first + several)
        parts = []
        for start in range(0, queries, length):
            part, seen = slice(start, start + length), slice(0, keys if mask is not None else start + length)
            visible = None if mask is None else (mask if len(mask) == 1 else mask[some])[..., part, :]
            given = q[some, :, part], k[some, :, seen], v[some, :, seen], visible, start, scale, softcap, sinks
            attended: Tensor = checkpoint(_attend, *given, use_reentrant=False, preserve_rng_state=False)
            parts.append(attended)
        whole.append(torch.cat(parts, 2))
    return torch.cat(whole)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, start: int, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """One part, whose first query has the position `start` if attention is plain causal."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is None:
        at = torch.arange(k.shape[2], device=q.device)
        visible = at[start : start + q.shape[2], None] >= at
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v
