"""Turns the turns of a rollout into training samples. Every sampled token is in exactly one sample, marked as trainable.

`interleaved` merges turns whose prompts extend an earlier sample token for token. `branching` makes one sample of every turn.
Packing and the shift of labels come later (`rlx.data.packing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx.policy.answered import ROLES
from rlx.types import Group, Rollout, TrainingSample, Turn

Span = tuple[int, Turn]  # (where the turn's completion begins in the sample, the turn)


@dataclass
class _Draft:
    """A sample while turns are being merged into it."""

    ids: np.ndarray  # [L]
    spans: list[Span] = field(default_factory=list)

    def append(self, turn: Turn) -> None:
        """Add the environment's new tokens (not trained) and the sampled ones (trained)."""
        start = len(turn.prompt_ids)
        self.ids = np.concatenate([turn.prompt_ids, turn.completion_ids])
        self.spans.append((start, turn))


def merge(turns: Sequence[Turn], strategy: str) -> list[_Draft]:
    """Drafts of the samples of one rollout.

    A turn joins the longest draft whose ids are an exact prefix of its prompt. If there is none, it begins a new draft.
    All drafts stay open, because an environment may return to an earlier conversation.
    """
    if strategy not in ("interleaved", "branching"):
        raise ValueError(f"orchestrator.trajectory_strategy={strategy}: use interleaved or branching")
    drafts: list[_Draft] = []
    for turn in turns:
        match = None
        if strategy == "interleaved":
            fits = [d for d in drafts if len(d.ids) <= len(turn.prompt_ids) and np.array_equal(d.ids, turn.prompt_ids[: len(d.ids)])]
            match = max(fits, key=lambda d: len(d.ids), default=None)
        if match is None:
            match = _Draft(turn.prompt_ids)
            drafts.append(match)
        match.append(turn)
    return drafts


def samples_of(
    group: Group,
    *,
    strategy: str,
    mask_overlong: bool = False,
    learn: Mapping[str, float] | None = None,
    weights: Mapping[str, float] | None = None,
    taught: bool = False,
) -> list[TrainingSample]:
    """The training samples of a group, ordered by member and turn.

    With `mask_overlong`, rollouts cut by a length limit give no samples. `learn`: weight of cross-entropy on what the environment answered,
    by role; each such token has it in the first sample whose prompt shows the message. `weights`: factor of sampled tokens by loss,
    `policy` or `ref_kl`. `taught`: a teacher played, so its tokens are learned by cross-entropy, with weight 1, and none counts as sampled
    by the policy.
    """
    samples = []
    for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
        if mask_overlong and rollout.is_truncated:
            continue
        for draft in merge(rollout.turns, strategy):
            sample = _sample(group, rollout, draft, float(advantage), learn or {})
            samples.append(_as_taught(sample) if taught else _weighted(sample, weights or {}))
    return samples


def _weighted(sample: TrainingSample, weights: Mapping[str, float]) -> TrainingSample:
    """The sample with a stream for each loss in which its sampled tokens have another weight than 1."""
    streams: dict[str, Any] = {f"{loss}_weights": sample.loss_mask * np.float32(weight) for loss, weight in weights.items() if weight != 1}
    return replace(sample, **streams) if streams else sample


def _sample(group: Group, rollout: Rollout, draft: _Draft, advantage: float, learn: Mapping[str, float]) -> TrainingSample:
    length = len(draft.ids)
    mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    temperature = np.ones(length, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int32)
    by_mark = np.array([0, *(learn.get(role, 0) for role in ROLES)], dtype=np.float32)
    learned = np.zeros(length, dtype=np.float32)
    for start, turn in draft.spans:
        if turn.answered is not None:
            learned[:start] += by_mark[turn.answered]
        part = slice(start, start + len(turn.completion_ids))
        mask[part] = True
        logprobs[part] = turn.logprobs
        temperature[part] = turn.temperature
        versions[part] = turn.versions
    return TrainingSample(
        group=group.id,
        member=rollout.member,
        env=group.task.env,
        token_ids=draft.ids.astype(np.int32, copy=False),
        loss_mask=mask,
        inference_logprobs=logprobs,
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        temperature=temperature,
        versions=versions,
        ce_weights=learned if learned.any() else None,
    )


def _as_taught(sample: TrainingSample) -> TrainingSample:
    """A sample of a teacher's rollout: its answers are for cross-entropy alone."""
    learned = sample.loss_mask.astype(np.float32)
    return replace(
        sample,
        loss_mask=np.zeros_like(sample.loss_mask),
        advantages=np.zeros_like(sample.advantages),
        temperature=np.ones_like(sample.temperature),
        versions=np.full_like(sample.versions, -1),
        ce_weights=learned if sample.ce_weights is None else learned + sample.ce_weights,
    )
