"""What a run on SLURM bears and says: a server, a worker of an environment and a stopped process on nodes other than the supervisor's."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest
from slurm_job import SlurmJob, slurm
from test_slurm_runs import LONG, NODES, submit  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.slurm, pytest.mark.long]


def trained(job: SlurmJob) -> int:
    return max((record["step"] for record in job.metrics() if record["source"] == "trainer"), default=-1)


@pytest.mark.nightly
def test_a_server_and_a_worker_killed_on_their_nodes_are_started_again(submit: Callable[..., SlurmJob]) -> None:  # noqa: F811
    job = submit("run", NODES, *LONG, "max_async_level=0")
    job.until_step(1)
    worker = json.loads((job.run_dir / "stalls" / "env_reverse_text_0.process").read_text())
    os.kill(worker["pid"], signal.SIGKILL)
    replaced = lambda: any(r.get("workers/replaced_died") for r in job.metrics())  # noqa: E731
    job.until(replaced, "a record that counts the worker")
    server = job.pid("inference")
    os.kill(server, signal.SIGKILL)
    job.until(lambda: job.status()["restarts"], "the server's next start")
    step = trained(job)
    job.until_step(step + 3)
    (restart,) = job.status()["restarts"]
    assert (restart["name"], restart["log"]) == ("inference_0", "logs/attempt_0/inference_0.log")
    assert "SIGKILL" in restart["reason"]
    assert job.pid("inference") != server, job.text()
    assert "serving at http" in (job.run_dir / "logs/attempt_0/inference_0.1.log").read_text()
    slurm("scancel", job.id)
    assert job.until_over() == "interrupted", job.text()
    assert job.left() == []
    lags = [record["mismatch/kl"] for record in job.metrics() if record["source"] == "trainer"]
    assert max(lags) < 1e-6, "in float32, at lag 0: the new server has the run's weights"


@pytest.mark.stand_in
def test_a_stopped_trainer_on_another_node_is_named_and_the_run_goes_on(submit: Callable[..., SlurmJob]) -> None:  # noqa: F811
    job = submit("run", NODES, *LONG, "launcher.stall_timeout=12")
    job.until_step(1)
    pid = job.pid("trainer", 1)

    def account() -> str | None:
        """A slow machine may have stalled before, while the roles were starting."""
        texts = [file.read_text() for file in job.run_dir.glob("logs/latest/stall_*.txt")]
        return next((text for text in texts if text.splitlines()[0].endswith("see trainer_1")), None)

    os.kill(pid, signal.SIGSTOP)
    try:
        text = job.until(account, "account that names the trainer")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "== orchestrator\nthread MainThread\n" in text, "the stacks of those that answer, on other nodes too"
    job.until_step(trained(job) + 3)
    launcher = job.run_dir / "logs" / "latest" / "launcher.log"
    job.until(lambda: "progress again, after " in launcher.read_text(), "end of the stall")
    assert job.status()["state"] == "running"
    slurm("scancel", job.id)
    assert job.until_over() == "interrupted", job.text()
