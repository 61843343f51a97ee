"""FlashAttention 3 as torch sees it, in plain torch: the operations that the package of this name registers, with its arguments.

The schemas are those of the package's `flash_api.cpp`. Only what torch asks of them for a packed row is computed. Every call is noted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CALLS: list[dict[str, Any]] = []
STATE = {"factor": 1.0}  # of the results; anything but 1 is a broken build

LIBRARY = torch.library.Library("flash_attn_3", "DEF")
LIBRARY.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, Tensor? page_table = None, "
    "Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, Tensor? rotary_sin = None, "
    "Tensor? seqlens_rotary = None, Tensor? q_descale = None, Tensor? k_descale = None, Tensor? v_descale = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, "
    "float softcap = 0.0, bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, Tensor(dk!)? dk = None, "
    "Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? seqused_q = None, Tensor? seqused_k = None, "
    "int? max_seqlen_q = None, int? max_seqlen_k = None, float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, float softcap = 0.0, bool deterministic = False, int sm_margin = 0) "
    "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float | None, causal: bool, left: int, right: int) -> Any:
    """q [K, H, d], k and v [K, H_kv, d] → results [K, H, d] in float32, log-sum-exp [H, K], and by segment what backward needs."""
    out, lse, kept = torch.empty_like(q, dtype=torch.float32), torch.empty(q.shape[1], len(q)), []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        queries, keys, values = (tensor[start:end].float().transpose(0, 1) for tensor in (q, k, v))
        keys, values = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 0) for tensor in (keys, values))
        scores = queries @ keys.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None]
        hidden = (distance < 0) & (causal or right == 0) | (distance > left) & (left >= 0)
        scores = scores.masked_fill(hidden, -torch.inf)
        weights = scores.softmax(-1)
        out[start:end] = (weights @ values).transpose(0, 1)
        lse[:, start:end] = scores.logsumexp(-1)
        kept.append((slice(start, end), queries, keys, values, weights))
    return out, lse, kept


def gradients(dout: Tensor, q: Tensor, k: Tensor, kept: Any, scale: float | None) -> list[Tensor]:
    """Of queries, keys and values, in float32. Kernels run below autograd, so this is the formula."""
    groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    found = [torch.empty_like(tensor, dtype=torch.float32) for tensor in (q, k, k)]
    for where, queries, keys, values, weights in kept:
        given = dout[where].float().transpose(0, 1)
        of_weights = given @ values.transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        of_keys, of_values = (
            t.unflatten(0, (-1, groups)).sum(1) for t in (of_scores.transpose(1, 2) @ queries, weights.transpose(1, 2) @ given)
        )
        for whole, part in zip(found, (of_scores @ keys, of_keys, of_values), strict=True):
            whole[where] = part.transpose(0, 1)
    return found


def arguments(op: str, given: tuple[Any, ...]) -> dict[str, Any]:
    """All arguments of a call by name; the dispatcher leaves out those at the end that have their defaults."""
    schema = getattr(torch.ops.flash_attn_3, op).default._schema.arguments
    found = {argument.name: argument.default_value for argument in schema} | dict(zip((a.name for a in schema), given, strict=False))
    CALLS.append({"op": op} | found)
    return found


def attended(given: dict[str, Any]) -> Any:
    causal, left, right = given["is_causal"], given["window_size_left"], given["window_size_right"]
    return attend(*(given[name] for name in ("q", "k", "v", "cu_seqlens_q", "softmax_scale")), causal, left, right)


def fwd(*given: Any) -> tuple[Tensor, ...]:
    named = arguments("fwd", given)
    out, lse, _ = attended(named)
    return (out * STATE["factor"]).to(named["q"].dtype), lse, torch.empty(0), torch.empty(0)


def bwd(*given: Any) -> tuple[Tensor, ...]:
    named = arguments("bwd", given)
    _, _, kept = attended(named)
    results = [named[name] for name in ("dq", "dk", "dv")]
    for result, gradient in zip(results, gradients(named["dout"], named["q"], named["k"], kept, named["softmax_scale"]), strict=True):
        result.copy_(gradient)
    return (*results, *(torch.empty(0) for _ in range(5)))


LIBRARY.impl("fwd", fwd, "CPU")
LIBRARY.impl("bwd", bwd, "CPU")
