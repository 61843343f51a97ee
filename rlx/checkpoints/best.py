"""The checkpoint that is best by a metric of an evaluation, and the versions that wait for theirs. `metrics.jsonl` decides.

A rewind removes the records of later steps. So a resumed run knows as the best what was best at its starting step.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.checkpoints import folders
from rlx.config.evaluated import is_due
from rlx.config.schema import SftRoot, TrainingRoot
from rlx.metrics import read_metrics
from rlx.paths import RunPaths


def best_of(paths: RunPaths, metric: str) -> tuple[float, int] | None:
    """The highest value of the metric over all evaluations whose step has a checkpoint, and that step; the later one of equals."""
    there = set(folders.steps(paths))
    return max(((value, step) for step, value in _values(paths, metric).items() if step in there), default=None)


def kept(paths: RunPaths, metric: str, due: Callable[[int], bool]) -> set[int]:
    """The steps whose checkpoints must stay: the best one, and those that wait for their evaluation (any record of it ends the wait).

    `due`: whether the version of a step is evaluated.
    """
    records = (record["step"] for record, _ in read_metrics(paths.metrics) if record["source"] == "eval")
    best, done = best_of(paths, metric), max(records, default=-1)
    waiting = {step for step in folders.steps(paths) if step > done and due(step)}
    return waiting if best is None else {*waiting, best[1]}


def not_evaluated(cfg: TrainingRoot, paths: RunPaths, newest: int) -> set[int]:
    """The versions up to `newest` whose evaluation is due and has no record. Evaluations of `rlx sft` may be any number of steps behind."""
    if not isinstance(cfg, SftRoot) or not cfg.plays:
        return set()  # an orchestrator holds back the trainer, so `versions_kept` is enough
    done = {record["step"] for record, _ in read_metrics(paths.metrics) if record["source"] == "eval"}
    return {version for version in range(1, newest + 1) if is_due(cfg, version)} - done


def _values(paths: RunPaths, metric: str) -> dict[int, float]:
    """The metric by step."""
    return {record["step"]: record[metric] for record, _ in read_metrics(paths.metrics) if record["source"] == "eval" and metric in record}
