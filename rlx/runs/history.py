"""What a run has come to: its reward at the end, for tables, sweepers and listings. Reads the run directory only."""

from __future__ import annotations

from rlx.metrics import read_metrics
from rlx.paths import RunPaths

LAST_STEPS = 5  # the reward of one batch is noisy


def final_reward(paths: RunPaths) -> float | None:
    """Mean of `reward/mean` over the last five steps; None where there is no step."""
    rewards = {
        record["step"]: record["reward/mean"]
        for record, _ in read_metrics(paths.metrics, 0)
        if record["source"] == "orchestrator" and "reward/mean" in record
    }
    last = [rewards[step] for step in sorted(rewards)][-LAST_STEPS:]
    return sum(last) / len(last) if last else None
