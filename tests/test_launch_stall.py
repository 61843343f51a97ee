"""A stall: when it is noticed, what is said of it, and real processes that are blocked, stopped or dead to the world."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlx.heartbeat import FETCHING
from rlx.launch.stall import STACKS, Seen, StallDoctor, account, examine
from rlx.paths import RunPaths, write_text
from rlx.rollout.stalls import explainer, in_words
from rlx.stack_dump import BLOCKED, rollout_name
from rlx.types import Task

ORCHESTRATOR = Seen(name="orchestrator", phase="rollouts 3/64", in_phase=312.0)
TRAINER = Seen(name="trainer", phase="waiting for batch 4", in_phase=310.0, where="/rlx/waiting.py:60 in wait_for")
SERVER = Seen(name="inference_0", phase="serving", in_phase=900.0)
WORKER = Seen(name="env_math_0")


@pytest.mark.parametrize(
    ("processes", "see"),
    [
        ([ORCHESTRATOR, TRAINER, SERVER], ": see orchestrator"),
        ([ORCHESTRATOR, TRAINER, replace(SERVER, trouble="does not answer GET /health")], ": see inference_0"),
        ([replace(ORCHESTRATOR, phase="waiting for weights 4"), TRAINER, SERVER], ""),
        ([ORCHESTRATOR, replace(WORKER, lines=("8 rollouts at /rlx/policy/tokens.py:95 in respond",))], ": see orchestrator"),
        ([ORCHESTRATOR, replace(WORKER, lines=(f"{BLOCKED} at /my/env.py:8 in judge",))], ": see env_math_0"),
        ([replace(ORCHESTRATOR, phase="importing"), replace(SERVER, phase="loading model")], ": see orchestrator, inference_0"),
    ],
)
def test_what_is_looked_at_first(processes: list[Seen], see: str):
    assert account(300.0, processes).splitlines()[0] == f"no progress for 300 s (launcher.stall_timeout){see}"


def test_the_account_has_a_paragraph_for_each_process_and_the_one_in_trouble_comes_first():
    orchestrator = replace(ORCHESTRATOR, lines=("math, example 12: 2 rollouts for 310 s; 2 at /my/env.py:8 in judge",))
    silent = replace(TRAINER, phase="training step 3", trouble="silent for 100 s")
    assert account(300.0, [orchestrator, silent, SERVER]).splitlines()[1:] == [
        "trainer: training step 3, for 310 s; silent for 100 s; at /rlx/waiting.py:60 in wait_for",
        "orchestrator: rollouts 3/64, for 312 s",
        "  math, example 12: 2 rollouts for 310 s; 2 at /my/env.py:8 in judge",
        "inference_0: serving, for 900 s",
    ]


def beats(**more: object) -> dict:
    return {"trainer": {"phase": "training step 1", "step": 1, "progress": 0, "time": 0.0, "since": 0.0} | more}


def stalls(doctor: StallDoctor, clock: list[float], *looks: tuple[float, int, dict]) -> list[int]:
    """How many stalls the doctor has noticed after each look: at a time, with bytes of metrics and heartbeats."""
    counts = []
    for now, offset, found in looks:
        clock[0] = now
        doctor.look(found, {"trainer": 0.0}, offset, ["trainer"])
        counts.append(doctor.number)
    return counts


def test_a_stall_is_noticed_once_and_so_is_its_end(tmp_path, monkeypatch):
    clock, said = [0.0], []
    monkeypatch.setattr("rlx.launch.stall.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(StallDoctor, "_examine", lambda *_: None)
    doctor = StallDoctor(RunPaths(tmp_path), 0, 10.0, said.append)
    same = [(now, 5, beats(time=now)) for now in (0, 5, 9.9, 10, 11, 60)]
    assert stalls(doctor, clock, *same) == [0, 0, 0, 1, 1, 1]
    assert stalls(doctor, clock, (61, 6, beats()), (70, 6, beats()), (71, 6, beats()), (80, 6, beats(progress=1))) == [1, 1, 2, 2]
    assert said == ["progress again, after 61 s", "progress again, after 19 s"]
    downloads = [(100 + now, 6, beats(phase=f"{FETCHING} a model", time=float(now))) for now in range(0, 60, 5)]
    assert stalls(doctor, clock, *downloads) == [2] * 12, "a download is no stall"
    doctor.timeout = None
    assert stalls(doctor, clock, (1e6, 6, beats()), (2e6, 6, beats())) == [2, 2], "null turns the doctor off"


def test_the_orchestrator_names_groups_rollouts_and_the_environments_line():
    task = Task(env="math", example_id=12, index=40, row={})
    frames = ("/venv/site-packages/aiohttp/client.py:9 in get", "/my/env.py:8 in judge", "/rlx/envs/verifiers_v0.py:100 in _episode")
    tasks = {rollout_name(task, member): frames for member in (0, 3)}
    groups = [(task, 2, 310.0), *((replace(task, index=n), 1, 5.0) for n in range(41, 47))]
    lines = in_words(groups, tasks, {"math": Path("/my/env.py")}, [])
    assert lines[0] == "math, example 12: 2 rollouts for 310 s; 2 at /my/env.py:8 in judge"
    assert lines[-1] == "and 2 younger groups"
    blocked = in_words(groups[:1], None, {"math": Path("/my/env.py")}, ["/usr/lib/python3/re.py:1 in sub", "/my/env.py:30 in reward"])
    assert blocked == ["its event loop is blocked at /my/env.py:30 in reward", "math, example 12: 2 rollouts for 310 s"]


async def test_a_waiting_rollout_is_found_in_a_running_event_loop():
    task = Task(env="math", example_id=12, index=40, row={})

    async def judge() -> None:
        await asyncio.sleep(60)

    playing = asyncio.create_task(judge(), name=rollout_name(task, 0))
    await asyncio.sleep(0)
    explain = explainer(lambda: [(task, 1, 7.0)], {"math": None}, asyncio.get_running_loop())
    lines = await asyncio.to_thread(explain)
    playing.cancel()
    (line,) = lines
    assert line.startswith(f"math, example 12: 1 rollout for 7 s; 1 at {__file__}:")
    assert line.endswith(" in judge")


ROLE = """
import sys, threading, time
from pathlib import Path
from rlx.heartbeat import Heartbeat
from rlx.paths import RunPaths
from rlx import stack_dump
stack_dump.POLL_SECONDS = 0.1
paths, name, kind = RunPaths(Path(sys.argv[1])), sys.argv[2], sys.argv[3]
stack_dump.answer(paths, name)
heartbeat = Heartbeat(paths, name)
heartbeat.beat("computing")

def sleeps():
    time.sleep(3600)

def holds_the_lock():
    import ctypes
    ctypes.PyDLL(None).sleep(3600)

{"sleeps": sleeps, "holds": holds_the_lock}[kind]()
"""


def until(condition, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.fixture
def roles(tmp_path):
    """`start(name, kind)`: a process that answers questions like a role."""
    paths, running = RunPaths(tmp_path / "run"), []
    paths.heartbeats.mkdir(parents=True)

    def start(name: str, kind: str) -> subprocess.Popen:
        log = (paths.root / f"{name}.log").open("w")
        running.append(subprocess.Popen([sys.executable, "-c", ROLE, str(paths.root), name, kind], stderr=log))
        return running[-1]

    yield paths, start
    for process in running:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_process_that_sleeps_one_in_native_code_and_a_stopped_one_are_told_apart(roles, monkeypatch):
    paths, start = roles
    monkeypatch.setattr("rlx.launch.stall.ANSWER", 5)
    *_, server = [start(name, kind) for name, kind in (("orchestrator", "sleeps"), ("trainer", "holds"), ("inference_0", "sleeps"))]
    for name in ("orchestrator", "trainer", "inference_0"):
        until(lambda name=name: (paths.heartbeats / f"{name}.json").exists())
    time.sleep(1)  # into their endless calls
    os.kill(server.pid, signal.SIGSTOP)
    names = ["orchestrator", "trainer", "inference_0"]
    found = {name: json.loads((paths.heartbeats / f"{name}.json").read_text()) for name in names}
    orchestrator, trainer, server = examine(paths, "0001", found, dict.fromkeys(names, 0.0), names)
    assert (orchestrator.trouble, orchestrator.where) == ("", "<string>:14 in sleeps")
    assert trainer.trouble.startswith("does not answer")
    until(lambda: "holds_the_lock" in (paths.root / "trainer.log").read_text(), 10)  # by SIGUSR1, although Python is blocked
    assert "holds_the_lock" in (paths.root / "trainer.log").read_text()
    pid = json.loads((paths.stalls / "inference_0.process").read_text())["pid"]
    assert server.trouble.startswith(f"stopped by a signal (process {pid} on ")


def test_the_doctor_writes_an_account_and_the_run_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("rlx.launch.stall.ANSWER", 0.1)
    paths, said = RunPaths(tmp_path), []
    doctor = StallDoctor(paths, 0, 0.05, said.append)
    doctor.look(beats(), {"trainer": 0.0}, 0, ["trainer"])
    time.sleep(0.06)
    doctor.look(beats(), {"trainer": 0.1}, 0, ["trainer"])
    until(paths.stall_of(0, 1).exists)
    head, _, _ = paths.stall_of(0, 1).read_text().partition(STACKS)
    assert head.startswith("no progress for 0.05 s (launcher.stall_timeout): see trainer\ntrainer: training step 1, ")
    assert len(said) == 1


def test_a_question_of_an_earlier_attempt_is_not_answered(tmp_path):
    paths = RunPaths(tmp_path)
    write_text(paths.stalls / "ask", "1001")
    done = subprocess.run(
        [sys.executable, "-c", ROLE.replace("time.sleep(3600)", "time.sleep(0.4)"), str(tmp_path), "trainer", "sleeps"], check=True
    )
    assert done.returncode == 0
    assert not list(paths.stalls.glob("1001_*"))
