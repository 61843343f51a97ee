"""One row of the model: packed micro-batches in, their scored tokens as objectives see them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlx.losses.tokens import TokenBatch
from rlx.models.layout import build_layout
from rlx.models.policy import PolicyModel
from rlx.types import MicroBatch


def forward(model: PolicyModel, parts: Sequence[MicroBatch], device: torch.device) -> list[TokenBatch]:
    """One row of the model: the scored tokens of each part. Their `old_logp` is this forward's own."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    starts = np.cumsum([0, *(len(part.token_ids) for part in parts)])
    ends = np.concatenate([[0], *(start + part.cu_seqlens[1:] for start, part in zip(starts[:-1], parts, strict=True))])
    slots = None if model.slots is None else joined("adapters").tolist()
    scored = joined("scored")
    layout = build_layout(joined("token_ids"), ends, scored, model.layout_kind(device), device, slots)
    index = torch.from_numpy(layout.where[scored]).to(device, torch.int64)
    labels = torch.from_numpy(joined("labels")[scored]).to(device, torch.int64)
    temperature = torch.from_numpy(joined("temperature")[scored]).to(device, torch.float32)
    logp, entropy = model(layout, index, labels, temperature)
    counts = [int(np.count_nonzero(part.scored)) for part in parts]
    return [_tokens(*each, device) for each in zip(parts, logp.split(counts), entropy.split(counts), strict=True)]


def _tokens(m: MicroBatch, logp: Tensor, entropy: Tensor, device: torch.device) -> TokenBatch:
    """A micro-batch on the device, with what the model computed for its N scored tokens."""

    def by_token(array: np.ndarray | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return None if array is None else torch.from_numpy(array[m.scored]).to(device, dtype)

    def by_rollout(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, torch.int64)

    given: Any = {"inference_logp": m.inference_logprobs, "advantages": m.advantages, "teacher_logp": m.teacher_logprobs}
    given |= {name: getattr(m, name) for name in ("policy_weights", "ce_weights", "ref_kl_weights")}
    values: Any = {name: by_token(array) for name, array in given.items()}
    return TokenBatch(
        logp=logp,
        old_logp=logp.detach(),
        entropy=entropy,
        rollout_ids=by_token(m.rollout_ids, torch.int64),  # type: ignore[arg-type]
        rollout_lengths=by_rollout(np.bincount(m.rollout_ids[m.scored], minlength=len(m.rollout_lengths))),
        tokens_elsewhere=by_rollout(m.tokens_elsewhere),
        group_lengths=by_rollout(m.group_lengths),
        objectives=by_rollout(m.objectives),
        sampled=None if m.ce_weights is None else by_token(m.loss_mask, torch.bool),
        **values,
    )
