"""Advantages that compare the rollouts of one prompt with each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlx.advantages.base import Advantages, GroupScores
from rlx.config.loss_traits import declares

ROUNDING = 1e-12  # of the largest reward of a group: sums of a few terms in float64 differ by less


@declares(is_reward=True)
def none(groups: GroupScores) -> Advantages:
    """A_i = R_i: no baseline (REINFORCE, Williams 1992)."""
    return [np.asarray(rewards).astype(np.float32) for rewards in groups.rewards]


@declares(compares_group=True)
def group_mean(groups: GroupScores) -> Advantages:
    """A_i = R_i − mean(R) (Dr. GRPO, arXiv 2503.20783)."""
    return [centred(rewards, "group_mean").astype(np.float32) for rewards in groups.rewards]


@declares(compares_group=True, std_over="group", ranges={"ddof": "at least 0", "eps": "above 0"})
def group_norm(groups: GroupScores, *, ddof: int = 1, eps: float = 1e-6) -> Advantages:
    """A_i = (R_i − mean(R)) / (std(R) + eps) (GRPO, arXiv 2402.03300). `ddof` 1: sample standard deviation; 0: the population's."""
    return [(a / (np.std(a, ddof=ddof) + eps)).astype(np.float32) for a in (centred(r, "group_norm") for r in groups.rewards)]


@declares(compares_group=True)
def leave_one_out(groups: GroupScores) -> Advantages:
    """A_i = R_i − mean of the others' rewards = G/(G−1) · (R_i − mean(R)) (RLOO, arXiv 2402.14740)."""
    return [(a * (len(a) / (len(a) - 1))).astype(np.float32) for a in (centred(r, "leave_one_out") for r in groups.rewards)]


@declares(compares_group=True)
def opo(groups: GroupScores) -> Advantages:
    """A_i = R_i − Σ_j |y_j| R_j / Σ_j |y_j|: the baseline of least variance if all tokens weigh alike (OPO, arXiv 2505.23585).

    If no rollout has a token, nothing is trained and the baseline is the plain mean.
    """
    advantages = []
    for rewards, lengths in zip(groups.rewards, groups.lengths, strict=True):
        own = centred(rewards, "opo")
        total = np.sum(lengths, dtype=np.float64)
        advantages.append((own - (own @ np.asarray(lengths, dtype=np.float64) / total if total else 0)).astype(np.float32))
    return advantages


@declares(compares_group=True, rewards_from_0=True)
def max_rl(groups: GroupScores) -> Advantages:
    """A_i = (R_i − mean(R)) / mean(R), 0 if mean(R) = 0: maximum likelihood of success, to first order (MaxRL, arXiv 2602.02710).

    Raises ValueError for a reward below 0: the mean stands for a success rate, and a negative mean would flip the sign.
    """
    advantages = []
    for rewards, env in zip(groups.rewards, groups.envs, strict=True):
        if np.min(rewards) < 0:
            raise ValueError(
                f"advantage=max_rl divides by the mean reward, and environment {env} gave {np.min(rewards):g}: rewards must be at least 0; "
                "use advantage=group_norm, or turn reward shaping off"
            )
        mean, own = np.mean(rewards, dtype=np.float64), centred(rewards, "max_rl")
        advantages.append((own / mean if mean else np.zeros_like(own)).astype(np.float32))
    return advantages


def centred(rewards: NDArray, name: str) -> NDArray[np.float64]:
    """R − mean(R) in float64, exactly 0 if all rewards are equal up to rounding.

    0.1 + 0.2 and 0.3 differ by 6e-17. Divided by their spread, such residues would train as rewards do; so would those of a rounded mean.
    """
    if len(rewards) < 2:
        raise ValueError(f"the advantage {name} compares the rollouts of a group, but this group has {len(rewards)}; use advantage=none")
    shifted = np.asarray(rewards, dtype=np.float64) - np.float64(rewards[0])
    if np.abs(shifted).max() <= ROUNDING * np.abs(np.asarray(rewards, dtype=np.float64)).max():
        return np.zeros_like(shifted)
    return shifted - shifted.mean()
