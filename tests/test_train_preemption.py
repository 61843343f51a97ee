"""A trainer that is preempted in the middle of a step gives the step up, keeps the state from before it, and loses nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from test_train_role import finish, make_run, records, reproducible, start
from trainer_examples import make_samples, step_batch

from rlx.checkpoints import folders
from rlx.checkpoints.orchestrator import STATE
from rlx.data.source import send
from rlx.heartbeat import read_heartbeats
from rlx.paths import RunPaths, atomic
from rlx.weights.files import verify

pytestmark = [pytest.mark.slow, pytest.mark.long]
LONG = 1  # the step whose batch takes seconds
KEYS = {
    "loss": "grpo",
    "loss.proximal": "recompute",
    "loss.kl.beta": 0.05,
    "loss.kl.target_kl": 0.01,
    "ref.sync_interval": 1,
    "ref.alpha": 0.5,
    "launcher.grace": 0.05,
}


def make(root: Path, ranks: int) -> RunPaths:
    paths = make_run(root, ranks, **KEYS)
    send_long(paths, ranks)
    return paths


def send_long(paths: RunPaths, ranks: int) -> None:
    """The batch of step LONG, in thousands of micro-batches: seconds also on a fast machine."""
    samples = make_samples(groups=2500)
    half = len(samples) // 2
    send(paths, step_batch(LONG, [samples[:half], samples[half:]]))


def add_the_orchestrators_part(paths: RunPaths) -> None:
    for _, folder in folders.being_written(paths):
        if not (folder / folders.ORCHESTRATOR / STATE).exists():
            with atomic(folder / folders.ORCHESTRATOR / STATE) as temporary:
                temporary.write_bytes(b"the state")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_step_that_takes_longer_than_the_grace_is_given_up_and_trained_after_the_resume(tmp_path, ranks):
    whole = make(tmp_path / "whole", ranks)
    finish(start(whole, ranks))

    paths = make(tmp_path / "run", ranks)
    process = start(paths, ranks)
    deadline = time.monotonic() + 300
    while not read_heartbeats(paths).get("trainer", {}).get("phase", "").startswith(f"training step {LONG}"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    paths.preempt.write_text("now")
    while process.poll() is None:
        assert time.monotonic() < deadline
        add_the_orchestrators_part(paths)
        time.sleep(0.01)
    output = process.stdout.read()
    assert process.returncode == 75, output[-4000:]
    assert "giving up this step" in output
    assert json.loads(paths.preempted.read_text()) == {"step": LONG}
    assert [record["step"] for record in records(paths)] == [LONG - 1]

    saved = folders.at(paths, LONG)
    folders.write_start(paths, saved)
    for path in (paths.preempt, paths.preempted):
        path.unlink()
    send_long(paths, ranks)
    finish(start(paths, ranks))
    assert list(map(reproducible, records(paths))) == list(map(reproducible, records(whole)))
    assert len({record["ref/beta"] for record in records(whole)}) == len(records(whole)), "the KL weight moved in every step"
    ends = [verify(run.weights_of(len(records(run))))["files"] for run in (paths, whole)]
    assert ends[0] == ends[1], "bit for bit"
