"""The trainer role, as processes of its own: preempted, going on, replaying; an orchestrator's thread gives its part of checkpoints."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from rlx.transport.files import BatchReader, BatchWriter, record
from test_checkpoint_run import orchestrator_of
from test_train_role import STEPS, finish, make_run, records, reproducible, start

from rlx.checkpoints.folders import at, steps
from rlx.config.load import load_run, to_yaml
from rlx.heartbeat import read_heartbeats
from rlx.paths import RunPaths, write_text
from rlx.runs.rewind import rewind
from rlx.weights.files import verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run_to_the_end(paths: RunPaths, ranks: int = 1) -> None:
    with orchestrator_of(paths, STEPS):
        finish(start(paths, ranks))


def weights(paths: RunPaths) -> dict:
    return verify(paths.weights_of(STEPS))["files"]["model.safetensors"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_preempted_trainer_leaves_a_checkpoint_and_the_next_goes_on_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    whole, cut = (make_run(tmp_path / name, ranks, **{"ckpt.interval": "null"}) for name in ("whole", "cut"))
    run_to_the_end(whole, ranks)
    last = BatchReader(cut).receive(2, timeout=1)
    cut.batch_of(2).unlink()
    with orchestrator_of(cut, STEPS):
        process = start(cut, ranks)
        deadline = time.monotonic() + 150
        while "waiting for batch 2" not in json.dumps(read_heartbeats(cut)):
            assert process.poll() is None, process.communicate()[0][-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        write_text(cut.preempt, "")
        output, _ = process.communicate(timeout=100)
    assert process.returncode == (75 if ranks == 1 else 0), output[-3000:]
    assert json.loads(cut.preempted.read_text()) == {"step": 2}
    assert steps(cut) == [2]
    assert rewind(cut, warn=pytest.fail) == at(cut, 2)
    assert not cut.preempted.exists()
    BatchWriter(cut).send(last)
    run_to_the_end(cut, ranks)
    assert list(map(reproducible, records(cut))) == list(map(reproducible, records(whole)))
    assert weights(cut) == weights(whole)


def test_a_replay_trains_on_what_was_recorded_and_writes_the_same_metrics(tmp_path: Path) -> None:
    run, again = (make_run(tmp_path / name, **{"ckpt.interval": 50}) for name in ("run", "again"))
    for step in range(STEPS):
        record(run, BatchReader(run).receive(step, timeout=1))
        again.batch_of(step).unlink()
    run_to_the_end(run)
    config = load_run(again.root)
    config.replay = str(run.root)
    again.config.write_text(to_yaml(config))
    finish(start(again))
    assert list(map(reproducible, records(again))) == list(map(reproducible, records(run)))
    assert weights(again) == weights(run)
    assert [path.name for path in again.weights.iterdir()] == [f"step_{STEPS}"], "nobody serves what is in between"
    assert steps(again) == [STEPS]
