"""The checkpoint that is best by a metric of an evaluation, and the versions that wait for theirs. `metrics.jsonl` decides.

A rewind removes the records of later steps. So a resumed run knows as the best what was best at its starting step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from rlx.checkpoints import folders
from rlx.config.evaluated import is_due, pins
from rlx.config.schema import Config, EvaluatedRun, TrainingRoot
from rlx.metrics import read_metrics
from rlx.paths import RunPaths


def best_of(paths: RunPaths, metric: str) -> tuple[float, int] | None:
    """The highest value of the metric over all evaluations whose step has a checkpoint, and that step; the later one of equals."""
    return _best(_evaluations(paths), folders.steps(paths), metric)


def kept(paths: RunPaths, metric: str, due: Callable[[int], bool]) -> set[int]:
    """The steps whose checkpoints must stay: the best one, and those that wait for their evaluation (any record of it ends the wait).

    `due`: whether the version of a step is evaluated.
    """
    # Read once: a record that another process writes meanwhile would end a step's wait without making it the best.
    records, steps = _evaluations(paths), folders.steps(paths)
    done = max((record["step"] for record in records), default=-1)
    waiting = {step for step in steps if step > done and due(step)}
    best = _best(records, steps, metric)
    return waiting if best is None else {*waiting, best[1]}


def not_evaluated(cfg: TrainingRoot, paths: RunPaths, newest: int) -> set[int]:
    """The versions up to `newest` whose evaluation is due and has no record: a killed run evaluates them when it resumes.

    Evaluations of `rlx sft` may be any number of steps behind, and those of `rlx train` that do not hold back the updates.
    """
    if not isinstance(cfg, EvaluatedRun) or not cfg.plays or (isinstance(cfg, Config) and pins(cfg)):
        return set()  # updates wait for an evaluation, so `versions_kept` is enough
    done = {record["step"] for record in _evaluations(paths)}
    return {version for version in range(newest + 1) if is_due(cfg, version)} - done


def _evaluations(paths: RunPaths) -> list[dict[str, Any]]:
    return [record for record, _ in read_metrics(paths.metrics) if record["source"] == "eval"]


def _best(records: Iterable[dict[str, Any]], steps: Collection[int], metric: str) -> tuple[float, int] | None:
    last = {record["step"]: record[metric] for record in records if metric in record}  # the last record of a step counts
    return max(((value, step) for step, value in last.items() if step in steps), default=None)
