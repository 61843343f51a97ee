"""A stall: when it is noticed, what is said of it, and real processes that are blocked, stopped or dead to the world."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlx.heartbeat import FETCHING, SILENT
from rlx.launch.stall import STACKS, Seen, StallDoctor, Stillness, account, examine, frames_of
from rlx.paths import RunPaths, write_text
from rlx.rollout.stalls import explainer, in_words
from rlx.stacks import Waiting, rollout_name
from rlx.types import Task

ORCHESTRATOR = Seen(name="orchestrator", phase="rollouts 3/64", in_phase=312.0)
TRAINER = Seen(name="trainer", phase="waiting for batch 4", in_phase=310.0, where="/rlx/waiting.py:60 in wait_for")
SERVER = Seen(name="inference_0", phase="serving", in_phase=900.0, serves=True)
WORKER = Seen(name="env_math_0")
BARRIER = ("/venv/torch/distributed/c10d.py:12 in barrier", "/rlx/train/step.py:99 in train")


@pytest.mark.parametrize(
    ("processes", "head"),
    [
        ([ORCHESTRATOR, TRAINER, SERVER], "waiting for orchestrator, the only one that does not wait itself"),
        ([ORCHESTRATOR, TRAINER, replace(SERVER, serves=False)], "waiting for inference_0, which does not answer requests"),
        ([ORCHESTRATOR, TRAINER, replace(SERVER, stopped="process 7 on a", serves=False)], "waiting for inference_0, stopped by a signal"),
        ([replace(ORCHESTRATOR, silent=300.0), TRAINER, SERVER], "waiting for orchestrator, which sends no heartbeats"),
        ([replace(ORCHESTRATOR, phase="waiting for weights 4"), TRAINER, SERVER], "every process waits for another one"),
        (
            [replace(TRAINER, phase="training step 4", frames=BARRIER), Seen(name="trainer_rank_1", frames=("/rlx/models/a.py:3 in f",))],
            "waiting for trainer_rank_1, the only one that does not wait itself",
        ),
        (
            [replace(TRAINER, phase="training step 4", frames=BARRIER), Seen(name="trainer_rank_1", answered=False)],
            "waiting for trainer_rank_1, which does not answer",
        ),
        (
            [ORCHESTRATOR, TRAINER, replace(WORKER, lines=("8 rollouts at /rlx/policy/tokens.py:95 in respond",))],
            "waiting for orchestrator, the only one that does not wait itself",
        ),
        (
            [ORCHESTRATOR, TRAINER, replace(WORKER, lines=("its event loop is blocked at /my/env.py:8 in judge",))],
            "waiting for env_math_0, the only one that does not wait itself",
        ),
        (
            [replace(ORCHESTRATOR, phase="importing verifiers"), replace(SERVER, phase="loading model", serves=None)],
            "waiting for orchestrator and inference_0, which do not wait themselves",
        ),
    ],
)
def test_what_is_waited_for(processes: list[Seen], head: str):
    assert account(300.0, processes).splitlines()[0] == f"no progress for 300 s (launcher.stall_timeout): {head}"


def test_the_account_has_a_paragraph_for_each_process_and_the_one_to_blame_comes_first():
    orchestrator = replace(ORCHESTRATOR, lines=("math, example 12: 2 rollouts for 310 s; 2 at /my/env.py:8 in judge",))
    silent = replace(TRAINER, phase="training step 3", frames=BARRIER, silent=SILENT + 80, answered=False)
    assert account(300.0, [orchestrator, silent, SERVER]).splitlines()[1:] == [
        "trainer: training step 3, for 310 s; silent for 100 s; waits for the other ranks; at /rlx/waiting.py:60 in wait_for; "
        "does not answer",
        "orchestrator: rollouts 3/64, for 312 s",
        "  math, example 12: 2 rollouts for 310 s; 2 at /my/env.py:8 in judge",
        "inference_0: serving, for 900 s",
    ]


def beats(**more: object) -> dict:
    return {"trainer": {"phase": "training step 1", "step": 1, "progress": 0, "time": 0.0} | more}


def test_a_stall_is_noticed_once_and_so_is_its_end():
    still = Stillness(10.0, now=0.0)
    assert [still.look(beats(time=float(now)), 5, now) for now in (0, 5, 9.9)] == [None] * 3
    assert [still.look(beats(), 5, now) for now in (10, 11, 60)] == ["stalls", None, None]
    assert still.look(beats(), 6, 61) == "moves"
    assert [still.look(beats(), 6, now) for now in (62, 71, 72)] == [None, "stalls", None]
    assert still.look(beats(progress=1), 6, 80) == "moves"


def test_a_download_is_no_stall_and_null_turns_the_doctor_off():
    still = Stillness(10.0, now=0.0)
    assert [still.look(beats(phase=f"{FETCHING} a model", time=float(now)), 0, now) for now in range(0, 60, 5)] == [None] * 12
    off = Stillness(None, now=0.0)
    assert [off.look(beats(), 0, now) for now in (0, 1e6)] == [None, None]


def test_the_orchestrator_names_groups_rollouts_and_the_environments_line():
    task = Task(env="math", example_id=12, index=40, row={})
    frames = ("/venv/site-packages/aiohttp/client.py:9 in get", "/my/env.py:8 in judge", "/rlx/envs/verifiers_v0.py:100 in _episode")
    tasks = [Waiting(name=rollout_name(task, member), frames=frames) for member in (0, 3)]
    groups = [(task, 2, 310.0), *((replace(task, index=n), 1, 5.0) for n in range(41, 47))]
    lines = in_words(groups, tasks, {"math": Path("/my/env.py")}, [])
    assert lines[0] == "math, example 12: 2 rollouts for 310 s; 2 at /my/env.py:8 in judge"
    assert lines[-1] == "and 2 younger groups"
    blocked = in_words(groups[:1], None, {"math": Path("/my/env.py")}, ["/usr/lib/python3/re.py:1 in sub", "/my/env.py:30 in reward"])
    assert blocked == ["its event loop is blocked at /my/env.py:30 in reward", "math, example 12: 2 rollouts for 310 s"]


def test_a_waiting_rollout_is_found_in_a_running_event_loop():
    task = Task(env="math", example_id=12, index=40, row={})

    async def judge() -> None:
        await asyncio.sleep(60)

    async def main() -> list[str]:
        playing = asyncio.create_task(judge(), name=rollout_name(task, 0))
        await asyncio.sleep(0)
        explain = explainer(lambda: [(task, 1, 7.0)], {"math": None}, asyncio.get_running_loop())
        lines = await asyncio.to_thread(explain)
        playing.cancel()
        return lines

    (line,) = asyncio.run(main())
    assert line.startswith(f"math, example 12: 1 rollout for 7 s; 1 at {__file__}:")
    assert line.endswith(" in judge")


def test_faulthandlers_stacks_are_read():
    text = """\
Thread 0x1 (most recent call first):
  File "/a.py", line 1 in f

Current thread 0x2 (most recent call first):
  File "/my env.py", line 30 in reward
  File "/b.py", line 2 in <module>

Thread 0x3 (most recent call first):
  File "/c.py", line 3 in g
"""
    assert frames_of(text) == ["/my env.py:30 in reward", "/b.py:2 in <module>"]


ROLE = """
import sys, threading, time
from pathlib import Path
from rlx.heartbeat import Heartbeat
from rlx.paths import RunPaths
from rlx import stacks
stacks.LOOK = 0.1
paths, name, kind = RunPaths(Path(sys.argv[1])), sys.argv[2], sys.argv[3]
stacks.answer(paths, name)
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
        running.append(subprocess.Popen([sys.executable, "-c", ROLE, str(paths.root), name, kind]))
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
    monkeypatch.setattr("rlx.launch.stall.BY_SIGNAL", 2)
    *_, server = [start(name, kind) for name, kind in (("orchestrator", "sleeps"), ("trainer", "holds"), ("inference_0", "sleeps"))]
    for name in ("orchestrator", "trainer", "inference_0"):
        until(lambda name=name: (paths.heartbeats / f"{name}.json").exists())
    time.sleep(1)  # into their endless calls
    os.kill(server.pid, signal.SIGSTOP)
    names = ["orchestrator", "trainer", "inference_0"]
    found = {name: json.loads((paths.heartbeats / f"{name}.json").read_text()) for name in names}
    orchestrator, trainer, server = examine(paths, "0001", found, dict.fromkeys(names, 0.0), names)
    assert (orchestrator.answered, orchestrator.stopped) == (True, "")
    assert orchestrator.where == "<string>:14 in sleeps"
    assert (trainer.answered, trainer.stopped) == (False, "")
    assert any("holds_the_lock" in frame for frame in trainer.frames), "by SIGUSR1, although Python is blocked"
    assert "holds_the_lock" in trainer.stack
    assert f"process {json.loads((paths.stalls / 'inference_0.process').read_text())['pid']} on " in server.stopped
    assert account(1.0, [orchestrator, trainer, server]).startswith(
        "no progress for 1 s (launcher.stall_timeout): waiting for inference_0, stopped"
    )


def test_the_doctor_writes_an_account_and_its_end_and_the_run_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("rlx.launch.stall.ANSWER", 0.1)
    paths, said, threads = RunPaths(tmp_path), [], threading.active_count()
    doctor = StallDoctor(paths, 0, 0.05, said.append)
    doctor.look(beats(since=0.0), {"trainer": 0.0}, 0, ["trainer"])
    time.sleep(0.06)
    doctor.look(beats(since=0.0), {"trainer": 0.1}, 0, ["trainer"])
    doctor.look(beats(since=0.0), {"trainer": 0.1}, 9, ["trainer"])
    file = paths.stall_of(0, 1)
    until(lambda: file.exists() and "progress again" in file.read_text())
    head, _, _ = file.read_text().partition(STACKS)
    assert head.startswith("no progress for 0.05 s (launcher.stall_timeout): waiting for trainer, which does not answer\n")
    assert head.splitlines()[-1].startswith("progress again, after ")
    assert len(said) == 2
    assert threading.active_count() <= threads + 1, "the thread that wrote this may still end"


def test_a_question_of_an_earlier_attempt_is_not_answered(tmp_path):
    paths = RunPaths(tmp_path)
    write_text(paths.stalls / "ask", "1001")
    done = subprocess.run(
        [sys.executable, "-c", ROLE.replace("time.sleep(3600)", "time.sleep(0.4)"), str(tmp_path), "trainer", "sleeps"], check=True
    )
    assert done.returncode == 0
    assert not list(paths.stalls.glob("1001_*"))
