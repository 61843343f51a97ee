"""Reading run directories that are half-made, another user's, alive or lost; reading changes nothing."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from launch_configs import config

from rlx.cli import main
from rlx.config.errors import ConfigError
from rlx.config.schema import RunConfig
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths
from rlx.plan.make import make_plan
from rlx.runs.history import History
from rlx.runs.run import Run, find
from rlx.runs.run_dir import create
from rlx.runs.status import Status


def made(root: Path) -> Run:
    cfg = replace(config("cpu"), run=RunConfig(name=root.name, dir=str(root)))
    paths, lock = create(cfg, ["seed=1"], make_plan(cfg, root))
    lock.close()
    return Run(paths)


def status(run: Run, **fields) -> Status:
    found = Status(max_steps=10, **fields)
    found.write(run.paths)
    return found


@pytest.fixture
def other_pid() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.pid
    process.kill()
    process.wait()


def test_all_that_a_run_directory_holds(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    assert (run.name, run.config.seq_len, run.overrides) == ("run", 8192, ["seed=1"])
    assert [spec.role for spec in run.plan] == ["inference", "orchestrator", "trainer"]
    assert run.provenance["rlx"]
    writer = MetricsWriter(run.paths.metrics, "orchestrator")
    for step in range(3):
        writer.write(step, {"reward/mean": step})
    run.paths.logs(0).mkdir(parents=True)
    run.paths.rollouts_of(2).parent.mkdir()
    run.paths.rollouts_of(2).touch()
    assert run.history.final_reward == 1.0
    assert (run.rollouts, run.checkpoints, run.job, run.data) == ([2], [], None, None)


def test_an_empty_directory_is_a_run_of_which_nothing_is_there(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert (run.config, run.plan, run.status, run.provenance, run.overrides) == (None, [], None, None, [])
    assert (run.state(), run.lives(), run.history.steps, run.history.final_reward) == ("not started", False, 0, None)
    with pytest.raises(ConfigError, match="is no run directory"):
        Run.open(tmp_path)
    with pytest.raises(ConfigError, match="there is no directory"):
        Run.open(tmp_path / "absent")


def test_a_file_of_another_version_is_named(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    run.paths.status.write_text('{"state": "running", "cause": null, "mood": "good"}')
    with pytest.raises(ConfigError, match=r"this version of rlx cannot read .*status.json .*mood"):
        _ = run.status


def test_a_run_lives_as_long_as_a_process_that_its_status_names(tmp_path: Path, other_pid: int) -> None:
    run, here = made(tmp_path / "run"), socket.gethostname()
    status(run, state="running", supervisor={"host": here, "pid": other_pid})
    assert run.state() == "running"
    status(run, state="running", supervisor={"host": here, "pid": 2**22 + 1})
    assert run.state() == "lost"


def test_a_later_process_that_has_the_number_of_one_of_the_run_is_not_it(tmp_path: Path, other_pid: int) -> None:
    run = made(tmp_path / "run")
    found = status(run, state="running", supervisor={"host": socket.gethostname(), "pid": other_pid})
    old = found.updated - 100
    run.paths.status.write_text(run.paths.status.read_text().replace(str(found.updated), str(old)))
    assert run.state() == "lost"


def test_a_run_on_another_host_lives_while_its_status_is_written(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    found = status(run, state="running", launcher={"host": "elsewhere", "pid": 1})
    assert run.state() == "running"
    run.paths.status.write_text(run.paths.status.read_text().replace(str(found.updated), str(time.time() - 600)))
    assert Run(run.paths).state() == "lost"


def test_looking_takes_no_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path / "run")
    status(run, state="running")
    monkeypatch.setattr(fcntl, "flock", lambda *_: pytest.fail("the lock was taken"))
    assert main(["runs", str(tmp_path)]) == 0
    assert "lost" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_somebody_elses_runs_are_listed(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp())  # other users cannot read pytest's folders
    try:
        for name, mode in (("open", 0o644), ("closed", 0o600)):
            run = made(folder / name)
            status(run, state="running", supervisor={"host": socket.gethostname(), "pid": os.getpid()})
            run.paths.lock.chmod(0o600)
            run.paths.status.chmod(mode)
        made(folder / "private")
        status(Run(folder / "private"), state="running")
        (folder / "private").chmod(0o700)
        folder.chmod(0o755)
        # Another user may not be able to read this Python, so the process changes its user after all imports.
        code = f"""
import os, sys
import rlx.cli.arguments, rlx.cli.report, rlx.cli.runs, rlx.cli.show, rlx.cli.view, rlx.launch.wait_for_job
import rlx.plan.explain, rlx.report.gather, rlx.report.sweep, rlx.runs.rollouts, rlx.runs.run
import rlx.view.app, rlx.view.selection
from rlx.config.errors import ConfigError
from rlx.config.from_run import find_weights
os.setgroups([]), os.setegid(65534), os.seteuid(65534)
private = {str(folder / "private")!r}
looks = dict(show=rlx.cli.show.run, view=rlx.cli.view.run, report=rlx.cli.report.run, weights=lambda argv: find_weights(*argv))
for name, look in looks.items():
    for place in (private, private + "/inside"):
        try:
            print(name, look([place]), file=sys.stderr)
        except ConfigError as error:
            assert f"you may not read {{private}}" in str(error), (name, error)
            print("refused:", name, file=sys.stderr)
sys.exit(rlx.cli.runs.run([{str(folder)!r}]))"""
        listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert listed.returncode == 0, listed.stderr
        rows = {Path(line.split()[0]).name: line.split()[2] for line in listed.stdout.splitlines()[1:]}
        assert rows == {"open": "running", "closed": "unreadable", "private": "unreadable"}
        refused = [line.split()[1] for line in listed.stderr.splitlines() if line.startswith("refused:")]
        assert refused == [name for name in ("show", "view", "report", "weights") for _ in range(2)]
        assert "you may not read" in listed.stderr
        assert "Traceback" not in listed.stderr
    finally:
        shutil.rmtree(folder)


def test_runs_are_found_below_a_folder_but_not_inside_of_runs(tmp_path: Path) -> None:
    for name in ("one", "sweep/a", "sweep/b"):
        status(made(tmp_path / name))
    assert [str(run.root.relative_to(tmp_path)) for run in find(tmp_path)] == ["one", "sweep/a", "sweep/b"]


def test_the_speed_over_several_steps_is_what_was_sampled_by_the_seconds_it_took(tmp_path):
    paths = RunPaths(tmp_path)
    writer = MetricsWriter(paths.metrics, "orchestrator")
    for step, (seconds, rate) in enumerate([(9.9, 100.0), (0.1, 3100.0)]):
        writer.write(step, {"time/step": seconds, "perf/inference_tokens_per_second": rate})
    history = History(paths)
    history.read()
    assert history.speed("perf/inference_tokens_per_second") == pytest.approx(130), "the mean of both rates is 1,600"
    assert history.speed("perf/inference_tokens_per_second", over=1) == pytest.approx(3100)
    assert history.speed("perf/tokens_per_second") is None
