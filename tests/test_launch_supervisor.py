"""The real local launch (launcher, submitit, supervisor, reaper) with toy processes: deaths, the blamed process, what survives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from toy_run import DIES, FOREVER, RUN_DIR, Run, starting, toy

from rlx.plan.process_spec import ProcessSpec

pytestmark = pytest.mark.slow

# Waits for a file of the run directory.
NESTED = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {FOREVER!r}], start_new_session=True)\n" + FOREVER
AFTER = "import os, sys, time\nwhile not os.path.exists(sys.argv[1] + '/{}'): time.sleep(0.01)\n"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    yield from starting(tmp_path)


def test_a_run_is_completed_when_all_but_the_services_are_done_and_the_services_are_stopped(start: Callable[..., Run]) -> None:
    run = start([toy("inference", FOREVER, service=True), toy("orchestrator", "print('batches')"), toy("trainer", "print('steps')")])
    status = run.wait()
    assert (status.state, status.exit_code, status.cause) == ("completed", 0, None)
    assert [process["role"] for process in status.processes] == ["inference", "orchestrator", "trainer"]
    assert run.log("trainer") == "steps\n"
    assert (run.paths.latest_logs / "trainer.log").read_text() == "steps\n"
    run.assert_nothing_left()


def test_roles_are_not_of_a_group_that_the_users_environment_names(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    run = start([toy("trainer", "import os\nprint(sorted(name for name, value in os.environ.items() if value == '7'))")])
    assert run.wait().state == "completed"
    assert run.log("trainer") == "[]\n"


def test_when_one_process_fails_the_others_are_stopped_and_its_last_lines_are_kept(start: Callable[..., Run]) -> None:
    plan = [
        toy("inference", FOREVER, service=True),
        toy("orchestrator", FOREVER),
        toy("trainer", "import sys\nfor i in range(9): print('line', i)\nsys.exit(7)"),
    ]
    run = start(plan)
    status = run.wait()
    assert (status.state, run.launcher.returncode) == ("failed", 1)
    assert (status.cause.role, status.cause.returncode, status.cause.reason) == ("trainer", 7, "exit code 7")
    assert status.cause.last_lines == tuple(f"line {i}" for i in range(4, 9))
    assert (run.paths.root / status.cause.log).read_text().startswith("line 0")
    run.assert_nothing_left()


def test_a_death_by_signal_is_told_in_words_with_its_usual_cause(start: Callable[..., Run]) -> None:
    run = start([toy("trainer", FOREVER), toy("orchestrator", FOREVER)])
    run.until_started()
    os.kill(run.pid("trainer"), signal.SIGKILL)
    cause = run.wait().cause
    assert (cause.role, cause.returncode) == ("trainer", -9)
    assert "killed by SIGKILL" in cause.reason
    assert "memory" in cause.reason
    run.assert_nothing_left()


def test_a_process_that_fails_because_its_server_is_dying_is_not_the_one_blamed(start: Callable[..., Run]) -> None:
    # As with vLLM's engine: the request in flight fails at once, and the server exits a moment later.
    dying = (
        DIES
        + """
print('engine died', flush=True)
tell(sys.argv[1] + '/dying')
pid = wait_for(sys.argv[1] + '/user')
while not dies(pid):
    time.sleep(0.005)
os._exit(1)
"""
    )
    user = DIES + "wait_for(sys.argv[1] + '/dying'); tell(sys.argv[1] + '/user'); sys.exit('request failed')"
    run = start([toy("inference", dying, service=True, arguments=(RUN_DIR,)), toy("orchestrator", user, arguments=(RUN_DIR,))])
    cause = run.wait().cause
    assert (cause.role, cause.last_lines) == ("inference", ("engine died",))


def test_the_first_of_two_deaths_is_blamed(start: Callable[..., Run]) -> None:
    first = DIES + "tell(sys.argv[1] + '/dead'); os._exit(3)"
    follower = (
        DIES
        + """
pid = wait_for(sys.argv[1] + '/dead')
while os.path.exists(f'/proc/{pid}'):  # until the supervisor has seen it
    time.sleep(0.005)
time.sleep(0.3)
sys.exit(4)
"""
    )
    run = start([toy("orchestrator", follower, arguments=(RUN_DIR,)), toy("trainer", first, arguments=(RUN_DIR,))])
    cause = run.wait().cause
    assert (cause.role, cause.returncode) == ("trainer", 3)


def test_a_service_that_leaves_early_is_a_failure_even_with_exit_code_0(start: Callable[..., Run]) -> None:
    run = start([toy("inference", "print('bye')", service=True), toy("trainer", FOREVER)])
    cause = run.wait().cause
    assert (cause.role, cause.returncode) == ("inference", 0)
    assert "serve" in cause.reason


SERVES = """
import json, os, signal, sys, time
from pathlib import Path
from rlx.heartbeat import SERVING, Heartbeat
from rlx.paths import RunPaths
paths = RunPaths(Path(sys.argv[1]))
Heartbeat(paths, "inference_0").beat(SERVING)
print("serving", flush=True)
"""


def test_a_service_that_dies_after_it_served_starts_again_in_its_place_and_is_counted(start: Callable[..., Run]) -> None:
    dies_twice = (
        SERVES
        + "life = paths.root / 'life'\n"
        + (
            "with life.open('a') as file: file.write(f'{os.getpid()}\\n')\n"
            "if len(life.read_text().split()) < 3: os.kill(os.getpid(), signal.SIGKILL)\n"
            "while True: time.sleep(0.05)\n"
        )
    )
    waits = "import sys, time\nfrom pathlib import Path\nlife = Path(sys.argv[1]) / 'life'\n" + (
        "while not life.exists() or len(life.read_text().split()) < 3: time.sleep(0.02)\ntime.sleep(0.3)"
    )
    plan = [toy("inference", dies_twice, service=True, arguments=(RUN_DIR,)), toy("trainer", waits, arguments=(RUN_DIR,))]
    run = start(plan, max_restarts=2)
    status = run.wait()
    assert status.state == "completed", run.log("launcher")
    assert [(one.name, one.log) for one in status.restarts] == [
        ("inference_0", "logs/attempt_0/inference_0.log"),
        ("inference_0", "logs/attempt_0/inference_0.1.log"),
    ]
    assert all("SIGKILL" in one.reason for one in status.restarts)
    assert [run.log(name) for name in ("inference_0", "inference_0.1", "inference_0.2")] == ["serving\n"] * 3
    assert run.pid("inference") == int((run.paths.root / "life").read_text().split()[-1]), "the process that serves now"
    assert "inference_0: killed by SIGKILL" in run.log("launcher")
    run.assert_nothing_left()


def test_a_service_that_hangs_after_it_served_is_killed_and_starts_again(start: Callable[..., Run]) -> None:
    stops_once = (
        SERVES + "if not (paths.root / 'stopped').exists():\n"
        "    (paths.root / 'stopped').touch()\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "heart = Heartbeat(paths, 'inference_0')\n"
        "(paths.root / 'again').touch()\n"
        "while True:\n    heart.beat(SERVING)\n    time.sleep(0.05)\n"
    )
    waits = "import sys, time\nfrom pathlib import Path\nwhile not (Path(sys.argv[1]) / 'again').exists(): time.sleep(0.02)"
    plan = [toy("inference", stops_once, service=True, arguments=(RUN_DIR,)), toy("trainer", waits, arguments=(RUN_DIR,))]
    run = start(plan, max_restarts=1, hung_timeout=8.0)
    status = run.wait()
    assert status.state == "completed", run.log("launcher")
    (restart,) = status.restarts
    assert "inference.hung_timeout=8" in restart.reason
    assert "it is killed" in run.log("launcher")
    run.assert_nothing_left()


def test_a_service_that_keeps_dying_or_does_not_come_to_serve_again_ends_the_run(start: Callable[..., Run]) -> None:
    def fails(code: str) -> Run:
        return start(
            [toy("inference", code, service=True, arguments=(RUN_DIR,)), toy("trainer", FOREVER)], f"run{len(code)}", max_restarts=2
        )

    keeps_dying = fails(SERVES + "sys.exit(3)")
    fails_at_start = fails(
        SERVES.replace("Heartbeat(", "if list(paths.latest_logs.glob('*.1.log')): sys.exit('no GPU')\nHeartbeat(") + "sys.exit(4)"
    )
    status = keeps_dying.wait()
    assert (status.state, len(status.restarts)) == ("failed", 2)
    assert (status.cause.role, status.cause.returncode, status.cause.log) == ("inference", 3, "logs/attempt_0/inference_0.2.log")
    status = fails_at_start.wait()
    assert (status.state, len(status.restarts)) == ("failed", 1)
    assert status.cause.last_lines == ("no GPU",), "the log of its last start"


def test_a_command_that_cannot_be_started_fails_the_run(start: Callable[..., Run]) -> None:
    missing = ProcessSpec(role="trainer", replica=0, node=0, gpus=(), argv=("/nowhere/python",))
    run = start([toy("orchestrator", FOREVER), missing])
    cause = run.wait().cause
    assert cause.role == "trainer"
    assert "/nowhere/python" in cause.reason
    run.assert_nothing_left()


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_time(start: Callable[..., Run]) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER
    run = start([toy("orchestrator", stubborn), toy("trainer", FOREVER)], grace=0.5)
    run.until_started()
    os.kill(run.pid("trainer"), signal.SIGKILL)
    assert run.wait().state == "failed"
    assert "killing orchestrator" in run.log("launcher")
    run.assert_nothing_left()


def test_grandchildren_in_sessions_of_their_own_do_not_survive(start: Callable[..., Run]) -> None:
    # They have another session, so no signal to the group reaches them.
    run = start([toy("trainer", NESTED), toy("orchestrator", FOREVER)])
    run.until_started()
    run.until(lambda: run.log("trainer").count("working") == 2)
    os.kill(run.pid("trainer"), signal.SIGKILL)
    run.wait()
    run.assert_nothing_left()


@pytest.mark.long
def test_grandchildren_without_our_environment_do_not_survive(start: Callable[..., Run]) -> None:
    # Like vLLM's engine, which overwrites its environment with its title, so only its process group identifies it.
    nested = f"""
        import os, subprocess, sys
        subprocess.Popen([sys.executable, "-c", {FOREVER!r}], env={{"RLX_TEST_MARK": os.environ["RLX_TEST_MARK"]}})
        subprocess.Popen([sys.executable, "-c", {FOREVER!r}]).wait()
        """
    run = start([toy("trainer", nested)])
    run.until_started()
    run.until(lambda: run.log("trainer").count("working") == 2)
    os.kill(run.status().supervisor["pid"], signal.SIGKILL)  # type: ignore[index]
    run.wait()
    run.assert_nothing_left()


@pytest.mark.parametrize("victim", ["supervisor", "launcher", "submitit", "all of them"])
def test_sigkill_above_the_roles_fails_the_run_and_leaves_nothing(start: Callable[..., Run], victim: str) -> None:
    run = start([toy("inference", FOREVER, service=True), toy("trainer", NESTED)])
    run.until_started()
    run.until(lambda: run.log("trainer").count("working") == 2)
    supervisor = run.status().supervisor
    parent = int(Path(f"/proc/{supervisor['pid']}/stat").read_text().rpartition(")")[2].split()[1])
    pids = {"supervisor": supervisor["pid"], "launcher": run.launcher.pid, "submitit": parent}
    if victim in pids:
        os.kill(pids[victim], signal.SIGKILL)
    else:
        os.killpg(run.launcher.pid, signal.SIGKILL)  # they share the terminal's group
    run.launcher.wait(300)
    run.assert_nothing_left()
    status = run.status()
    assert (status.state, status.exit_code) == ("failed", 1)
    assert victim not in ("supervisor", "launcher") or status.cause.role == victim


@pytest.mark.long
def test_sigkill_of_the_launcher_before_the_supervisor_is_up_leaves_nothing(start: Callable[..., Run]) -> None:
    run = start([toy("trainer", FOREVER)])
    run.until(lambda: run.paths.status.exists())
    run.launcher.kill()
    run.launcher.wait()
    run.assert_nothing_left(timeout=150)  # submitit's job waits a minute for a function that was not handed over
    assert run.status().state in ("failed", "starting")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_run_cleanly(start: Callable[..., Run], signum: signal.Signals) -> None:
    clean = (
        "import signal, sys, time\ndef stop(*_): print('saved', flush=True); sys.exit(143)\nsignal.signal(signal.SIGTERM, stop)\n" + FOREVER
    )
    run = start([toy("inference", FOREVER, service=True), toy("trainer", clean)])
    run.until_started()
    os.killpg(run.launcher.pid, signum)
    status = run.wait()
    assert (status.state, status.exit_code, status.cause) == ("interrupted", 130, None)
    assert run.log("trainer") == "working\nsaved\n"
    run.assert_nothing_left()


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal."""
    (caught,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.long
def test_ctrl_c_before_the_supervisor_is_up_ends_the_run_too(start: Callable[..., Run]) -> None:
    run = start([toy("trainer", FOREVER)])
    # While the launcher starts the supervisor it ignores these signals; then it handles SIGINT, SIGTERM and SIGHUP, in this order.
    run.until(lambda: handles(run.launcher.pid, signal.SIGTERM))
    os.killpg(run.launcher.pid, signal.SIGINT)
    status = run.wait()
    assert (status.state, status.exit_code) == ("interrupted", 130)
    run.assert_nothing_left()


@pytest.mark.long
def test_a_second_ctrl_c_kills_at_once(start: Callable[..., Run]) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER
    run = start([toy("trainer", stubborn)], grace=3600)
    run.until_started()
    run.launcher.send_signal(signal.SIGINT)
    time.sleep(2)
    run.launcher.send_signal(signal.SIGINT)
    assert run.wait().state == "interrupted"
    run.assert_nothing_left()


@pytest.mark.long
def test_a_stuck_supervisor_does_not_keep_ctrl_c_from_ending_the_run(start: Callable[..., Run]) -> None:
    run = start([toy("trainer", FOREVER)], grace=0.5)
    run.until_started()
    os.kill(run.status().supervisor["pid"], signal.SIGSTOP)  # type: ignore[index]
    run.launcher.send_signal(signal.SIGINT)
    assert run.wait().state == "interrupted"
    run.assert_nothing_left()


def test_a_process_without_heartbeats_is_taken_for_hung(start: Callable[..., Run]) -> None:
    beating = """
        import sys, time
        from pathlib import Path
        from rlx.heartbeat import Heartbeat
        from rlx.paths import RunPaths
        heart = Heartbeat(RunPaths(Path(sys.argv[1])), sys.argv[2])
        heart.beat("loading model")
        while sys.argv[2] == "orchestrator":
            heart.beat("loading model")
            time.sleep(0.1)
        time.sleep(3600)
        """
    run = start([toy(role, beating, arguments=(RUN_DIR, role)) for role in ("orchestrator", "trainer")], heartbeat_timeout=10)
    status = run.wait()
    assert (status.cause.role, status.cause.returncode) == ("trainer", None)
    assert "loading model" in status.cause.reason
    run.assert_nothing_left()


def test_the_status_follows_the_trainers_steps(start: Callable[..., Run]) -> None:
    training = """
        import sys, time
        from pathlib import Path
        from rlx.metrics import MetricsWriter
        writer = MetricsWriter(Path(sys.argv[1]) / "metrics.jsonl", "trainer")
        writer.write(0, {}); writer.write(1, {})
        print("two steps", flush=True)
        while not (Path(sys.argv[1]) / "go").exists(): time.sleep(0.02)
        writer.write(2, {})
        """
    run = start([toy("trainer", training, arguments=(RUN_DIR,))])
    run.until(lambda: run.status().step == 2)
    assert (run.status().state, run.status().max_steps, run.status().exit_code) == ("running", 3, None)
    (run.paths.root / "go").touch()
    status = run.wait()
    assert (status.state, status.step) == ("completed", 3)


@pytest.mark.long
def test_two_runs_at_once_do_not_meet(start: Callable[..., Run]) -> None:
    one = start([toy("trainer", FOREVER)], name="one")
    two = start([toy("trainer", "import time; time.sleep(2); print('done')")], name="two")
    one.until_started()
    os.kill(one.pid("trainer"), signal.SIGKILL)
    assert one.wait().state == "failed"
    assert two.wait().state == "completed"
    one.assert_nothing_left()
    two.assert_nothing_left()
