"""What a configuration may do, but is seldom meant to, is said before the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlx.cli import main
from rlx.config.load import compose
from rlx.config.roots import SFT


def of(*overrides: str, root=None) -> list[str]:
    composed = compose(list(overrides), {}) if root is None else compose(list(overrides), {}, root)
    return [note for note in composed.notes if "warm-up" in note]


def test_a_warm_up_that_the_run_does_not_finish_is_said():
    assert of("max_steps=10", "scheduler.warmup_steps=40", "optim.lr=2e-5") == [
        "the warm-up is longer than the run, so the learning rate never reaches optim.lr=2e-05 (command line): it ends at 5e-06. "
        "scheduler.warmup_steps=40 (command line); max_steps=10 (command line)"
    ]
    updates = ("trainer.num_minibatches=2", "trainer.num_iterations=2")
    assert of("max_steps=10", "scheduler.warmup_steps=40", *updates) == [], "the last optimizer step has the whole rate"
    (note,) = of("max_steps=10", "scheduler.warmup_steps=41", *updates)
    assert note.endswith("max_steps=10 (command line), 4 optimizer steps each")


def test_supervised_training_says_it_too_and_a_benchmark_does_not():
    assert len(of("data.name=x/y", "max_steps=10", "scheduler.warmup_steps=11", "dry_run=true", root=SFT)) == 1
    assert of("bench=true", "max_steps=10", "scheduler.warmup_steps=11") == []


def test_it_is_said_where_a_run_is_described(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "dry_run=true", "max_steps=10", "scheduler.warmup_steps=11"]) == 0
    assert "note: the warm-up is longer than the run" in capsys.readouterr().out


@pytest.mark.parametrize("nested", [False, True], ids=["text", "text_and_images"])
def test_a_folder_with_a_model_of_other_sizes_than_the_chosen_one_is_said(tmp_path: Path, nested: bool):
    def notes(**sizes: Any) -> list[str]:
        made = {"hidden_size": 1024, "vocab_size": 151936, "head_dim": None, **sizes}
        (tmp_path / "config.json").write_text(json.dumps({"text_config": made} if nested else made))
        composed = compose(["model=qwen3_0_6b", f"model.name={tmp_path}", "env=math", "hardware=node8", "dry_run=true"], {})
        return [note for note in composed.notes if "other sizes" in note]

    assert notes(num_hidden_layers=28) == []
    (note,) = notes(num_hidden_layers=36)
    assert f"than that in model.name={tmp_path} (command line): model.num_layers=28 (" in note
    assert (
        "), but num_hidden_layers=36 in config.json. Choose the option of model= that describes it, or set model.num_layers=36 and" in note
    )
