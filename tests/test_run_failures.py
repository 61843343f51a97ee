"""What happens when something dies: the others stop, the cause is named, nothing is left. On the real stack."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LONG = ("orchestrator.batch_size=64", "max_steps=100000")


@pytest.mark.parametrize("role", ["inference", "orchestrator", "trainer"])
def test_a_role_killed_in_mid_run_stops_the_run_and_is_named(start, role):
    job = start("run", *LONG)
    job.until_step(2)
    os.kill(job.pids()[role], signal.SIGKILL)
    killed = time.monotonic()
    assert job.wait(timeout=15) == 1
    assert time.monotonic() - killed < 15
    job.wait_until_nothing_is_left(timeout=2)
    cause = job.status()["cause"]
    assert (cause["role"], cause["returncode"]) == (role, -signal.SIGKILL), job.text()
    assert job.status()["state"] == "failed"
    assert cause["last_lines"]
    assert "SIGKILL" in job.text()
    assert role in job.text()


@pytest.mark.parametrize("role", ["inference", "orchestrator", "trainer"])
def test_a_role_killed_at_start_up_stops_the_run(start, role):
    job = start("run", *LONG)
    os.kill(job.until_started(role), signal.SIGKILL)
    assert job.wait(timeout=15) == 1
    job.wait_until_nothing_is_left(timeout=2)
    assert job.status()["cause"]["role"] == role


def test_a_killed_supervisor_leaves_nothing_behind(start):
    job = start("run", *LONG)
    job.until_step(1)
    os.kill(job.status()["supervisor"]["pid"], signal.SIGKILL)
    job.wait_until_nothing_is_left(timeout=12)
    assert job.wait(timeout=5) == 1
    assert job.status()["state"] == "failed"


def test_a_killed_launcher_leaves_nothing_behind(start):
    job = start("run", *LONG)
    job.until_step(1)
    os.kill(job.process.pid, signal.SIGKILL)
    job.wait()
    job.wait_until_nothing_is_left(timeout=12)
    assert job.status()["state"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_cleanly_within_ten_seconds(start, number):
    job = start("run", *LONG)
    job.until_step(1)
    os.kill(job.process.pid, number)
    assert job.wait(timeout=10) == 130
    job.wait_until_nothing_is_left(timeout=1)
    assert job.status()["state"] == "interrupted"


def test_a_port_that_is_taken_is_said(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        job = start("run", *LONG, f"inference.port={taken.getsockname()[1]}")
        assert job.wait(timeout=60) == 1
    assert "inference.port" in job.text()
    assert job.status()["cause"]["role"] == "inference"
    job.wait_until_nothing_is_left(timeout=2)
