"""Checkpoints as folders: whole or absent, found by step, damaged ones skipped; the newest and the best are kept."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import xxhash

from rlx.checkpoints import folders
from rlx.checkpoints.folders import NoCheckpoint, best_of, kept, not_evaluated
from rlx.checkpoints.orchestrator import STATE, Snapshots, read_state
from rlx.config.load import compose
from rlx.config.roots import SFT
from rlx.metrics import MetricsWriter, read_metrics
from rlx.paths import COMPLETE, RunPaths
from rlx.rollout.state import OrchestratorState
from rlx.runs.rewind import trim_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """Stands for any state."""

    SCHEMA: ClassVar[str] = "tests.Number/1"
    number: int


def write(paths: RunPaths, step: int, content: bytes = b"weights") -> Path:
    folder = folders.begin(paths, step)
    (folder / "trainer").mkdir()
    (folder / "trainer" / "shard").write_bytes(content)
    files = {"trainer/shard": {"size": len(content), "xxh3": xxhash.xxh3_64(content).hexdigest()}}
    return folders.finish(paths, step, files, {"ranks": 1})


def test_a_checkpoint_appears_whole_and_is_found(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    folder = folders.begin(paths, 5)
    (folder / "trainer").mkdir()
    assert (folders.steps(paths), folders.newest(paths, pytest.fail)) == ([], None)
    assert list(folders.being_written(paths)) == [(5, folder)]
    write(paths, 5)
    write(paths, 10)
    assert list(folders.being_written(paths)) == []
    start = folders.newest(paths, pytest.fail)
    assert (start.step, start.checkpoint) == (10, tmp_path / "checkpoints" / "step_10")
    assert folders.at(paths, 5).step == 5
    with pytest.raises(NoCheckpoint, match=r"no checkpoint of step 7; it has those of: 5, 10"):
        folders.at(paths, 7)


def test_a_step_that_is_reached_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    write(paths, 5, b"old")
    folder = write(paths, 5, b"new")
    assert (folder / "trainer" / "shard").read_bytes() == b"new"
    assert [path.name for path in paths.checkpoints.iterdir()] == ["step_5"]


DAMAGES = {
    "a flipped bit": lambda folder: (folder / "trainer" / "shard").write_bytes(b"weighty"),
    "a short file": lambda folder: (folder / "trainer" / "shard").write_bytes(b"wei"),
    "a missing file": lambda folder: (folder / "trainer" / "shard").unlink(),
    "no marker": lambda folder: (folder / COMPLETE).unlink(),
    "half a marker": lambda folder: (folder / COMPLETE).write_text('{"step": 10, "fi'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_warning_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    paths = RunPaths(tmp_path)
    write(paths, 5)
    DAMAGES[damage](write(paths, 10))
    said: list[str] = []
    start = folders.newest(paths, said.append)
    assert start.step == 5
    assert len(said) == 1
    assert said[0].startswith("skipping checkpoint step_10: ")
    with pytest.raises(NoCheckpoint, match="is damaged"):
        folders.at(paths, 10)


@pytest.mark.parametrize(
    ("last", "interval", "kept"),
    [(None, None, [2, 4, 6, 8, 10]), (1, None, [10]), (2, None, [8, 10]), (2, 4, [4, 8, 10]), (9, None, [2, 4, 6, 8, 10])],
)
def test_the_newest_are_kept_and_those_of_the_interval(tmp_path: Path, last: int | None, interval: int | None, kept: list[int]) -> None:
    paths = RunPaths(tmp_path)
    for step in (2, 4, 6, 8, 10):
        write(paths, step)
    gone = folders.prune(paths, last, interval)
    assert folders.steps(paths) == kept
    assert sorted([*gone, *kept]) == [2, 4, 6, 8, 10]
    assert sorted(path.name for path in paths.checkpoints.iterdir()) == sorted(f"step_{step}" for step in kept)


def test_the_orchestrator_writes_the_state_of_the_step_that_is_asked_for(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    snapshots = Snapshots(paths, keep=3)
    for step in range(1, 7):
        snapshots.take(step, Number(number=step))
    assert snapshots.answer() == []
    folder = folders.begin(paths, 5)
    assert snapshots.answer() == [5]
    assert snapshots.answer() == []
    assert read_state(folder, Number) == Number(number=5)
    folders.begin(paths, 3)
    with pytest.raises(RuntimeError, match=r"after step 3, but only those of \[4, 5, 6\] are kept"):
        snapshots.answer()
    folders.abandon(paths, 3)
    (folder / "orchestrator" / STATE).unlink()
    with pytest.raises(ValueError, match=r"no orchestrator state \(orchestrator/state.rlx\): it was written by a replay"):
        read_state(folder, Number)


def test_a_state_that_cannot_be_read_says_why_and_where(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    folder = folders.begin(paths, 1)
    snapshots = Snapshots(paths, keep=3)
    snapshots.take(1, Number(number=1))
    snapshots.answer()
    file = folder / "orchestrator" / STATE
    content = file.read_bytes()
    for damaged, why in (
        (content[:-9], "they were cut short or damaged"),
        (content[:-1] + b"x", "damaged after they were written"),
        (pickle.dumps({"number": 1}), "bytes are no tests.Number/1"),
        (pickle.dumps({"number": list(range(99))}), "bytes are no tests.Number/1"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=re.escape(f"{file} cannot be read: ") + ".*" + re.escape(why)):
            read_state(folder, Number)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"this is a tests\.Number/1, but this rlx reads rlx\.OrchestratorState/\d"):
        read_state(folder, OrchestratorState)


def test_of_a_checkpoint_that_a_user_has_moved_and_linked_only_the_link_goes(tmp_path: Path) -> None:
    paths, elsewhere = RunPaths(tmp_path / "run"), tmp_path / "elsewhere"
    for step in (5, 10, 15):
        write(paths, step)
    paths.checkpoint_of(5).rename(elsewhere)
    paths.checkpoint_of(5).symlink_to(elsewhere)
    assert folders.prune(paths, 1, None) == [5, 10]
    assert folders.steps(paths) == [15]
    assert (elsewhere / "trainer" / "shard").exists()
    paths.checkpoint_of(20).symlink_to(elsewhere)
    write(paths, 20)
    assert not paths.checkpoint_of(20).is_symlink()
    assert (elsewhere / COMPLETE).exists()


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
