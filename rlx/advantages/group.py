"""Advantages that compare the rollouts of one prompt with each other.

An advantage is one function `f(rewards, lengths, *, its own keys) -> advantages` over all groups of a batch, in numpy alone:
rewards and lengths (trainable tokens) are lists of [G] arrays, one a group, and so is the result. Batch-wide baselines fit the same form.
To add one: such a function, and a YAML in `conf/advantage/` whose `_target_` is its dotted name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Groups = Sequence[NDArray]  # [G] of every group


def none(rewards: Groups, lengths: Groups) -> list[NDArray[np.float32]]:
    """A_i = R_i: no baseline (REINFORCE, Williams 1992)."""
    return [group.astype(np.float32) for group in map(np.asarray, rewards)]


def group_mean(rewards: Groups, lengths: Groups) -> list[NDArray[np.float32]]:
    """A_i = R_i − mean(R) (Dr. GRPO, arXiv 2503.20783)."""
    return [_centred(group, "group_mean").astype(np.float32) for group in rewards]


def group_norm(rewards: Groups, lengths: Groups, *, ddof: int = 1, eps: float = 1e-6) -> list[NDArray[np.float32]]:
    """A_i = (R_i − mean(R)) / (std(R) + eps) (GRPO, arXiv 2402.03300). `ddof` 1 is the sample standard deviation, 0 the population's."""
    centred = [_centred(group, "group_norm") for group in rewards]
    return [(group / (np.std(group, ddof=ddof) + eps)).astype(np.float32) for group in centred]


def leave_one_out(rewards: Groups, lengths: Groups) -> list[NDArray[np.float32]]:
    """A_i = R_i − mean of the others' rewards = G/(G−1) · (R_i − mean(R)) (RLOO, arXiv 2402.14740)."""
    centred = [_centred(group, "leave_one_out") for group in rewards]
    return [(group * (len(group) / (len(group) - 1))).astype(np.float32) for group in centred]


def _centred(group: NDArray, name: str) -> NDArray[np.float64]:
    """R − mean(R) in float64; exactly 0 where all rewards are equal, which a rounded mean would not give."""
    if len(group) < 2:
        raise ValueError(f"the advantage {name} compares the rollouts of a group, and this group has {len(group)}; use advantage=none")
    shifted = np.asarray(group, dtype=np.float64) - np.float64(group[0])
    return shifted - shifted.mean()
