"""Which metrics a report draws, in which chart. One list serves single runs and sweeps; a metric that a run lacks is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlx.metrics import METRICS
from rlx.report.chart import Chart, Curve
from rlx.report.gather import Facts

TRAINER, ORCHESTRATOR, INFERENCE, EVAL, VALIDATION = "trainer", "orchestrator", "inference", "eval", "val"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart of a run: metrics of one kind and unit."""

    title: str
    source: str
    metrics: dict[str, str] = field(default_factory=dict)  # name -> label
    pattern: str | None = None  # metrics whose name matches it whole; the label is the first group
    spread: tuple[str, str] | None = None  # (metric, its standard deviation): a band of ± one
    about: str = ""
    from_zero: bool = False
    may_be_log: bool = False
    in_sweep: str | None = None  # the metric drawn for a sweep


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel(
            title="Reward",
            source=ORCHESTRATOR,
            metrics={"reward/mean": "mean"},
            spread=("reward/mean", "reward/std"),
            about="Mean over the step's rollouts before filtering; the band is ± one standard deviation of rollouts.",
            in_sweep="reward/mean",
        ),
        Panel(title="Reward by environment", source=ORCHESTRATOR, pattern=r"reward/([^/]+)/mean", about="Mean reward of each environment."),
        Panel(
            title="Reward functions",
            source=ORCHESTRATOR,
            pattern=r"reward/([^/]+/(?!mean$)[^/]+)",
            about="Mean of each reward function, unweighted.",
        ),
        Panel(
            title="Entropy",
            source=TRAINER,
            metrics={"policy/entropy": "policy"},
            about="Mean over trainable tokens, nats.",
            in_sweep="policy/entropy",
        ),
        Panel(
            title="Loss",
            source=TRAINER,
            metrics={"loss/total": "total", "loss/kl": "KL term", "loss/entropy": "entropy term"},
            about="What is minimised, and its weighted terms. A policy loss says little by its size: advantages have mean 0.",
        ),
        Panel(
            title="Negative log-probability",
            source=TRAINER,
            metrics={"loss/nll": "of the trained tokens"},
            about="Mean over the tokens that supervised training learns, nats.",
            in_sweep="loss/nll",
        ),
        Panel(
            title="Validation loss",
            source=VALIDATION,
            metrics={"val/loss": "of the validation rows"},
            about="Mean over their learned tokens, nats.",
            in_sweep="val/loss",
        ),
        Panel(
            title="Gradient norm",
            source=TRAINER,
            metrics={"optim/grad_norm": "before clipping"},
            from_zero=True,
            may_be_log=True,
            in_sweep="optim/grad_norm",
        ),
        Panel(title="Learning rate", source=TRAINER, metrics={"optim/lr": "learning rate"}, from_zero=True),
    ),
    "Off-policy": (
        Panel(
            title="Mismatch of trainer and engine",
            source=TRAINER,
            metrics={"mismatch/kl": "KL (k3)"},
            about="KL between trainer and inference on the sampled tokens, nats. With a lag it includes the updates between.",
            from_zero=True,
            may_be_log=True,
            in_sweep="mismatch/kl",
        ),
        Panel(
            title="KL to the reference",
            source=TRAINER,
            metrics={"ref/kl": "KL (k3)"},
            about="KL between trainer and reference model on the sampled tokens, nats.",
            from_zero=True,
            in_sweep="ref/kl",
        ),
        Panel(
            title="Lag",
            source=TRAINER,
            metrics={"off_policy/lag_mean": "mean", "off_policy/lag_max": "largest"},
            about="Age of the trained tokens, policy versions.",
            from_zero=True,
            in_sweep="off_policy/lag_mean",
        ),
        Panel(
            title="Clipped and dropped",
            source=TRAINER,
            metrics={
                "policy/clip_frac_low": "clipped low",
                "policy/clip_frac_high": "clipped high",
                "policy/masked_frac": "dropped",
            },
            about="Shares of the trainable tokens (of sequences for gspo and rloo).",
            from_zero=True,
        ),
        Panel(
            title="Importance ratio",
            source=TRAINER,
            metrics={"policy/ratio_mean": "mean", "policy/ratio_min": "smallest", "policy/ratio_max": "largest"},
            may_be_log=True,
        ),
        Panel(
            title="Effective sample size",
            source=TRAINER,
            metrics={"policy/ess": "share"},
            about="(Σw)² / (N Σw²) of the tokens' weights in the objective.",
            from_zero=True,
        ),
    ),
    "Lengths": (
        Panel(
            title="Completion length",
            source=ORCHESTRATOR,
            metrics={"length/completion_mean": "mean", "length/completion_max": "largest"},
            about="Sampled tokens per rollout.",
            from_zero=True,
            in_sweep="length/completion_mean",
        ),
        Panel(
            title="Truncated",
            source=ORCHESTRATOR,
            metrics={"length/truncated_frac": "share"},
            about="Share of rollouts cut by a length limit.",
            from_zero=True,
        ),
        Panel(
            title="Groups without advantage",
            source=ORCHESTRATOR,
            metrics={"batch/zero_advantage_frac": "share"},
            about="Share of groups whose advantages are all 0: they teach nothing.",
            from_zero=True,
        ),
    ),
    "Time": (
        Panel(
            title="Stages of the trainer",
            source=TRAINER,
            metrics={
                "time/step": "step",
                "time/wait_batch": "wait for batch",
                "time/forward_backward": "forward and backward",
                "time/optimizer": "optimizer",
                "time/broadcast": "gather weights",
            },
            about="Seconds. Stages may overlap.",
            from_zero=True,
        ),
        Panel(
            title="Stages of the orchestrator",
            source=ORCHESTRATOR,
            metrics={
                "time/step": "step",
                "time/wait_rollouts": "wait for rollouts",
                "time/wait_weights": "wait for weights",
                "time/update_weights": "update servers",
            },
            about="Seconds. Servers are updated while rollouts are waited for.",
            from_zero=True,
            in_sweep="time/step",
        ),
        Panel(
            title="Tokens per second",
            source=ORCHESTRATOR,
            metrics={"perf/inference_tokens_per_second": "sampled"},
            about="Over the whole step.",
            from_zero=True,
            in_sweep="perf/inference_tokens_per_second",
        ),
        Panel(title="Duration of a rollout", source=ORCHESTRATOR, metrics={"time/rollout_mean": "mean", "time/rollout_max": "largest"}),
        Panel(
            title="Rollouts in flight",
            source=ORCHESTRATOR,
            metrics={"perf/in_flight": "in flight", "perf/max_concurrent": "allowed"},
            from_zero=True,
        ),
        Panel(
            title="Cache of the servers",
            source=INFERENCE,
            metrics={"perf/kv_cache_usage": "share in use"},
            about=METRICS["perf/kv_cache_usage"].capitalize() + ".",
            from_zero=True,
        ),
    ),
    "Dropped rollouts": (
        Panel(
            title="Dropped and failed so far",
            source=ORCHESTRATOR,
            pattern=r"rollouts/((?:dropped|failed)_.+)",
            about="Rollouts since the run began, by cause. Dropped rollouts go by whole groups; failed attempts may have been repeated.",
            from_zero=True,
        ),
        Panel(
            title="Groups left out by filters",
            source=ORCHESTRATOR,
            pattern=r"filter/(.+)",
            about="Groups of the step that a rule of orchestrator.difficulty_filter dropped.",
            from_zero=True,
        ),
    ),
}


def charts(facts: Facts, panels: Sequence[Panel]) -> Iterator[Chart]:
    """The charts of one run."""
    for panel in panels:
        found = _metrics(panel, facts)
        lines = []
        for place, (name, label) in enumerate(found.items()):
            x, y = facts.series(name, panel.source)
            unused = (place > 0 and name.startswith("loss/")) or (panel.pattern is not None and panel.source == ORCHESTRATOR)
            if not len(x) or (unused and "reward" not in name and not np.any(y != 0)):
                continue  # a term that the objective does not have, a cause that never occurred
            ends = _spread(facts, panel, x, y) if panel.spread and name == panel.spread[0] else (None, None)
            lines.append(Curve(label=label, x=x, y=y, low=ends[0], high=ends[1], colour=place))
        repeats = panel.pattern is not None and panel.pattern.startswith("reward/") and len(lines) == 1  # the mean reward
        if lines and not repeats:
            yield Chart(title=panel.title, lines=lines, about=panel.about, from_zero=panel.from_zero, may_be_log=panel.may_be_log)


def _metrics(panel: Panel, facts: Facts) -> dict[str, str]:
    if panel.pattern is None:
        return panel.metrics
    matches = ((name, re.fullmatch(panel.pattern, name)) for name in facts.names(panel.source))
    return {name: match[1].replace("_", " ") for name, match in matches if match}


def _spread(facts: Facts, panel: Panel, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    assert panel.spread is not None
    at, std = facts.series(panel.spread[1], panel.source)
    return (y - std, y + std) if np.array_equal(at, x) else (None, None)


def evaluations(facts: Facts) -> Iterator[Chart]:
    """One chart for each evaluated environment and kind of score: avg@n with its interval, and pass@k."""
    names = facts.names(EVAL)
    for env in dict.fromkeys(name.split("/")[1] for name in names if name.startswith("eval/")):
        scores = [name for name in names if re.fullmatch(rf"eval/{re.escape(env)}/(avg|pass)@\d+", name)]
        scores.sort(key=lambda name: (name.rpartition("/")[2].partition("@")[0], int(name.rpartition("@")[2])))
        lines = []
        for place, name in enumerate(scores):
            x, y = facts.series(name, EVAL)
            (at, low), (_, high) = (facts.series(f"{name}_{end}", EVAL) for end in ("low", "high"))
            known = place == 0 and np.array_equal(at, x) and len(high) == len(low)
            label, ends = name.rpartition("/")[2], (low, high) if known else (None, None)
            lines.append(Curve(label=label, x=x, y=y, low=ends[0], high=ends[1], colour=place, marks=place == 0))
        if lines:
            about = f"Evaluation on {env}, by policy version; 95 % intervals over examples."
            yield Chart(title=f"{env}: scores", lines=lines, about=about, x_label="version", may_be_log=False)
