"""Plot the reward and entropy of several runs into one PNG, over their steps or over minutes since the first rollout was begun.

python tools/plot_run.py docs/reward.png outputs/run_a outputs/run_b …
python tools/plot_run.py --minutes docs/reward_smollm2.png outputs/run_a …
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def series(run: Path, source: str, name: str, minutes: bool) -> tuple[list[float], list[float]]:
    """Steps (or minutes) and values of one metric of one run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = min((r for r in records if r["source"] == "orchestrator"), key=lambda r: r["step"])
    began = first["time"] - first["time/step"]
    found = [((r["time"] - began) / 60 if minutes else r["step"], r[name]) for r in records if r["source"] == source and name in r]
    return [at for at, _ in found], [value for _, value in found]


def main() -> None:
    minutes = "--minutes" in sys.argv
    target, *runs = [Path(argument) for argument in sys.argv[1:] if argument != "--minutes"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    panels = [("orchestrator", "reward/mean", "mean reward"), ("trainer", "policy/entropy", "entropy, nats per token")]
    for axis, (source, name, label) in zip(axes, panels, strict=True):
        for run in runs:
            axis.plot(*series(run, source, name, minutes), label=run.name, linewidth=1.5)
        axis.set_xlabel("minutes" if minutes else "step")
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 1.02)
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(target, dpi=130)


if __name__ == "__main__":
    main()
