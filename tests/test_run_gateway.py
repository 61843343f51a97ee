"""`rlx gateway` and `rlx train env=gateway` as their users start them: programs in another shell take sessions until the run has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from main_job import MainJob

pytestmark = [pytest.mark.slow, pytest.mark.long]
SMALL = ["model=tiny", "env=gateway", "env.args={data: tasks.jsonl, port: 0}", "sampling.max_tokens=8", "model.warm_start.steps=20"]


def play(key: Path, logs: Path, ended: threading.Event) -> None:
    """Take session after session, ask once in each, and post a reward: 1 for an answer that begins with a vowel."""

    def post(url: str, own: str, body: object) -> dict:
        headers = {"Authorization": f"Bearer {own}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
            return json.loads(answer.read() or b"{}")

    while not ended.wait(0.2):
        try:
            address = "".join(log.read_text() for log in logs.glob("env_*.log")).partition("sessions at ")[2].partition("/sessions")[0]
            session = post(f"{address}/sessions", key.read_text(), {})
            if session:
                asked = {"model": "policy", "messages": [{"role": "user", "content": "abc"}]}
                said = post(f"{session['base_url']}/chat/completions", session["key"], asked)["choices"][0]["message"]["content"] or ""
                post(f"{address}/sessions/{session['id']}/end", session["key"], {"reward": float(said[:1] in "aeiou")})
        except (OSError, ValueError):  # not there yet, or no more
            continue


@pytest.fixture
def programs(tmp_path: Path):
    """Four programs that begin once a log of the run names the gateway. The tasks, with answers for a warm start, are there."""
    tasks = [{"question": a + b, "answer": b + a} for a in "abcdefgh" for b in "abcdefgh"]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def begin(run_dir: Path) -> None:
        logs = run_dir / "logs" / "attempt_0"
        threads.extend(threading.Thread(target=play, args=(tmp_path / "gateway.key", logs, ended), daemon=True) for _ in range(4))
        for thread in threads:
            thread.start()

    yield begin
    ended.set()
    for thread in threads:
        thread.join(70)


def test_a_run_trains_from_programs_in_other_shells(start, programs, tmp_path: Path) -> None:
    job: MainJob = start(tmp_path / "run", *SMALL, "max_steps=2", "orchestrator.batch_size=8", "orchestrator.rollouts_per_example=4")
    programs(job.run_dir)
    assert job.wait() == 0, job.text()
    played = [record for step in range(2) for record in job.rollouts(step)]
    assert len(played) == 16
    assert {record["reward"] for record in played} <= {0.0, 1.0}
    assert [record["step"] for record in job.metrics("trainer")] == [0, 1]
    assert not (tmp_path / "gateway.key").exists()


def test_a_model_is_served_to_programs_and_what_they_did_is_collected(programs, tmp_path: Path) -> None:
    programs(tmp_path / "served")
    command = [sys.executable, "-m", "rlx.cli", "gateway", *SMALL, "num_examples=6", "run.dir=served"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    files = list((tmp_path / "served").rglob("*.jsonl"))
    assert any(len(file.read_text().splitlines()) == 6 for file in files), files
