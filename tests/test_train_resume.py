"""The trainer role in its own processes: preempted, resumed, replaying. A thread writes the orchestrator's part of checkpoints."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from test_checkpoint_run import orchestrator_of
from test_train_role import STEPS, finish, make_run, records, reproducible, start

from rlx import codec
from rlx.checkpoints.folders import at, steps
from rlx.config.load import load_run, to_yaml
from rlx.heartbeat import read_heartbeats
from rlx.paths import RunPaths, write_text
from rlx.rollout.record import record_batch
from rlx.runs.rewind import rewind
from rlx.types import StepBatch
from rlx.weights.files import verify

pytestmark = [pytest.mark.slow]


def run_to_the_end(paths: RunPaths, ranks: int = 1) -> None:
    with orchestrator_of(paths, STEPS):
        finish(start(paths, ranks))


def weights(paths: RunPaths) -> dict:
    return verify(paths.weights_of(STEPS))["files"]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.long)])
def test_a_preempted_trainer_leaves_a_checkpoint_and_the_next_goes_on_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    whole, cut = (make_run(tmp_path / name, ranks, **{"ckpt.interval": "null"}) for name in ("whole", "cut"))
    run_to_the_end(whole, ranks)
    last = cut.batch_of(2).read_bytes()
    cut.batch_of(2).unlink()
    with orchestrator_of(cut, STEPS):
        process = start(cut, ranks)
        deadline = time.monotonic() + 300
        while "waiting for batch 2" not in json.dumps(read_heartbeats(cut)):
            assert process.poll() is None, process.communicate()[0][-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        write_text(cut.preempt, "")
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 75, output[-3000:]
    assert json.loads(cut.preempted.read_text()) == {"step": 2}
    assert steps(cut) == [2]
    assert rewind(cut, warn=pytest.fail) == at(cut, 2)
    assert not cut.preempted.exists()
    cut.batch_of(2).write_bytes(last)
    run_to_the_end(cut, ranks)
    assert list(map(reproducible, records(cut))) == list(map(reproducible, records(whole)))
    assert weights(cut) == weights(whole)


def recorded_run(root: Path) -> RunPaths:
    """A run that trained on batches and recorded them."""
    run = make_run(root, **{"ckpt.interval": 50})
    for step in range(STEPS):
        record_batch(run.recorded_of(step), codec.decode(run.batch_of(step).read_bytes(), StepBatch))
    run_to_the_end(run)
    return run


def make_replay(root: Path, run: RunPaths, ranks: int = 1, **keys: object) -> RunPaths:
    again = make_run(root, ranks, **{"ckpt.interval": 50}, **keys)
    shutil.rmtree(again.batches)
    config = load_run(again.root)
    config.replay = str(run.root)
    again.config.write_text(to_yaml(config))
    return again


def test_a_replay_trains_on_what_was_recorded_and_writes_the_same_metrics(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run")
    again = make_replay(tmp_path / "again", run)
    finish(start(again))
    assert list(map(reproducible, records(again))) == list(map(reproducible, records(run)))
    assert weights(again) == weights(run)
    assert [path.name for path in again.weights.iterdir()] == [f"step_{STEPS}"], "a replay serves no versions in between"
    assert steps(again) == [STEPS]


@pytest.mark.long
def test_a_replay_packs_for_its_own_ranks_rows_and_mini_batches(tmp_path: Path) -> None:
    """The record holds samples. Other ranks and longer rows change only rounding; another split gives other optimizer steps."""
    run = recorded_run(tmp_path / "run")
    ranks = make_replay(tmp_path / "ranks", run, ranks=2)
    rows = make_replay(tmp_path / "rows", run, **{"trainer.micro_batch_tokens": 1000})
    for again, processes in ((ranks, 2), (rows, 1)):
        finish(start(again, processes))
        for ours, theirs in zip(records(again), records(run), strict=True):
            for name, value in reproducible(theirs).items():
                if name != "source":
                    assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    once = make_replay(tmp_path / "once", run, **{"trainer.num_minibatches": 1})
    finish(start(once))
    assert [record["step"] for record in records(once)] == list(range(STEPS))
    assert weights(once) != weights(run), "one optimizer step per batch instead of two"
