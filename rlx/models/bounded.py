"""Attention whose scores have a softcap (Gemma 2) or sinks (GPT-OSS), which no kernel of torch computes: written out, in parts.

    s = scale · q kᵀ        t = c · tanh(s / c), if there is a softcap c        p = softmax([t, sink])        out = p v

Written out for autograd, it would keep several numbers for each pair of tokens and head until backward: 1.5 GiB a layer of GPT-OSS at
2,048 tokens. Here backward computes the scores again. At any time only the scores of one part of the queries exist.

It is an operation of torch's own registry. So compiled layers do not look into it, and selective checkpointing sees an attention like any
other: it keeps the result, not the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Scores of one part, of which up to five float32 copies exist at a time. A CPU's cache should hold them; a GPU waits for small kernels.
PART = {"cpu": 2**21, "cuda": 2**25}


def attend_bounded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """q [S, H, Q, d], k [S, H_kv, L, d], v [S, H_kv, L, d_v], sinks [H] → [S, H, Q, d_v].

    mask [S or 1, 1, Q, L] is True where a query sees a key; None: plain causal, with Q = L.
    """
    out: Tensor = _bounded_attention(q, k, v, mask, q.shape[-1] ** -0.5 if scaling is None else scaling, softcap, sinks)
    return out


@torch.library.custom_op("rlx::bounded_attention", mutates_args=())
def _bounded_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    groups = q.shape[1] // k.shape[1]
    for some, part, seen in _parts(q, k, mask):
        keys, values = (x[some, :, seen].repeat_interleave(groups, 1) for x in (k, v))
        scores, _ = _scores(q[some, :, part], keys, scale, softcap)
        p, _ = _probabilities(scores, _visible(mask, q, some, part, seen), sinks)
        out[some, :, part] = p.to(v.dtype) @ values
    return out


@_bounded_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


@torch.library.custom_op("rlx::bounded_attention_backward", mutates_args=())
def _bounded_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the sinks; of no sinks an empty one. Sums over parts and over the heads of a group are float32."""
    groups = q.shape[1] // k.shape[1]
    of_q, of_k, of_v = torch.empty_like(q), *(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    of_sinks = torch.zeros(q.shape[1] if sinks is not None else 0, dtype=torch.float32, device=q.device)
    for some, part, seen in _parts(q, k, mask):
        queries, slope = q[some, :, part], gradient[some, :, part]
        keys, values = (x[some, :, seen].repeat_interleave(groups, 1) for x in (k, v))
        scores, bounded = _scores(queries, keys, scale, softcap)
        p, sink = _probabilities(scores, _visible(mask, q, some, part, seen), sinks)
        del scores
        of_p = (slope @ values.transpose(-1, -2)).float()
        mean = (p * of_p).sum(-1, keepdim=True)
        if sink is not None:
            of_sinks -= (sink * mean).sum((0, 2, 3))
        of_scores = of_p.sub_(mean).mul_(p).mul_(scale)
        if bounded is not None:
            of_scores.mul_(bounded.square_().neg_().add_(1))  # the slope of tanh
        of_products = of_scores.to(q.dtype)
        of_q[some, :, part] = of_products @ keys
        of_v[some, :, seen] += (p.to(v.dtype).transpose(-1, -2) @ slope).float().unflatten(1, (-1, groups)).sum(2)
        of_k[some, :, seen] += (of_products.transpose(-1, -2) @ queries).float().unflatten(1, (-1, groups)).sum(2)
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype), of_sinks.to(sinks.dtype) if sinks is not None else of_sinks


@_bounded_attention_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_sinks = q.new_empty(0, dtype=torch.float32) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), of_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, mask, ctx.scale, ctx.softcap, sinks = inputs
    ctx.save_for_backward(q, k, v, mask, sinks)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, mask, sinks = ctx.saved_tensors
    of_q, of_k, of_v, of_sinks = _bounded_attention_backward(gradient, q, k, v, mask, ctx.scale, ctx.softcap, sinks)
    return of_q, of_k, of_v, None, None, None, of_sinks if sinks is not None else None


_bounded_attention.register_autograd(_backward, setup_context=_save)


def _parts(q: Tensor, k: Tensor, mask: Tensor | None) -> Iterator[tuple[slice, slice, slice]]:
    """Ranges of blocks, of their queries, and of the keys that these may see, with at most `PART` scores together, or one query's."""
    blocks, heads, queries, keys = *q.shape[:3], k.shape[2]
    most = PART[q.device.type]
    several = max(1, most // (heads * queries * keys))
    length = max(1, most // (heads * keys)) if several == 1 else queries
    for first in range(0, blocks, several):
        for start in range(0, queries, length):
            stop = min(start + length, queries)
            yield slice(first, min(first + several, blocks)), slice(start, stop), slice(0, keys if mask is not None else stop)


def _visible(mask: Tensor | None, q: Tensor, some: slice, part: slice, seen: slice) -> Tensor:
    """The mask of a part. A causal one of all pairs would be large, so each part makes its own."""
    if mask is None:
        at = torch.arange(seen.stop, device=q.device)
        return at[part, None] >= at
    return (mask if mask.shape[0] == 1 else mask[some])[..., part, :]


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """(t [S, H, Q, L], t / softcap if there is one), float32."""
    scores = (q @ k.transpose(-1, -2)).float().mul_(scale)
    if softcap is None:
        return scores, None
    bounded = scores.div_(softcap).tanh_()
    return softcap * bounded, bounded


def _probabilities(scores: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(p [S, H, Q, L], that of the sink [S, H, Q, 1]). Overwrites the scores."""
    scores.masked_fill_(~visible, -torch.inf)
    if sinks is None:
        return scores.softmax(-1), None
    sink = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
    p = torch.cat([scores, sink], -1).softmax(-1)
    return p[..., :-1], p[..., -1:]
