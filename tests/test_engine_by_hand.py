"""Servers that somebody starts in another shell: the line that the plan prints trains runs, and a stock vLLM is evaluated."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from inference_server import lives, make_model, wait_until
from main_job import ROOT, MainJob, read_metrics
from ports import free_ports

from rlx.inference.arguments import MODULE

pytestmark = [pytest.mark.slow, pytest.mark.long]
KEY = "a key of mine"
SHORT = ("max_steps=4", "max_async_level=0", "orchestrator.batch_size=32", "model=tiny_trained")


def answers(url: str) -> bool:
    request = urllib.request.Request(f"{url}/health", headers={"Authorization": f"Bearer {KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


@contextmanager
def shell(line: str, folder: Path, url: str) -> Iterator[psutil.Process]:
    """A command line in a shell of its own, until it serves. Yields the process of the server."""
    log = folder / "shell.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLX_")} | {"HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {line}"], cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_until(lambda: answers(url) or process.poll() is not None, "the server", 600)
        assert process.poll() is None, log.read_text()[-3000:]
        yield psutil.Process(process.pid)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def dry_run(folder: Path, *keys: str) -> str:
    command = [sys.executable, str(ROOT / "train.py"), f"run.dir={folder / 'dry'}", "dry_run=true", *keys]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=600).stdout


def test_the_printed_line_starts_a_server_that_trains_two_runs_in_turn_and_leaves_no_process(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (port,) = free_ports(1)
    model, url = tmp_path / "model", f"http://127.0.0.1:{port}"
    make_model(model, tied=True, seed=0)
    keys = (*SHORT, f"model.name={model}")
    (line,) = re.findall(r"^ *inference_0: (.*)$", dry_run(tmp_path, *keys, f"inference.port={port}"), re.MULTILINE)[-1:]
    with shell(line.replace("RLX_SECRET=<secret>", f"RLX_SECRET={shlex.quote(KEY)}"), tmp_path, url) as server:
        engine = server.children(recursive=True)
        jobs: list[MainJob] = []
        for name in ("first", "second"):
            job = start(name, *keys, f"inference.base_url=[{url}]", f"inference.api_key={KEY}")
            assert job.wait() == 0, job.text()
            jobs.append(job)
            trained = job.metrics("trainer")
            assert [record["step"] for record in trained] == [0, 1, 2, 3]
            assert max(record["mismatch/kl"] for record in trained) < 1e-6
            assert {version for step in range(4) for one in job.rollouts(step) for version in one["versions"]} == {0, 1, 2, 3}
        assert jobs[0].reproducible_lines() == jobs[1].reproducible_lines(), "the second began with the model that the server started with"
        assert engine
        server.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(map(lives, engine)), "the end of the engine's process", 60)


def test_a_server_without_the_extension_is_evaluated_and_cannot_be_trained(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """It asks for vLLM's own key on some routes, and has another model name."""
    (port,) = free_ports(1)
    model, url = tmp_path / "model", f"http://127.0.0.1:{port}"
    make_model(model, tied=True, seed=0)
    own = ["--model", str(model), "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--api-key", KEY]
    own += ["--enable-scale-out", "--enforce-eager", "--max-model-len", "64", "--kv-cache-memory-bytes", str(1 << 26)]
    variables = "TORCHDYNAMO_DISABLE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1"
    there = (f"model.name={model}", f"inference.base_url=[{url}]", f"inference.api_key={KEY}")
    with shell(f"{variables} {shlex.join([sys.executable, '-m', MODULE, *own])}", tmp_path, url):
        words = ["model=tiny_trained", *there, "num_examples=16", "rollouts_per_example=2", f"run.dir={tmp_path / 'eval'}"]
        command = [sys.executable, "-m", "rlx.cli", "eval", "env=reverse_text", *words]
        done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        (record,) = [each for each in read_metrics(tmp_path / "eval") if each["source"] == "eval"]
        assert record["eval/reverse_text/examples"] == 16
        assert record["eval/reverse_text/error_frac"] == 0
        (results,) = (tmp_path / "eval").rglob("results.jsonl")
        assert len({json.dumps(json.loads(text)["completion"]) for text in results.read_text().splitlines()}) > 16
        job = start("run", *SHORT, *there)
        assert job.wait() == 1, job.text()
    assert f"inference server {url} does not know `rlx_state`" in job.text()
    assert "fix: start it with the options that `rlx train … dry_run=true` prints, among them VLLM_SERVER_DEV_MODE=1" in job.text()
