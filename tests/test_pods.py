"""Runs whose hosts are pods: agents that start processes for the first host, and attempts that resume in one directory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports
from toy_run import FOREVER, toy

from rlx.config.errors import ConfigError
from rlx.config.load import compose, load_run
from rlx.config.roots import EVAL, TRAIN, Root
from rlx.launch import k8s
from rlx.launch.agents import Agent, connect, greet, wait_for_agents
from rlx.launch.k8s import make_token
from rlx.launch.starters import AgentStarter
from rlx.launch.verdict import Process, View, decide
from rlx.lock import FileLock
from rlx.paths import RunPaths
from rlx.plan.make import make_plan
from rlx.plan.process_spec import ProcessSpec, write_plan
from rlx.polling import LEFT, wait_for
from rlx.process_tree import start_time
from rlx.runs import run_dir
from rlx.runs.status import Status

pytestmark = pytest.mark.slow

TOKEN = "of this run"


@pytest.fixture
def agent() -> Iterator[Agent]:
    served = Agent(lambda: TOKEN, 0, "127.0.0.1")
    yield served
    served.close()


@pytest.fixture
def client(tmp_path: Path, agent: Agent) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`client(code)` starts a Python process on the agent's host, as the supervisor does."""
    (tmp_path / "token").write_text(TOKEN)
    started: list[subprocess.Popen[str]] = []

    def start(code: str, gpus: tuple[int, ...] = (), here: dict[str, str] | None = None, **env: str) -> subprocess.Popen[str]:
        starter = AgentStarter([("elsewhere", 1), ("127.0.0.1", agent.port)], tmp_path / "token", tmp_path)
        spec = ProcessSpec(role="trainer", replica=0, node=1, gpus=gpus, env=env, argv=(sys.executable, "-c", code))
        argv, environment = starter.command(spec, here or os.environ)
        started.append(subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def test_a_process_elsewhere_prints_here_and_has_the_plans_environment_and_the_day_on_which_the_run_began(client, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.delenv("RLX_TODAY", raising=False)
    here = os.environ | {"RLX_TODAY": "2024-02-29"}
    code = "import os, sys; print(*(os.environ[n] for n in ('RLX_HOST', 'MINE', 'CUDA_VISIBLE_DEVICES', 'RLX_TODAY')), 'é'); sys.exit(7)"
    process = client(code, gpus=(1, 3), here=here, MINE="yes")
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("127.0.0.1 yes 5,7 2024-02-29 é\n", 7)


def test_all_of_a_long_output_arrives_before_the_exit_code(client):
    process = client("print('x' * 2_000_000 + 'end')")
    out, _ = process.communicate(timeout=60)
    assert (len(out), out[-4:], process.returncode) == (2_000_004, "end\n", 0)


def test_a_signal_reaches_the_role_and_a_killed_client_ends_it(client, agent):
    polite = "import signal, sys\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(3))\nprint('ready', flush=True)\nsignal.pause()"
    first, second = client(polite), client(f"import os\nprint(os.getpid(), flush=True)\n{FOREVER}")
    assert first.stdout.readline() == "ready\n"
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 3
    pid = int(second.stdout.readline())
    second.kill()
    wait_for(lambda: start_time(pid) is None and not agent.is_busy, "the end of the role", 60)


def test_the_signal_that_killed_a_role_is_known(client, tmp_path):
    process = client("import os; os.kill(os.getpid(), 9)")
    assert process.wait(60) == 137
    assert AgentStarter([], tmp_path, tmp_path).returncode(137) == -9


@pytest.mark.parametrize("ending", ["notice", "gone"])
def test_a_host_that_is_taken_away_is_no_failure_of_a_role(client, agent, tmp_path, monkeypatch, ending):
    process = client(FOREVER)
    assert process.stdout.readline() == "working\n"
    assert not RunPaths(tmp_path).preempt.exists()
    if ending == "notice":
        agent.give_notice()
    else:
        agent.close()
        assert process.wait(60) == LEFT
    wait_for(lambda: RunPaths(tmp_path).preempt.exists(), "the request to give way", 60)
    lost = Process(name="trainer", service=False, code=LEFT, look=1)
    other = Process(name="orchestrator", service=False)
    assert decide(View(processes=(lost, other), remote=True, asked=True)).settle
    assert decide(View(processes=(lost, other), remote=True, asked=True, waited=9.0)).give_way
    assert decide(View(processes=(lost, other), remote=True, asked=True, told=True, overdue=60.0)).state == "preempted"


BOUND = "from rlx.process import die_with_parent\ndie_with_parent()\n"
AGENT = """
import ctypes, os, signal
from rlx.launch.agents import Agent
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGSEGV))
libc = ctypes.CDLL(None)
assert libc["__register_atfork"](None, None, libc.abort, None) == 0
print(Agent(lambda: "of this run", 0, "127.0.0.1").port, flush=True)
signal.pause()
"""


def test_no_fork_handler_runs_in_a_role_and_it_dies_with_its_agent():
    """Handlers of other libraries crash in a child of a process with threads. SIGKILL leaves the agent no time to end the role."""
    with subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True) as agent:
        try:
            start = {"name": "trainer", "argv": [sys.executable, "-c", BOUND + FOREVER], "gpus": [], "env": {}}

            async def started() -> int:
                async with connect(("127.0.0.1", int(agent.stdout.readline())), TOKEN, start=start) as line:
                    pid = (await line.receive_json())["pid"]
                    assert (await line.receive_bytes()).startswith(b"working")
                    agent.kill()
                    return pid

            pid = asyncio.run(started())
        finally:
            agent.kill()
    until(lambda: start_time(pid) is None)


def test_a_role_that_cannot_start_says_why(client, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    process = client("pass", gpus=(3,))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the plan gives trainer GPU 3 (counted from 0), and CUDA_VISIBLE_DEVICES=0 names 1" in out


def test_only_who_knows_the_runs_token_is_served(agent):
    greet(("127.0.0.1", agent.port), TOKEN)
    with pytest.raises(ConnectionRefusedError, match="this agent belongs to another run"):
        greet(("127.0.0.1", agent.port), "of another run")
    with pytest.raises(ConnectionRefusedError, match="this agent belongs to another run"):
        greet(("127.0.0.1", agent.port), "")


def test_an_agent_listens_at_all_addresses():
    (port,) = free_ports(1)
    agent = Agent(lambda: TOKEN, port)
    for host in ("127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() and Path("/proc/net/if_inet6").exists() else [])):
        greet((host, port), TOKEN)
    agent.close()


def test_the_first_host_waits_for_all_agents_and_names_the_one_that_is_missing(agent):
    there = ("127.0.0.1", agent.port)
    assert wait_for_agents([there, there], TOKEN, 5.0, print) is None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        absent = ("127.0.0.1", free.getsockname()[1])
        said: list[str] = []
        missing = wait_for_agents([there, absent], TOKEN, 2.0, said.append)
    assert missing is not None
    assert "no answer in 2 s from 127.0.0.1 (1 of 2 hosts are there)" in missing
    assert said


def test_a_token_is_made_once_and_readable_by_its_owner_alone(tmp_path):
    file = tmp_path / ".nodes" / "mine"
    token = make_token(file)
    assert (make_token(file), file.stat().st_mode & 0o777) == (token, 0o600)


# whole attempts


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`start(root, job, *argv)`: one attempt of a run, by a Job of this uid. A stand-in for the supervisor is preempted at once."""

    class Preempted:
        def __init__(self, paths: RunPaths, *_: object, attempt: int, **__: object) -> None:
            self.paths, self.attempt = paths, attempt

        def run(self) -> int:
            status = Status(attempt=self.attempt)
            status.finish("preempted")
            status.write(self.paths)
            return LEFT

    taken: list[FileLock] = []

    def create(*arguments: Any, **named: Any) -> tuple[RunPaths, FileLock]:
        paths, lock = run_dir.create(*arguments, **named)
        taken.append(lock)
        return paths, lock

    monkeypatch.setattr(k8s, "create", create)
    monkeypatch.setattr(k8s, "Supervisor", Preempted)
    monkeypatch.setattr(k8s, "_tee", lambda log: contextlib.nullcontext())

    def attempt(root: Root, job: str, *argv: str) -> int:
        monkeypatch.setenv("JOB_UID", job)
        mine = ["hardware=cpu", "launcher.max_requeues=1"]
        cfg = compose([*mine, f"run.dir={tmp_path / 'run'}", *argv], {}, root).cfg
        plan = make_plan(cfg, tmp_path / "run")
        code = k8s.attempt(cfg, [], plan, {}, [("here", 1)], tmp_path / "token", "mine")
        if taken:
            taken.pop().close()  # the end of its process would do this
        return code

    return attempt


def test_a_new_job_resumes_a_run_that_an_earlier_one_was_started_for_too_often(start: Callable[..., int], capsys) -> None:
    assert [start(TRAIN, "7") for _ in range(3)] == [LEFT, LEFT, 1]
    assert "the Job was started 2 times without progress, more than launcher.max_requeues=1" in capsys.readouterr().err
    assert [start(TRAIN, "8", "resume=latest") for _ in range(3)] == [LEFT, LEFT, 1], "counted anew"


def complete(paths: RunPaths) -> None:
    status = Status(attempt=0, max_steps=3)
    status.finish("completed")
    status.write(paths)


def test_other_values_of_the_same_start_are_taken_or_refused_and_not_ignored(start: Callable[..., int], tmp_path: Path, capsys) -> None:
    paths = RunPaths(tmp_path / "run")
    assert start(TRAIN, "1", "max_steps=3") == LEFT
    complete(paths)
    assert start(TRAIN, "1", "max_steps=3") == 0
    assert f"{paths.root} is completed" in capsys.readouterr().out
    assert start(TRAIN, "1", "max_steps=6") == LEFT, "there are steps left"
    assert "resuming with other values than before: max_steps: 3 → 6" in capsys.readouterr().err
    assert load_run(paths.root).max_steps == 6
    with pytest.raises(ConfigError, match=r"has another configuration \(there ≠ here\):\n  optim.lr: \S+ ≠ 0.5\n"):
        start(TRAIN, "1", "max_steps=6", "optim.lr=0.5")
    kept = paths.root / "kept"
    kept.touch()
    start(TRAIN, "1", "max_steps=7", "clean=true")
    assert kept.exists(), "a restart deletes nothing"


def test_a_job_of_evaluations_that_wins_rollouts_between_its_starts_is_not_given_up(start: Callable[..., int], tmp_path: Path) -> None:
    argv = ("model=tiny", "env=sums")
    rollouts = RunPaths(tmp_path / "run").evaluation_of("sums", "tiny", 0) / "rollouts.jsonl"
    for count in range(4):
        assert start(EVAL, "7", *argv) == LEFT
        rollouts.parent.mkdir(parents=True, exist_ok=True)
        rollouts.write_text("{}\n" * count)
    assert [start(EVAL, "7", *argv) for _ in range(3)] == [LEFT, LEFT, 1]


HEAD = """
import sys
from pathlib import Path
from rlx.config.load import compose
from rlx.launch.k8s import attempt
from rlx.plan.process_spec import read_plan
volume, root, plan, *hosts = sys.argv[1:]
cfg = compose(["hardware=cpu", f"run.dir={root}",
               "launcher.preempt_grace=20", "launcher.grace=5"], {}).cfg
places = [(each.rpartition(":")[0], int(each.rpartition(":")[2])) for each in hosts]
sys.exit(attempt(cfg, [], read_plan(Path(plan)), {}, places, Path(volume) / "token", "mine"))
"""
STEP = """
    import sys
    from pathlib import Path
    from rlx.metrics import MetricsWriter
    MetricsWriter(Path(sys.argv[1]) / "metrics.jsonl", "orchestrator").write(0, {})
    print("working", flush=True)
"""
LEAVES = f"""{STEP}
    import time
    while not (Path(sys.argv[1]) / "preempt").exists(): time.sleep(0.02)
    sys.exit(75)
"""


def test_a_run_over_two_hosts_is_preempted_with_one_of_them_and_completed_by_the_next_attempt(tmp_path: Path, agent: Agent):
    here = Agent(lambda: TOKEN, 0, "127.0.0.1")
    (tmp_path / "token").write_text(TOKEN)
    root, plan = tmp_path / "mine", tmp_path / "plan.yaml"
    paths = RunPaths(root)
    hosts = [f"127.0.0.1:{each.port}" for each in (here, agent)]
    command = [sys.executable, "-c", HEAD, str(tmp_path), str(root), str(plan), *hosts]

    def begin(code: str) -> subprocess.Popen[bytes]:
        specs = [toy("orchestrator", code, arguments=(str(root),)), toy("trainer", code, arguments=(str(root),))]
        write_plan(plan, [specs[0], ProcessSpec(role="trainer", replica=0, node=1, gpus=(), argv=specs[1].argv)])
        if paths.plan.exists():
            write_plan(paths.plan, [specs[0], ProcessSpec(role="trainer", replica=0, node=1, gpus=(), argv=specs[1].argv)])
        return subprocess.Popen(command, env=os.environ | {"JOB_UID": "7"})

    first = begin(LEAVES)
    until(lambda: "working" in text(paths.log(0, "trainer")) and "working" in text(paths.log(0, "orchestrator")))
    until(lambda: json.loads(paths.status.read_text())["state"] == "running")
    agent.give_notice()
    assert first.wait(120) == LEFT
    assert json.loads(paths.status.read_text())["state"] == "preempted"
    assert json.loads(paths.kubernetes.read_text()).items() >= {"job": "mine", "uid": "7"}.items()
    assert begin(STEP).wait(120) == 0
    status = json.loads(paths.status.read_text())
    assert (status["state"], status["attempt"]) == ("completed", 1)
    assert "attempt 1, on 127.0.0.1, 127.0.0.1" in text(paths.log(1, "launcher"))
    assert begin(STEP).wait(120) == 0, "a completed run has nothing left to do"
    failing = subprocess.run(command, env=os.environ | {"JOB_UID": "8"}, capture_output=True, text=True, check=False)
    assert "already holds a run" in failing.stderr
    here.close()


def test_a_role_that_fails_elsewhere_is_blamed_with_its_log(tmp_path: Path, agent: Agent):
    (tmp_path / "token").write_text(TOKEN)
    write_plan(tmp_path / "plan.yaml", [toy("trainer", "print('boom'); raise SystemExit(9)")])
    command = [sys.executable, "-c", HEAD, str(tmp_path), str(tmp_path / "mine"), str(tmp_path / "plan.yaml"), f"127.0.0.1:{agent.port}"]
    assert subprocess.run(command, check=False, timeout=120).returncode == 1
    cause = json.loads((tmp_path / "mine" / "status.json").read_text())["cause"]
    assert (cause["role"], cause["returncode"], cause["last_lines"]) == ("trainer", 9, ["boom"])


def until(probe: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            if probe():
                return
        except FileNotFoundError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


def text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


@pytest.mark.long
def test_three_hosts_train_one_model_through_the_command_of_their_containers(tmp_path: Path, model_cache: Path):
    """Real ranks, one a host. Without a cluster's names, `--hosts` says where the agents are."""
    ports = free_ports(3)
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    command = [sys.executable, "-m", "rlx.cli", "pod", "--job", "mine", "--nodes", "3", "--volume", str(tmp_path), "--hosts", hosts, "sft"]
    overrides = ["data=fake", "hardware=cpu_3nodes", "hardware.trainer_processes=3", "max_steps=2", "data.batch_size=6", "seq_len=64"]
    k8s = []
    for index in range(3):
        environment = os.environ | {
            "JOB_COMPLETION_INDEX": str(index),
            "JOB_UID": "7",
            "HF_HUB_OFFLINE": "1",
            "RLX_CACHE": str(model_cache),
        }
        with (tmp_path / f"pod{index}.log").open("wb") as log:
            k8s.append(subprocess.Popen([*command, *overrides], env=environment, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT))
    try:
        assert k8s[0].wait(600) == 0, text(tmp_path / "pod0.log")
        assert [pod.wait(60) for pod in k8s] == [0, 0, 0], "the end of the run ends every host"
    finally:
        for pod in k8s:
            pod.kill()
    status = json.loads((tmp_path / "mine" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("completed", 2)
    assert "mine: completed after 2 of 2 steps" in text(tmp_path / "pod0.log")
