"""Write `docs/metrics.md` from `rlx.metrics.METRICS`."""

from __future__ import annotations

from pathlib import Path

from rlx.metrics import METRICS

HEAD = """# Metrics

Every line of a run's `metrics.jsonl` is one flat JSON object: `step` (int), `source` (`trainer`, `orchestrator`, `inference`, `eval`
or `val`), `time` (seconds since the epoch), then the names below with numbers. W&B and TensorBoard get the same names, except that
`time/…` and `perf/…`, which several sources share, become `<source>/time/…` and `<source>/perf/…`. Every `interval` steps they also get
histograms of the rollouts that were trained on: `distribution/reward`, `distribution/advantage` and `distribution/completion_length`.
A killed run forwards the lines that were not forwarded when it resumes. Histograms and sampled rollouts are forwarded once, when their step
was sampled; what a kill lost there is in the run's `rollouts/`.
TensorBoard forgets the steps that a run repeats after it went back to a checkpoint; W&B keeps both values of such a step.
A step with several optimizer steps (`trainer.num_minibatches`, `trainer.num_iterations`) has the mean of theirs, each with equal weight;
`…_max` and `…_min` are the extremes and `time/…` the sum. So `ce/tokens` is the mean of an optimizer step.
`time`, `time/…` and `perf/…` are wall-clock times and rates; all other fields are reproducible.

Generated from `rlx/metrics.py` by `make docs`.

| name | meaning and unit |
| --- | --- |
"""


def render() -> str:
    """The whole page."""
    return HEAD + "".join(f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |\n" for name, meaning in METRICS.items())


if __name__ == "__main__":
    (Path(__file__).resolve().parent.parent / "docs" / "metrics.md").write_text(render())
