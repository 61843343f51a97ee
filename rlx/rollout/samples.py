"""Cuts a rollout's trace into training samples. Every sampled token is in exactly one sample, marked as trainable.

`interleaved` makes one sample of a path of answers that continue each other. `branching` makes one of every answer.
Packing and the shift of labels come later (`rlx.data.packing`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.policy.observation_mask import ROLES
from rlx.trace import Branch, Trace
from rlx.types import Group, Rollout, TrainingSample


def branches_of(trace: Trace, strategy: str) -> list[Branch]:
    """The branches of a trace that are its samples under `orchestrator.trajectory_strategy`."""
    return trace.branches(joined=strategy == "interleaved")


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
        seen: set[int] = set()  # nodes that an earlier sample has
        for branch in branches_of(rollout.trace, strategy):
            sample = _sample(group, rollout, branch, float(advantage), learn or {}, seen)
            samples.append(_as_taught(sample) if taught else _weighted(sample, weights or {}))
            seen.update(branch.path)
    return samples


def _weighted(sample: TrainingSample, weights: Mapping[str, float]) -> TrainingSample:
    """The sample with a stream for each loss in which its sampled tokens have another weight than 1."""
    streams: dict[str, Any] = {f"{loss}_weights": sample.loss_mask * np.float32(weight) for loss, weight in weights.items() if weight != 1}
    return replace(sample, **streams) if streams else sample


def _sample(
    group: Group, rollout: Rollout, branch: Branch, advantage: float, learn: Mapping[str, float], seen: Collection[int]
) -> TrainingSample:
    nodes = rollout.trace.nodes
    token_ids = rollout.trace.ids(branch.path[-1])
    length = len(token_ids)
    mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    temperature = np.ones(length, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int32)
    by_mark = np.array([0, *(learn.get(role, 0) for role in ROLES)], dtype=np.float32)
    learned = np.zeros(length, dtype=np.float32)
    end = 0
    for place in branch.path:
        node = nodes[place]
        begin, end = end, end + len(node.token_ids)
        if node.observation_mask is not None and place not in seen:
            learned[begin:end] = by_mark[node.observation_mask]
        if place in branch.own:
            part = slice(end - len(node.logprobs), end)
            mask[part] = True
            logprobs[part] = node.logprobs
            temperature[part] = node.temperature
            versions[part] = node.token_versions
    return TrainingSample(
        group=group.id,
        member=rollout.member,
        env=group.task.env,
        token_ids=token_ids,
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
