"""Inference servers that the run started die, or fail for a while: the run goes on, trains nothing wrong, and says so. On real vLLM."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from main_job import MainJob

from rlx.inference import wire
from rlx.inference.endpoints import Endpoint, endpoint_file, read_endpoint
from rlx.paths import RunPaths

pytestmark = [pytest.mark.slow]
ON_POLICY = ("max_async_level=0", "orchestrator.batch_size=64", "model.dtype=float32")


def check(job: MainJob, steps: int) -> None:
    """Every step was trained, on tokens that the servers sampled from the policy that they say."""
    trained, played = job.metrics("trainer"), job.metrics("orchestrator")
    assert [record["step"] for record in trained] == list(range(steps)), job.text()
    assert [record["step"] for record in played][:steps] == list(range(steps))
    assert max(record["mismatch/kl"] for record in trained) < 1e-6, "in float32, and at lag 0"
    for step in range(steps):
        for rollout in job.rollouts(step):
            assert rollout["versions"] == [step]
    assert not any(value for name, value in played[-1].items() if name.startswith("rollouts/failed_")), "an outage is no rollout's failure"


def pid_of(job: MainJob, replica: int) -> int:
    return next(p["pid"] for p in job.status()["processes"] if (p["role"], p["replica"]) == ("inference", replica))


@pytest.mark.long
def test_the_only_server_is_killed_and_serves_again_with_the_runs_version(start: Callable[..., MainJob]) -> None:
    """Rollouts, requests and updates have less time than vLLM needs to start, and ten times what they take."""
    short = ("orchestrator.rollout_timeout=15", "inference.request_timeout=15", "weight_broadcast.timeout=15")
    job = start("run", *ON_POLICY, *short, "max_steps=8")
    job.until_step(2)
    os.kill(pid_of(job, 0), signal.SIGKILL)
    assert job.wait() == 0, job.text()
    check(job, 8)
    (restart,) = job.status()["restarts"]
    assert (restart["name"], restart["log"]) == ("inference_0", "logs/attempt_0/inference_0.log")
    assert "serving at http" in (job.run_dir / "logs/attempt_0/inference_0.1.log").read_text()
    assert "inference_0: killed by SIGKILL" in job.text(), "said at once"
    assert "  restarted inference_0 1 ×; the last: killed by SIGKILL" in job.text()
    job.wait_until_nothing_is_left()


@pytest.mark.nightly
def test_one_of_two_servers_is_killed_the_other_goes_on_and_the_first_joins_again(start: Callable[..., MainJob]) -> None:
    job = start("run", *ON_POLICY, "hardware.inference_replicas=2", "inference.kv_cache_gb=0.25", "max_steps=100000")
    job.until_step(2)
    os.kill(pid_of(job, 1), signal.SIGKILL)
    killed_at = job.metrics("trainer")[-1]["step"]
    job.until(lambda: any(r["perf/servers"] == 1 and r["step"] > killed_at + 1 for r in job.metrics("inference")), "steps with one server")
    alone = next(r["step"] for r in job.metrics("inference") if r["perf/servers"] == 1)
    job.until(lambda: any(r["perf/servers"] == 2 and r["step"] > alone for r in job.metrics("inference")), "the second server's return")
    job.until_step(job.metrics("trainer")[-1]["step"] + 3)
    log = (job.run_dir / "logs/attempt_0/orchestrator.log").read_text()  # before the end, when all servers go
    os.kill(job.process.pid, signal.SIGINT)
    assert job.wait() == 130
    check(job, 1 + job.metrics("trainer")[-1]["step"])
    assert [restart["name"] for restart in job.status()["restarts"]] == ["inference_1"]
    assert "joins; it serves once it has the run's version" in log
    assert "no inference server takes requests" not in log


@contextmanager
def server_of(job: MainJob, folder: Path) -> Iterator[str]:
    """A server of the run's model that the run did not start. Yields its address."""
    job.until(lambda: (job.run_dir / "initial_model.txt").exists(), "the initial model")
    folder.mkdir()
    for name in ("config.yaml", "secrets.yaml", "initial_model.txt"):
        if (job.run_dir / name).exists():  # a run without a key of its own has no secrets
            shutil.copy(job.run_dir / name, folder)
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "rlx.roles.inference", "--run-dir", str(folder)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        file = endpoint_file(RunPaths(folder), 0)
        job.until(file.exists, "the server")
        endpoint = read_endpoint(file)
        yield endpoint.url
    finally:
        process.kill()
        process.wait()


def asked(endpoint: Endpoint, path: str) -> bytes:
    request = urllib.request.Request(endpoint.url + path, headers=endpoint.headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def version_of(endpoint: Endpoint) -> int | None:
    """The version that a run has given a server; None: none has."""
    found = wire.parse_label(json.loads(asked(endpoint, wire.LABEL))["weight_version"])
    return found[0] if found else None


def running_on(endpoint: Endpoint) -> float:
    return wire.metrics_of(asked(endpoint, wire.METRICS))["num_requests_running"]


@pytest.mark.nightly
def test_a_server_that_is_added_has_the_runs_version_before_it_serves_and_leaves_with_its_file(
    start: Callable[..., MainJob], tmp_path: Path
) -> None:
    job = start("run", *ON_POLICY, "inference.kv_cache_gb=0.25", "max_steps=100000")
    extra = job.run_dir / "endpoints" / "inference_extra.json"
    with server_of(job, tmp_path / "server"):
        file = endpoint_file(RunPaths(tmp_path / "server"), 0)
        endpoint = read_endpoint(file)
        assert endpoint is not None
        job.until_step(2)
        assert version_of(endpoint) is None
        shutil.copy2(file, extra)
        job.until(lambda: running_on(endpoint), "a request at the second server")
        assert (version_of(endpoint) or 0) > 1
        joined = job.metrics("trainer")[-1]["step"]
        job.until_step(joined + 3)
        extra.unlink()
        two = [record["step"] for record in job.metrics("inference") if record["perf/servers"] == 2]
        assert two
        job.until(lambda: job.metrics("inference")[-1]["perf/servers"] == 1, "the second server's leave")
        job.until_step(job.metrics("trainer")[-1]["step"] + 3)
        assert running_on(endpoint) == 0
        log = (job.run_dir / "logs/attempt_0/orchestrator.log").read_text()
        os.kill(job.process.pid, signal.SIGINT)
        assert job.wait() == 130
    check(job, 1 + job.metrics("trainer")[-1]["step"])
    assert job.status()["restarts"] == []
    joins, serves, leaves = (
        log.index(words) for words in ("joins; it serves once it has the run's version", " serves version ", "was taken away")
    )
    assert joins < serves < leaves
    assert "no inference server takes requests" not in log
