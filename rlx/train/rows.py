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

BY_TOKEN = ("inference_logp", "advantages", "rollout_ids", "teacher_logp", "policy_weights", "ce_weights", "ref_kl_weights")
BY_ROLLOUT = ("tokens_elsewhere", "group_lengths", "objectives")


def forward(model: PolicyModel, parts: Sequence[MicroBatch], device: torch.device) -> list[TokenBatch]:
    """The scored tokens of each part of one row. Their `old_logp` is this forward's own."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    boundaries = np.cumsum([0, *np.concatenate([np.diff(part.cu_seqlens) for part in parts])])
    slots = None if model.slots is None else joined("adapters").tolist()
    scored = joined("scored")
    layout = build_layout(joined("token_ids"), boundaries, scored, model.layout_kind(device), device, slots)
    index = torch.from_numpy(layout.token_index[scored]).to(device, torch.int64)
    labels = torch.from_numpy(joined("labels")[scored]).to(device, torch.int64)
    temperature = torch.from_numpy(joined("temperature")[scored]).to(device, torch.float32)
    logp, entropy = model(layout, index, labels, temperature)
    counts = [int(np.count_nonzero(part.scored)) for part in parts]
    return [_tokens(*each, device) for each in zip(parts, logp.split(counts), entropy.split(counts), strict=True)]


def _tokens(row: MicroBatch, logp: Tensor, entropy: Tensor, device: torch.device) -> TokenBatch:
    """A micro-batch on the device, with what the model computed for its scored tokens."""
    arrays = {name: array[row.scored] for name in BY_TOKEN if (array := getattr(row, name)) is not None}
    arrays |= {name: getattr(row, name) for name in BY_ROLLOUT}
    arrays["rollout_lengths"] = np.bincount(arrays["rollout_ids"], minlength=len(row.rollout_lengths))
    if row.ce_weights is not None:
        arrays["sampled"] = row.loss_mask[row.scored]
    given: Any = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return TokenBatch(logp=logp, old_logp=logp.detach(), entropy=entropy, **given)
