"""Preempted, killed, damaged and forked runs on the real stack write the same results as one uninterrupted run."""

from __future__ import annotations

import json
import os
import signal

import psutil
import pytest
from main_job import MainJob, reproducible_lines

from rlx.checkpoints.folders import steps
from rlx.paths import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
STEPS = 16
SHORT = ("max_async_level=0", "orchestrator.batch_size=32", f"max_steps={STEPS}", "ckpt.interval=2")


def kill_everything(job: MainJob) -> None:
    """SIGKILL every process of a run, like a power cut."""
    for process in job.processes().values():
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    job.process.wait()
    job.wait_until_nothing_is_left()


def checkpoints(job: MainJob) -> list[int]:
    return steps(RunPaths(job.run_dir))


@pytest.mark.nightly
def test_a_run_that_was_preempted_killed_and_damaged_writes_what_an_uninterrupted_one_writes(start):
    whole = start("whole", *SHORT)
    assert whole.wait() == 0, whole.text()
    for record in whole.metrics("trainer"):
        assert record["mismatch/kl"] <= 1e-6, "trainer and engine agree on the policy"
        assert record["off_policy/lag_max"] == 0

    first = start("run", *SHORT, "ckpt.interval=null")
    first.until_step(1)
    os.kill(first.status()["supervisor"]["pid"], signal.SIGUSR2)
    assert first.wait() == 75, first.text()
    assert first.status()["state"] == "preempted"
    first.wait_until_nothing_is_left()
    (saved,) = (first.run_dir / "checkpoints").iterdir()
    step = json.loads((saved / "COMPLETE").read_text())["step"]
    assert 2 <= step < STEPS
    assert step == first.status()["step"]
    refused = start("run", *SHORT)
    assert refused.wait() == 2
    assert "resume=latest" in refused.text()

    second = start("run", *SHORT, "resume=latest", "ckpt.interval=1", "ckpt.save_async=true")
    second.until(lambda: max(checkpoints(second), default=0) >= step + 2, f"checkpoint {step + 2}")
    kill_everything(second)
    newest = second.run_dir / "checkpoints" / f"step_{max(checkpoints(second))}"
    data = next(newest.glob("trainer/*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)

    third = start("run", *SHORT, "resume=latest")
    assert third.wait() == 0, third.text()
    assert f"skipping checkpoint {newest.name}: " in third.text()
    assert (newest.parent / f"damaged_{newest.name}").is_dir()
    assert (third.status()["attempt"], third.status()["state"]) == (2, "completed")
    assert {path.name for path in (third.run_dir / "logs").iterdir()} == {"attempt_0", "attempt_1", "attempt_2", "latest"}
    assert third.reproducible_lines() == whole.reproducible_lines()
    one, other = ((job.run_dir / "weights" / f"step_{STEPS}" / "COMPLETE").read_text() for job in (third, whole))
    assert one == other, "the same weights, by their checksums"
    for number in range(STEPS):
        assert [r["completion"] for r in third.rollouts(number)] == [r["completion"] for r in whole.rollouts(number)]
        assert {version for r in third.rollouts(number) for version in r["versions"]} == {number}
    assert len(json.loads((third.run_dir / "provenance.json").read_text())["later_attempts"]) == 2

    fork = start("fork", *SHORT, f"resume={whole.run_dir}/checkpoints/step_{STEPS - 2}")
    assert fork.wait() == 0, fork.text()
    assert fork.reproducible_lines() == [line for line in whole.reproducible_lines() if line["step"] >= STEPS - 2]
    done = start("run", *SHORT, "resume=latest")
    assert done.wait() == 2
    assert "nothing left to do" in done.text()
    assert reproducible_lines(done.run_dir) == whole.reproducible_lines()


@pytest.mark.nightly
def test_a_run_with_slack_is_trained_again_from_its_record_with_equal_metrics(start):
    run = start("run", "max_async_level=2", "orchestrator.batch_size=32", f"max_steps={STEPS}")
    assert run.wait() == 0, run.text()
    replay = start("replay", "max_async_level=2", "orchestrator.batch_size=32", f"max_steps={STEPS}", f"replay={run.run_dir}")
    assert replay.wait() == 0, replay.text()
    assert set(replay.pids()) == {"trainer"}, "no server, no environment"
    lines = [line for line in run.reproducible_lines() if line["source"] == "trainer"]
    assert max(line["off_policy/lag_max"] for line in lines) > 0
    assert replay.reproducible_lines() == lines
    one, other = ((job.run_dir / "weights" / f"step_{STEPS}" / "COMPLETE").read_text() for job in (run, replay))
    assert one == other, "the same weights, by their checksums"
