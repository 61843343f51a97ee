"""The best checkpoint by an evaluation metric is not pruned, also before it is known, and after a rewind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_checkpoint_folders import write

from rlx.checkpoints import folders
from rlx.checkpoints.folders import best_of, kept, not_evaluated
from rlx.config.load import compose
from rlx.config.roots import SFT
from rlx.metrics import MetricsWriter, read_metrics
from rlx.paths import RunPaths
from rlx.runs.rewind import trim_metrics

METRIC = "eval/math/avg@4"


def every_10(step: int) -> bool:
    return step % 10 == 0


def test_the_best_checkpoint_stays_and_one_whose_evaluation_is_not_there_yet(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    writer = MetricsWriter(paths.metrics, "eval")
    writer.write(0, {METRIC: 0.9})  # version 0 has no checkpoint
    for step, value in [(10, 0.2), (20, 0.6), (30, 0.4)]:
        write(paths, step)
        assert step in kept(paths, METRIC, every_10), "its evaluation may still be the best"
        folders.prune(paths, 1, None, kept(paths, METRIC, every_10))
        writer.write(step, {METRIC: value, "eval/other/avg@1": 1.0})
    assert folders.steps(paths) == [20, 30]
    assert best_of(paths, METRIC) == (0.6, 20)
    for step in (35, 40, 45):
        write(paths, step)
        folders.prune(paths, 1, None, kept(paths, METRIC, every_10))
    assert folders.steps(paths) == [20, 40, 45], "40 waits for its evaluation, 35 has none"
    writer.write(40, {METRIC: 0.6})
    assert kept(paths, METRIC, every_10) == {40}, "the later one of equals"
    folders.prune(paths, 1, None, kept(paths, METRIC, every_10))
    assert folders.steps(paths) == [40, 45]


def test_an_evaluation_that_ends_while_checkpoints_are_pruned_deletes_no_best_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path)
    writer = MetricsWriter(paths.metrics, "eval")
    for step in (10, 20):
        write(paths, step)

    def read_and_then(*arguments: Any) -> Iterator[Any]:
        yield from list(read_metrics(*arguments))
        writer.write(10, {METRIC: 0.9})

    monkeypatch.setattr("rlx.checkpoints.folders.read_metrics", read_and_then)
    assert 10 in kept(paths, METRIC, every_10), "it waits when the file is read, and is the best afterwards"
    assert 10 in kept(paths, METRIC, every_10)


def test_a_rewind_forgets_what_was_best_later(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    writer = MetricsWriter(paths.metrics, "eval")
    for step, value in [(10, 0.2), (20, 0.6), (30, 0.9)]:
        write(paths, step)
        writer.write(step, {METRIC: value})
    trim_metrics(paths, 25)
    assert best_of(paths, METRIC) == (0.6, 20)


def test_an_evaluation_without_the_metric_lets_its_checkpoint_go(tmp_path: Path) -> None:
    """A reward function that is not there, for example. The disk would fill otherwise."""
    paths = RunPaths(tmp_path)
    writer = MetricsWriter(paths.metrics, "eval")
    for step in (10, 20):
        write(paths, step)
        writer.write(step, {"eval/math/reward/other": 1.0})
    write(paths, 30)
    assert kept(paths, "eval/math/reward/mistyped", every_10) == {30}


def test_without_a_value_there_is_no_best(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write(paths, 10)
    assert best_of(paths, METRIC) is None
    assert kept(paths, METRIC, lambda _: False) == set()


def test_supervised_training_keeps_the_versions_that_wait_for_their_evaluation(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    cfg = compose(["data=fake", "env=reverse_text", "eval.interval=4", "max_steps=14"], {}, SFT).cfg
    assert [version for version in range(15) if cfg.publishes(version)] == [0, 4, 8, 12, 14]
    assert not_evaluated(cfg, paths, 9) == {0, 4, 8}
    MetricsWriter(paths.metrics, "val").write(4, {"val/loss": 1.0})  # a validation is no evaluation
    MetricsWriter(paths.metrics, "eval").write(8, {"eval/reverse_text/avg@1": 0.5})
    assert not_evaluated(cfg, paths, 14) == {0, 4, 12, 14}
    off = compose(["data=fake", "max_steps=14"], {}, SFT).cfg
    assert not_evaluated(off, paths, 14) == set()
    assert [version for version in range(15) if off.publishes(version)] == [14]
