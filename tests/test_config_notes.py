"""What a configuration may do, but is seldom meant to, is said before the start."""

from __future__ import annotations

import pytest

from rlx.cli import main
from rlx.config.load import compose
from rlx.config.roots import SFT


def of(*overrides: str, root=None) -> list[str]:
    composed = compose(list(overrides), {}) if root is None else compose(list(overrides), {}, root)
    return [note for note in composed.notes if "warm-up" in note]


def test_a_warm_up_that_the_run_does_not_finish_is_said():
    updates = ("max_steps=10", "trainer.num_minibatches=2", "trainer.num_iterations=2")
    assert of("scheduler.warmup_steps=40", *updates) == [], "the last optimizer step has the whole rate"
    (note,) = of("scheduler.warmup_steps=41", *updates)
    assert "longer than the run's 40 optimizer steps" in note
    assert note.endswith("scheduler.warmup_steps=41 (command line)")


def test_supervised_training_says_it_too_and_a_benchmark_does_not():
    assert len(of("data.name=x/y", "max_steps=10", "scheduler.warmup_steps=11", "dry_run=true", root=SFT)) == 1
    assert of("bench=true", "max_steps=10", "scheduler.warmup_steps=11") == []


def test_it_is_said_where_a_run_is_described(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "dry_run=true", "max_steps=10", "scheduler.warmup_steps=11"]) == 0
    assert "note: the warm-up is longer than the run" in capsys.readouterr().out
