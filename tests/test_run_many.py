"""A shared trainer and two runs, each started by its command, on real vLLM."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from main_job import MainJob, read_metrics

from rlx.heartbeat import read_heartbeats
from rlx.paths import RunPaths
from rlx.weights.files import verify, versions

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def trained(run: Path) -> dict[int, dict]:
    return {record["step"]: record for record in read_metrics(run) if record["source"] == "trainer"}


def test_two_runs_share_a_trainer_and_one_whose_orchestrator_is_killed_resumes_beside_the_other(tmp_path: Path):
    host = MainJob(tmp_path / "host", "trainer.max_concurrent_runs=2", "lora.rank=8", "trainer.batch_wait=30")
    jobs = []
    try:
        present = tmp_path / "host" / "membership" / "present"
        host.until(present.exists, "the trainer's start")
        # Without the check of environments, whose results are kept for one run and perhaps not for the other: both join at about one time.
        shared = (f"trainer.shared_trainer_dir={tmp_path / 'host'}", "lora.rank=8", "ckpt.interval=2", "launcher.check_envs=false")
        words, sums = tmp_path / "host" / "run_words", tmp_path / "host" / "run_sums"
        of_words = (*shared, "max_steps=40")
        jobs = [MainJob(words, *of_words), MainJob(sums, *shared, "env=sums", "loss=gspo", "lora.alpha=16", "max_steps=6")]
        jobs[0].until(lambda: len(trained(words)) > 4 and len(trained(sums)) > 1, "some steps of both")
        os.kill(read_heartbeats(RunPaths(words))["orchestrator"]["pid"], signal.SIGKILL)
        assert jobs[0].wait() == 1
        assert "orchestrator failed: killed by SIGKILL" in jobs[0].text()
        jobs.append(MainJob(words, *of_words, "resume=latest"))
        assert jobs[1].wait() == 0, jobs[1].text()
        assert jobs[2].wait() == 0, jobs[2].text()
        host.process.send_signal(signal.SIGINT)
        assert host.wait() == 130, host.text()
    finally:
        for job in (*jobs, host):
            if job.process.poll() is None:
                job.process.terminate()
                job.wait()
    assert "run_words leaves after" in (tmp_path / "host" / "logs" / "latest" / "trainer.log").read_text()
    assert set(trained(words)) == set(range(40))
    assert set(trained(sums)) == set(range(6))
    assert max(record["perf/runs"] for record in trained(words).values()) == 2
    rewards = [record["reward/mean"] for record in read_metrics(words) if record["source"] == "orchestrator"]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    for run, last in ((words, 40), (sums, 6)):
        assert verify(RunPaths(run).weights_of(last))["version"] == last == versions(RunPaths(run).weights)[-1]
