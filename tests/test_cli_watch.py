"""`rlx watch`: follows a run by its files until it ends, and the tmux session with a pane for each log."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_console import add_step

from rlx.cli import main
from rlx.cli.console import Console
from rlx.cli.panes import logs_of, make, session_of
from rlx.config.load import compose, to_yaml
from rlx.paths import RunPaths
from rlx.plan.record import write_plan
from rlx.runs.run import Run
from rlx.runs.status import Cause, Status
from rlx.types import ProcessSpec


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


@pytest.mark.slow
def test_each_log_has_a_pane_that_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if shutil.which("tmux") is None:
        pytest.skip("this machine has no tmux, which is not needed to run rlx")
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))  # a server of its own
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
        assert make(run, "rlx-my_run") == []
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
    assert process.stdout is not None
    assert process.stdout.readline().startswith("run ")
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=600)
    assert process.returncode == 0
    assert "the run goes on" in error
