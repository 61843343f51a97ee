"""Plot two metrics of several runs into one PNG, over their steps or over minutes since the first rollout was begun.

python tools/plot_run.py docs/reward.png outputs/run_a outputs/run_b …
python tools/plot_run.py --minutes docs/reward_smollm2.png outputs/run_a …
python tools/plot_run.py ce.png outputs/student --metrics 'trainer:ce/nll=cross-entropy' 'eval:eval/reverse_text/avg@1=reward'

A metric is SOURCE:NAME=LABEL; by default the mean reward and the policy's entropy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

METRICS = ("orchestrator:reward/mean=mean reward", "trainer:policy/entropy=entropy, nats per token")


def series(run: Path, source: str, name: str, minutes: bool) -> tuple[list[float], list[float]]:
    """Steps (or minutes) and values of one metric of one run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    began = 0.0
    if minutes:
        first = min((r for r in records if r["source"] == "orchestrator"), key=lambda r: r["step"])
        began = first["time"] - first["time/step"]
    found = [((r["time"] - began) / 60 if minutes else r["step"], r[name]) for r in records if r["source"] == source and name in r]
    if not found:
        raise SystemExit(f"{run} has no record of source {source} with {name}")
    return [at for at, _ in found], [value for _, value in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--minutes", action="store_true")
    parser.add_argument("--metrics", nargs=2, default=METRICS, metavar="SOURCE:NAME=LABEL")
    args = parser.parse_args()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, metric in zip(axes, args.metrics, strict=True):
        (source, _, rest), where = metric.partition(":"), metric.partition("=")[0]
        name, _, label = rest.partition("=")
        for run in args.runs:
            axis.plot(*series(run, source, name, args.minutes), label=run.name, linewidth=1.5)
        axis.set_xlabel("minutes" if args.minutes else "step")
        axis.set_ylabel(label or where)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
        if "reward" in label:
            axis.set_ylim(0, 1.02)
        else:
            axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
    axes[0].legend(frameon=False)
    figure.savefig(args.target, dpi=130)


if __name__ == "__main__":
    main()
