"""A run in which nothing moves says what it waits for, and goes on. On the real stack."""

from __future__ import annotations

import json

import psutil
import pytest
from main_job import MainJob

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.stand_in]


def account_of(job: MainJob, name: str) -> str | None:
    """The account of a stall that names this process."""
    texts = (file.read_text() for file in job.run_dir.glob("logs/latest/stall_*.txt"))
    return next((text for text in texts if f"(launcher.stall_timeout): see {name}\n" in text), None)


def test_a_stopped_trainer_and_a_stopped_server_are_named_and_the_run_completes(start):
    job: MainJob = start(
        "run", "max_steps=30", "orchestrator.batch_size=64", "launcher.stall_timeout=12", "inference.hung_timeout=400", "ckpt.interval=null"
    )
    for name in ("trainer", "inference_0"):
        job.until_step(max((record["step"] for record in job.metrics("trainer")), default=0) + 3)
        pid = json.loads((job.run_dir / "heartbeats" / f"{name}.json").read_text())["pid"]
        whole = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]  # a server's role has vLLM's processes
        for process in whole:
            process.suspend()
        try:
            head = job.until(lambda name=name: account_of(job, name), f"account of {name}")
        finally:
            for process in whole:
                process.resume()
        assert f"stopped by a signal (process {pid} on " in head
        assert "== orchestrator\nthread MainThread\n" in head, "the stacks of those that answer"
    assert job.wait() == 0, job.text()
    assert job.text().count("see trainer\n") == 1
    assert job.text().count("see inference_0\n") == 1
    assert "progress again, after " in (job.run_dir / "logs" / "latest" / "launcher.log").read_text()
