"""When a process dies, the others stop, the cause is named, and no process survives. On the real stack."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path

import pytest
from main_job import MainJob

pytestmark = [pytest.mark.slow, pytest.mark.stand_in]
LONG = ("orchestrator.batch_size=64", "max_steps=100000", "inference.max_restarts=0")


@pytest.mark.long
@pytest.mark.parametrize("role", ["trainer", "inference", "orchestrator"])
def test_a_role_killed_in_mid_run_stops_the_run_and_is_named(start, role):
    job = start("run", *LONG)
    job.until_step(2)
    os.kill(job.pids()[role], signal.SIGKILL)
    assert job.wait() == 1
    job.wait_until_nothing_is_left()
    cause = job.status()["cause"]
    assert (cause["role"], cause["returncode"]) == (role, -signal.SIGKILL), job.text()
    assert job.status()["state"] == "failed"
    assert cause["last_lines"]
    assert "SIGKILL" in job.text()
    assert role in job.text()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_an_interrupted_run_keeps_what_it_has_trained_and_ends_cleanly(start, number):
    job = start("run", *LONG, "ckpt.interval=50")
    job.until_step(1)
    os.kill(job.process.pid, number)
    assert job.wait() == 130
    job.wait_until_nothing_is_left()
    status = job.status()
    assert status["state"] == "interrupted"
    (kept,) = (job.run_dir / "checkpoints").iterdir()
    assert kept.name == f"step_{status['step']}"
    assert (kept / "COMPLETE").exists()
    assert f"the newest checkpoint is step {status['step']}" in job.text()
    assert "resume=latest" in job.text()


@pytest.mark.long
def test_a_port_that_is_taken_is_said(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        job = start("run", *LONG, f"inference.port={taken.getsockname()[1]}")
        assert job.wait() == 2
    assert "inference.port" in job.text()
    assert "Nothing was started" in job.text()
    job.wait_until_nothing_is_left()


@pytest.fixture
def in_warm_start(start, tmp_path: Path) -> MainJob:
    """A run in the warm start of its model, which is not cached."""
    job = start("run", *LONG, env={"RLX_CACHE": str(tmp_path / "cache")})
    beat = job.run_dir / "heartbeats" / "prepare.json"
    job.until(lambda: beat.exists() and json.loads(beat.read_text())["phase"].startswith("warm start"), "warm start")
    return job


def models(folder: Path) -> list[Path]:
    """The models that a cache offers to other runs."""
    return [path for path in (folder / "models").iterdir() if not path.name.startswith(".")]


@pytest.mark.long
def test_prepare_killed_in_its_warm_start_stops_the_run_and_leaves_no_model(in_warm_start, tmp_path):
    os.kill(in_warm_start.pids()["prepare"], signal.SIGKILL)
    assert in_warm_start.wait() == 1
    in_warm_start.wait_until_nothing_is_left()
    cause = in_warm_start.status()["cause"]
    assert (cause["role"], cause["returncode"]) == ("prepare", -signal.SIGKILL), in_warm_start.text()
    assert models(tmp_path / "cache") == []


@pytest.mark.long
def test_one_of_two_trainer_ranks_killed_stops_the_run(start):
    job = start("run", *LONG, "hardware.trainer_processes=2", "model.warm_start.steps=4")
    job.until_step(1)  # five processes import torch, one more than in the other runs
    assert job.listens_on() == {"127.0.0.1"}
    os.kill(job.pids()["trainer_1"], signal.SIGKILL)
    assert job.wait() == 1
    job.wait_until_nothing_is_left()
    cause = job.status()["cause"]
    assert (job.status()["state"], cause["role"], cause["replica"], cause["returncode"]) == ("failed", "trainer", 1, -9), job.text()
