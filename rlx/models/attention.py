"""The attention function of Hugging Face models during training: exact segment boundaries without a dense mask.

It is registered in transformers' `AttentionInterface` as `rlx`. Models call it with queries, keys and values of the whole packed row, or of
this rank's span of it if several ranks compute a row together. The `Layout`, and this rank's `SequenceParallelGroup` if there is one,
come with each call as keyword arguments.

Scores with a softcap (Gemma 2) or sinks (GPT-OSS), which no kernel of torch computes, are written out in parts:

    s = scale · q kᵀ        t = c · tanh(s / c), if there is a softcap c        p = softmax([t, sink])        out = p v

Autograd would keep several numbers for each pair of tokens and head until backward: 1.5 GiB a layer of GPT-OSS at 2,048 tokens. So each
part is checkpointed: backward computes its scores again. At any time only the scores of one part of the queries exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface

from rlx.models.blocks import Bucket
from rlx.models.flash import attend_long, flash
from rlx.models.layout import Layout
from rlx.parallel.row import SequenceParallelGroup

NAME = "rlx"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention. Windows count visible tokens; None: all."""

    module: torch.nn.Module
    window: int | None  # that the layer passed
    masked: int | None  # of the mask that transformers would have built for the layer


_calls: list[AttentionCall] | None = None  # None: nobody watches


@contextmanager
def watched() -> Iterator[list[AttentionCall]]:
    """Collects the calls of the attention, in their order.

    Some families have their window only in the mask, which this attention does not use. So transformers is asked for masks meanwhile, and
    gets numbers in place of them.
    """
    global _calls
    AttentionMaskInterface.register(NAME, _window_for_mask)
    calls: list[AttentionCall] = []
    _calls = calls
    try:
        yield calls
    finally:
        _calls = None
        del AttentionMaskInterface._global_mapping[NAME]


def _window_for_mask(
    batch_size: int, q_length: int, kv_length: int, local_size: int | None = None, device: torch.device | None = None, **_: Any
) -> Tensor | None:
    """[B, 1, Q, K] filled with the mask's window; None without a window."""
    return None if local_size is None else torch.full((batch_size, 1, q_length, kv_length), local_size, dtype=torch.int64, device=device)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: Layout | None = None,
    row: SequenceParallelGroup | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment: query [1, H, K, d], key [1, H_kv, K, d], value [1, H_kv, K, d_v] → ([1, K, H, d_v], None).

    With a `row`, K is the length of this rank's span, and H, H_kv are its parts of the heads.
    `sliding_window` counts visible tokens, the query's own included. `softcap` bounds the scores (Gemma 2). `s_aux` [H] are attention
    sinks (GPT-OSS). Raises ValueError if the model did not pass on the layout.
    """
    if layout is None:
        raise ValueError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention; set model.attention=rows for this model"
        )
    if _calls is not None:
        masked = None
        if attention_mask is not None and attention_mask.dtype == torch.int64:  # not a mask that the layer made of it
            masked, attention_mask = int(attention_mask.max()), None
        _calls.append(AttentionCall(module, sliding_window, masked))
    if attention_mask is not None:
        raise ValueError(f"{type(module).__name__} makes an attention mask of its own, and a packed row has none. Set model.attention=rows")
    assert dropout == 0.0, "the policy is trained without dropout"
    grouped = _is_grouped(module, query, key)
    length = query.shape[2]
    if row is not None:
        query, key, value = row.to_heads(query, key, value, layout.num_tokens)
        s_aux = None if s_aux is None else row.part_of_heads(s_aux)
    # Not `tensor[0]`, whose backward would copy the gradients into zeros of another memory layout.
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))  # [K, heads, d]
    if layout.cu_seqlens is not None:
        if softcap is not None or s_aux is not None:
            raise ValueError(
                f"{type(module).__name__} has a softcap or sinks, which FlashAttention does not support; set model.attention=sdpa"
            )
        attended = _varlen(q, k, v, layout, scaling, sliding_window, grouped)[None]
        return attended if row is None else row.to_span(attended, length), None
    assert layout.order is not None
    queries = _take(q, [bucket.queries for bucket in layout.buckets])
    keys, values = (_take(x, [bucket.keys for bucket in layout.buckets]) for x in (k, v))
    parts = zip(queries, keys, values, layout.buckets, strict=True)
    outputs = [_bucket(*part, grouped, scaling, sliding_window, softcap, s_aux) for part in parts]
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    attended = flat.index_select(0, layout.order).view(1, len(q), q.shape[1], -1)
    return attended if row is None else row.to_span(attended, length), None


def _is_grouped(module: torch.nn.Module, query: Tensor, key: Tensor) -> bool:
    """Whether several query heads share a key head. Uses the module's own count, because shapes are symbols under torch.compile."""
    groups = getattr(module, "num_key_value_groups", None)
    differ = query.shape[1] != key.shape[1] if groups is None else groups != 1
    return True if differ else False  # noqa: SIM210  (a compiled layer's number is a symbol, too, and only a branch makes a bool of it)


def _bucket(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bucket: Bucket,
    grouped: bool,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend in one padded batch: q [S, H, Q, d], k [S, H_kv, L, d], v [S, H_kv, L, d_v] → [S·Q, H·d_v]."""
    if softcap is not None or sinks is not None:
        out = attend_bounded(q, k, v, bucket.visible(window), scaling, softcap, sinks)
    else:
        mask = bucket.visible(window)
        if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32 or q.shape[-1] > 256):
            # The one fast kernel for these knows no groups.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            grouped = False
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).reshape(bucket.queries.numel(), -1)


def _take(x: Tensor, indices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """x [K, heads, d], indices [S, L] of several buckets → [S, heads, L, d] for each."""
    rows = x.reshape(len(x), -1)
    return tuple(rows.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:]).transpose(1, 2) for index in indices)


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scaling: float | None, window: int | None, grouped: bool) -> Tensor:
    """On CUDA in 16 bit: [K, heads, d] → [K, H, d]."""
    assert layout.cu_seqlens is not None
    back = -1 if window is None else window - 1
    unbounded = window is None or window >= layout.max_length
    # Every row has other pieces, so a compiled layer would be compiled for each.
    if not layout.pieces or not unbounded or torch.compiler.is_compiling():
        return flash(q, k, v, layout.cu_seqlens, layout.max_length, scaling, back, grouped)
    outputs = []
    lengths = [piece.end - piece.start for piece in layout.pieces]
    parts = zip(*(tensor.split(lengths) for tensor in (q, k, v)), strict=True)
    for piece, (queries, keys, values) in zip(layout.pieces, parts, strict=True):
        if piece.cu_seqlens is None:
            outputs.append(attend_long(queries, keys, values, scaling, grouped))
        else:
            outputs.append(flash(queries, keys, values, piece.cu_seqlens, piece.longest, scaling, back, grouped))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


AttentionInterface.register(NAME, packed_attention)


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
    # Not `@`: selective checkpointing keeps the results of bmm, and these are all scores.
    scores = torch.baddbmm(q.new_zeros(1, 1, 1), q.flatten(0, 1), k.flatten(0, 1).transpose(-1, -2), beta=0)
    scores = scores.unflatten(0, q.shape[:2]).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is None:
        at = torch.arange(k.shape[2], device=q.device)
        visible = at[start : start + q.shape[2], None] >= at
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v
