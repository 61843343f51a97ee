"""`rlx watch`: follows a run by its files until it ends, and the tmux session with a pane for each log."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from test_console import add_step, rendered

from rlx.cli import main
from rlx.cli.console import Console
from rlx.cli.tmux import logs_of, make, session_of
from rlx.config.load import compose, to_yaml
from rlx.paths import RunPaths
from rlx.plan.process_spec import ProcessSpec, write_plan
from rlx.runs.jobs import note_job
from rlx.runs.run import Run
from rlx.runs.status import Cause, Status


@pytest.fixture(autouse=True)
def quick_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.cli.watch.UPDATE", 0.02)
    monkeypatch.setattr("rlx.cli.watch.LOST_SECONDS", 0.2)


def make_run(root: Path, **status: object) -> RunPaths:
    paths = RunPaths(root)
    root.mkdir(parents=True)
    paths.config.write_text(to_yaml(compose(["max_steps=3"], environ={}).cfg))
    Status(max_steps=3, started=time.time() - 100, **status).write(paths)  # type: ignore[arg-type]
    return paths


def test_a_run_is_followed_until_it_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    alive = {"host": socket.gethostname(), "pid": os.getpid()}
    paths = make_run(tmp_path / "mine", state="running", launcher=alive)
    add_step(paths.root, 0, time.time())

    shown_once, update = threading.Event(), Console.update

    def seen(console: Console) -> None:
        update(console)
        shown_once.set()

    def end() -> None:
        assert shown_once.wait(300)
        add_step(paths.root, 1, time.time())
        status = Status(max_steps=3, started=time.time() - 100, step=2)
        status.finish(
            "failed", Cause(role="trainer", replica=0, returncode=1, reason="exit code 1", log="logs/t.log", last_lines=("boom",))
        )
        status.write(paths)

    monkeypatch.setattr(Console, "update", seen)
    ending = threading.Thread(target=end)
    ending.start()
    assert main(["watch", str(paths.root)]) == 1
    ending.join()
    shown = capsys.readouterr()
    assert "step 1/3" in shown.out
    assert "mine: failed after 2 of 3 steps, 1:4" in shown.out  # 100 s and a little
    assert "trainer failed: exit code 1" in shown.err
    assert "  | boom" in shown.err


def test_a_run_that_has_ended_is_summed_up_and_a_dead_one_is_called_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    done = make_run(tmp_path / "done", state="completed", exit_code=0)
    assert main(["watch", str(done.root)]) == 0
    assert "done: completed" in capsys.readouterr().out
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = make_run(tmp_path / "dead", state="running", launcher={"host": socket.gethostname(), "pid": ended.pid})
    assert main(["watch", str(dead.root)]) == 1
    assert "no living process: resume it with resume=latest" in capsys.readouterr().err


def test_what_cannot_be_watched_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["watch"]) == 2
    assert main(["watch", str(tmp_path / "absent")]) == 2
    dry = make_run(tmp_path / "dry")
    dry.status.unlink()
    assert main(["watch", str(dry.root)]) == 2
    assert "has not been started" in capsys.readouterr().err
    assert main(["watch", "--tmux", str(make_run(tmp_path / "mine", state="completed").root)]) == 2
    assert "--tmux needs" in capsys.readouterr().err


def test_the_panel_shows_who_waits_for_whom_and_the_last_line_of_each_log(tmp_path: Path):
    paths = make_run(tmp_path / "mine", state="running")
    paths.logs(0).mkdir(parents=True)
    paths.latest_logs.symlink_to("attempt_0")
    (paths.logs(0) / "trainer.log").write_text("first\nstep [3] took 2 s\n")
    add_step(paths.root, 0, time.time(), **{"time/wait_weights": 0.1})
    console = Console(paths.root, compose(["max_steps=3"], environ={}).cfg)
    console.tail, console.note = ["trainer", "orchestrator"], "job 7 is waiting (pending): Priority"
    console.update()
    text = rendered(console)
    assert "trainer 0:00: wait for batch 60% · forward and backward 40%" in text
    assert "trainer.log  step [3] took 2 s" in text
    assert "orchestrator.log" not in text, "it has written nothing"
    assert "job 7 is waiting (pending): Priority" in text


def test_a_job_in_the_queue_is_explained_until_it_runs(tmp_path: Path, capsys, monkeypatch):
    paths = make_run(tmp_path / "mine")
    note_job(paths, "7")
    answers = iter([{"7": "PENDING"}, {"7": "PENDING"}, {"7": "RUNNING"}])
    monkeypatch.setattr("rlx.runs.jobs.queue", lambda: next(answers, {"7": "RUNNING"}))
    monkeypatch.setattr("rlx.runs.jobs.waits", lambda jobs: {"7": "Priority, 3 of 12 waiting in gpu"})
    monkeypatch.setattr("rlx.cli.watch.ASK", 0.0)
    update, seen = Console.update, []

    def look(console: Console) -> None:
        update(console)
        seen.append(console.note)
        if not console.note:  # it runs
            status = Status(max_steps=3)
            status.finish("completed")
            status.write(paths)

    monkeypatch.setattr(Console, "update", look)
    assert main(["watch", str(paths.root)]) == 0
    assert capsys.readouterr().out.count("job 7 is waiting (pending): Priority, 3 of 12 waiting in gpu") == 1
    assert (bool(seen[0]), seen[-1]) == (True, "")


@pytest.mark.parametrize("moves", [True, False])
def test_a_run_on_another_host_lives_as_long_as_its_files_change_whatever_its_clock_says(tmp_path, capsys, monkeypatch, moves: bool):
    """Its clock is an hour late, so its status always looks old."""
    paths = make_run(tmp_path / "mine", state="running", supervisor={"host": "elsewhere", "pid": 1})
    update, began = Console.update, time.monotonic()

    def late() -> None:
        record = json.loads(paths.status.read_text())
        record["updated"] = time.time() - 3600
        paths.status.write_text(json.dumps(record))

    def look(console: Console) -> None:
        update(console)
        if moves:
            late()
            if time.monotonic() - began > 0.5:
                status = Status(max_steps=3)
                status.finish("completed")
                status.write(paths)

    late()
    monkeypatch.setattr(Console, "update", look)
    assert main(["watch", str(paths.root)]) == (0 if moves else 1)
    assert ("no living process" in capsys.readouterr().err) is not moves


def test_a_preempted_run_whose_job_is_still_known_is_followed_on(tmp_path, monkeypatch):
    paths = make_run(tmp_path / "mine", state="preempted", exit_code=75)
    note_job(paths, "7")
    states = iter(["RUNNING", "REQUEUED", "RUNNING", "COMPLETED"])
    monkeypatch.setattr("rlx.runs.jobs.queue", lambda: {"7": next(states)})
    monkeypatch.setattr("rlx.runs.jobs.waits", lambda jobs: {})
    monkeypatch.setattr("rlx.cli.watch.ASK", 0.0)
    assert main(["watch", str(paths.root)]) == 75
    assert list(states) == []


def test_a_machine_without_tmux_is_told_what_is_missing(tmp_path: Path, monkeypatch, capsys):
    paths = make_run(tmp_path / "mine", state="completed")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["watch", "--tmux", str(paths.root)]) == 2
    assert "--tmux needs tmux and a terminal.\n  fix: apt-get install tmux" in capsys.readouterr().err


@pytest.mark.slow
def test_each_log_has_a_pane_that_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if shutil.which("tmux") is None:
        pytest.skip("this machine has no tmux, which is not needed to run rlx")
    place = tempfile.mkdtemp(dir="/tmp")  # its path is short: a socket's has at most 107 characters
    monkeypatch.setenv("TMUX_TMPDIR", place)  # a server of its own
    monkeypatch.delenv("TMUX", raising=False)
    paths = make_run(tmp_path / "my.run", state="completed", exit_code=0)
    specs = [
        ProcessSpec(role="inference", replica=0, node=0, gpus=(), service=True),
        ProcessSpec(role="trainer", replica=0, node=0, gpus=()),
    ]
    write_plan(paths.plan, specs)
    paths.logs(0).mkdir(parents=True)
    paths.latest_logs.symlink_to("attempt_0")
    (paths.logs(0) / "trainer.log").write_text("first line\n")
    run = Run(paths)
    assert (session_of(run), logs_of(run)) == ("rlx-my_run", ["inference_0", "trainer"])
    try:
        subprocess.run(make(run, "rlx-my_run"), check=True)
        panes = _tmux("list-panes", "-t", "=rlx-my_run:", "-F", "#{pane_id} #{pane_title}").splitlines()
        ids = {title: pane for pane, _, title in (line.partition(" ") for line in panes)}
        assert set(ids) == {"my.run", "inference_0", "trainer"}
        _until(ids["trainer"], "first line")
        paths.logs(1).mkdir()  # the run starts again
        (paths.logs(1) / "trainer.log").write_text("second attempt\n")
        link = paths.latest_logs.with_name("new")
        link.symlink_to("attempt_1")
        link.replace(paths.latest_logs)
        _until(ids["trainer"], "second attempt")
        _until(ids["my.run"], "my.run: completed")
    finally:
        subprocess.run(["tmux", "kill-server"], check=False)
        shutil.rmtree(place, ignore_errors=True)


def _tmux(*arguments: str) -> str:
    return subprocess.run(["tmux", *arguments], capture_output=True, text=True, check=True).stdout


def _until(pane: str, text: str) -> None:
    end = time.monotonic() + 300
    while text not in (screen := _tmux("capture-pane", "-p", "-t", pane)):
        assert time.monotonic() < end, f"{text!r} is not in the pane:\n{screen}"
        time.sleep(0.1)


@pytest.mark.slow
def test_ctrl_c_ends_the_display_and_not_the_run(tmp_path: Path):
    alive = {"host": socket.gethostname(), "pid": os.getpid()}
    paths = make_run(tmp_path / "mine", state="running", launcher=alive)
    command = [sys.executable, "-m", "rlx.cli", "watch", str(paths.root)]
    heeded = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  (a shell starts its background jobs with SIGINT ignored)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeded)
    assert process.stdout.readline().startswith("run ")
    time.sleep(0.1)
    for _ in range(20):  # Python loses an interrupt that comes while it collects garbage
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, error = process.communicate(timeout=30)
            break
    assert process.returncode == 0
    assert "the run goes on" in error
