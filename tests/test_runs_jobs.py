"""What `rlx runs` and a waiting launcher say of jobs, and write for those that could not: with stand-ins for SLURM's commands."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlx.cli import main
from rlx.launch.wait_for_job import close, follow, say_why, wait_for_jobs
from rlx.paths import RunPaths
from rlx.runs.jobs import note_job, waits
from rlx.runs.status import Status, read_status

PENDING = """\
7|Priority|2026-11-23T14:20:00
12_1|Resources|N/A
14|Dependency|2026-11-24T08:00:00
"""


class Controller:
    """A stand-in for `squeue` in the PATH, which notes that it is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.answers(mine="")

    def answers(self, mine: str) -> None:
        """`mine`: the user's jobs and their states."""
        squeue = f"case \"$*\" in *PENDING*) cat <<'X'\n{PENDING}X\n;; *) cat <<'X'\n{mine}\nX\n;; esac"
        path = self.folder / "squeue"
        path.write_text(f"#!/bin/sh\necho squeue >> {self.folder}/asked\n{squeue}\n")
        path.chmod(0o755)

    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().split()


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    made = Controller(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{made.folder}{os.pathsep}{os.environ['PATH']}")
    return made


def run_of(root: Path, job: str, state: str = "starting") -> RunPaths:
    paths = RunPaths(root)
    root.mkdir(parents=True)
    status = Status(max_steps=9, step=4, job=job)
    if state in ("preempted", "completed"):
        status.finish(state)
    status.state = state
    status.write(paths)
    note_job(paths, job, script_of(paths).with_name(f"{job}_0_log.out"))
    return paths


def script_of(paths: RunPaths) -> Path:
    return paths.root / ".submitit" / ".submission_file_1.sh"


def test_the_list_of_runs_asks_once_for_all_and_tells_why_they_wait(controller: Controller, tmp_path: Path, capsys) -> None:
    assert waits(["7", "15"]) == {"7": "Priority, start about 2026-11-23T14:20:00"}
    (controller.folder / "asked").unlink()
    controller.answers("12_1|PENDING\n14|PENDING\n15|RUNNING")
    for name, job in (("a", "12_1"), ("b", "14"), ("c", "15")):
        run_of(tmp_path / "out" / name, job)
    assert main(["runs", str(tmp_path / "out")]) == 0
    rows = {Path(line.split()[0]).name: line for line in capsys.readouterr().out.splitlines()}
    assert rows["a"].endswith(" Resources")
    assert rows["b"].endswith("Dependency, start about 2026-11-24T08:00:00")
    assert rows["c"].endswith("ago")
    assert controller.asked() == ["squeue", "squeue"], "one question for all states, and one for the queue because some wait"


@pytest.mark.parametrize(
    ("before", "mine", "shown"),
    [
        ("starting", "12|CANCELLED", "interrupted"),
        ("preempted", "12|CANCELLED", "interrupted"),
        ("preempted", "", "interrupted"),
        ("preempted", "12|PENDING", "waiting (pending)"),
        ("starting", "12|FAILED", "lost"),
        ("running", "12|NODE_FAIL", "lost"),
        ("starting", "", "lost"),
        ("completed", "12|CANCELLED", "completed"),
    ],
)
def test_the_list_of_runs_shows_the_end_that_no_process_could_write_and_writes_nothing(
    controller: Controller, tmp_path: Path, capsys, before, mine, shown
) -> None:
    paths = run_of(tmp_path / "out" / "run", "12", before)
    controller.answers(mine)
    assert main(["runs", str(tmp_path / "out")]) == 0
    assert f" {shown} " in capsys.readouterr().out
    assert read_status(paths).state == before


def test_a_launcher_that_waits_for_its_job_says_why_the_job_waits(controller: Controller, tmp_path: Path, capsys, monkeypatch) -> None:
    paths = run_of(tmp_path / "run", "14")
    # The job waits when it is asked for first; then it is cancelled in the queue.
    states = f'if [ -e {tmp_path}/seen ]; then echo "14|CANCELLED"; else touch {tmp_path}/seen; echo "14|PENDING"; fi'
    squeue = controller.folder / "squeue"
    squeue.write_text(f"#!/bin/sh\ncase \"$*\" in *PENDING*) printf '%s' '{PENDING}';; *) {states};; esac\n")
    monkeypatch.setattr("rlx.launch.wait_for_job.ASK", 0.01)
    assert follow(paths, "14") == 130
    assert capsys.readouterr().out == "job 14 waits: Dependency, start about 2026-11-24T08:00:00\n"


def test_why_jobs_wait_is_told_once_for_all_and_again_with_a_new_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason, starts, told = "Priority", itertools.count(), {}
    monkeypatch.setattr("rlx.launch.wait_for_job.waits", lambda jobs: dict.fromkeys(jobs, f"{reason}, start about {next(starts)}"))
    for _ in range(3):
        say_why(["12_0", "12_1", "12_2"], told)
    assert capsys.readouterr().out == "job 12_0 (and 2 more) waits: Priority, start about 0\n"
    reason = "Resources"
    say_why(["12_1"], told)
    assert capsys.readouterr().out == "job 12_1 waits: Resources, start about 3\n"


def test_who_waits_leaves_a_run_to_the_job_that_has_it_now(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = run_of(tmp_path / "run", "14")
    note_job(paths, "15")
    monkeypatch.setattr("rlx.launch.wait_for_job.ASK", 0.0)
    monkeypatch.setattr("rlx.launch.wait_for_job.UPDATE", 0.01)
    monkeypatch.setattr("rlx.launch.wait_for_job.queue", lambda: {"14": "CANCELLED", "15": "PENDING"})
    wait_for_jobs({"14": paths})
    assert follow(paths, "14") == 1
    assert read_status(paths).state == "starting"
    assert "is job 15's now; job 14 has ended" in capsys.readouterr().err


def test_a_launcher_that_waits_asks_slurm_every_ten_seconds_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, clock, asked = run_of(tmp_path / "run", "14"), itertools.count(1000), []
    times = SimpleNamespace(monotonic=lambda: next(clock), time=lambda: next(clock), sleep=lambda seconds: None)  # one passes at each look

    def queue() -> dict[str, str]:
        asked.append(next(clock))
        return {"14": "RUNNING" if len(asked) < 6 else "CANCELLED"}

    monkeypatch.setattr("rlx.launch.wait_for_job.time", times)
    monkeypatch.setattr("rlx.launch.wait_for_job.queue", queue)
    assert follow(paths, "14") == 130
    assert min(later - earlier for earlier, later in itertools.pairwise(asked)) >= 10


@pytest.mark.parametrize(
    ("state", "output_is_newer", "said"),
    [
        ("preempted", True, "run is in use by another run"),  # it has been requeued, so the attempt's own log says nothing of this start
        ("running", True, "run is in use by another run"),  # its node failed, SLURM requeued it
        ("running", False, "back in the queue"),  # it was killed in this attempt
    ],
)
def test_the_reason_of_a_comeback_that_is_refused_is_in_the_jobs_own_output(tmp_path: Path, state: str, output_is_newer, said) -> None:
    paths = run_of(tmp_path / "run", "12", state)
    paths.logs(0).mkdir(parents=True)
    launcher, output = paths.log(0, "launcher"), script_of(paths).with_name("12_0_log.out")
    output.parent.mkdir()
    launcher.write_text("job 12, restart 0\nback in the queue\n")
    output.write_text("run is in use by another run\n")
    os.utime(output, (0, launcher.stat().st_mtime + (5 if output_is_newer else -5)))
    cause = close(paths, "12", "FAILED").cause
    assert cause.last_lines[-1] == said
    assert said in (paths.root / cause.log).read_text()
