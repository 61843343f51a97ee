"""The display of supervised training, of evaluations, and of data that was made."""

from __future__ import annotations

import json
from pathlib import Path

from test_console import rendered

from rlx.cli.console import Console
from rlx.cli.playing import PlayDisplay
from rlx.config.load import compose
from rlx.config.roots import EVAL, SFT, SYNTHESIZE
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths


def test_supervised_training_shows_losses_what_was_left_out_and_how_to_train_on(tmp_path: Path):
    cfg = compose(["data=fake", f"run.dir={tmp_path}", "max_steps=4"], {}, SFT).cfg
    trainer, held_out = (MetricsWriter(RunPaths(tmp_path).metrics, source) for source in ("trainer", "val"))
    for step in range(4):
        trainer.write(step, {"loss/nll": 2.0 - step / 4, "data/overlong": 1.0, "data/epoch": 0.5, "time/step": 1.0})
    held_out.write(4, {"val/loss": 1.5, "val/truncated": 2.0})
    console = Console(tmp_path, cfg)
    console.update()
    assert "step 4/4" in rendered(console)
    assert "loss 1.250   val 1.500 (step 4)   epoch 0.50" in rendered(console)
    text = console.summary(0)
    assert "  loss      1.625 → 1.625" in text
    assert "  dropped   4 samples longer than seq_len, of the validation 2 samples cut to seq_len" in text
    assert f" model.name={tmp_path}/weights/step_4   # reinforcement learning from the result" in text


def test_an_evaluation_shows_its_rollouts_the_time_left_and_what_is_in_flight(tmp_path: Path, capsys):
    now = {"what": "sums at step 10", "done": 60, "total": 100, "before": 50, "seconds": 5.0}
    now |= {"tokens": 500, "in_flight": 8, "oldest": 12.0, "failed": 3}
    display = PlayDisplay(tmp_path, compose(["env=sums", "num_examples=100"], {}, EVAL).cfg)
    assert display.progress() is None
    display.paths.progress.write_text(json.dumps(now))
    display.update()
    line = capsys.readouterr().out.splitlines()[-1].partition("] ")[2]
    assert line == (
        "sums at step 10: rollouts 60/100   2.0 rollouts/s   100 tok/s   8 in flight, the oldest for 0:12   3 failed   ETA 0:20"
    )
    display.paths.progress.write_text(json.dumps(now | {"before": 60}))
    assert display.progress().left is None


def test_synthesized_data_is_counted_and_the_next_command_trains_on_it(tmp_path: Path):
    display = PlayDisplay(tmp_path, compose(["env=sums"], {}, SYNTHESIZE).cfg)
    metadata = display.paths.synthesized.with_name("metadata.json")
    metadata.parent.mkdir()
    counts = {"played": 8, "kept": 2}
    found = {"rollouts": counts | {"dropped": {"reward": 6}}, "examples": counts, "reward": {"played": 0.25, "kept": 1.0}}
    metadata.write_text(json.dumps(found | {"file": str(metadata), "rows": 2, "raw_text_rows": 0}))
    text = display.summary(0)
    assert "  kept      2 rollouts of 2 examples, mean reward 1.000\n  dropped   6 reward\n" in text
    assert f"sft data.name={tmp_path}/data/train.jsonl model=… seq_len=" in text
