"""What `rlx runs` and a waiting launcher say of jobs, and write for those that could not: with stand-ins for SLURM's commands."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlx.cli import main
from rlx.launch import sweep
from rlx.launch.follow import SELDOM, Waiting, close, close_ended, follow
from rlx.paths import RunPaths
from rlx.runs import jobs
from rlx.runs.claim import RunLock
from rlx.runs.jobs import Wait, note_job, waits
from rlx.runs.run import Run
from rlx.runs.status import Status, read_status

PENDING = """\
7|gpu|2026-11-23T14:20:00|Priority
12_1|gpu,old|N/A|Resources
9|cpu|N/A|Priority
14|gpu|2026-11-24T08:00:00|Dependency
"""


class Controller:
    """Stand-ins for `squeue` and `sacct` in the PATH, which note how they are called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.answers(mine="", accounting="exit 1")

    def answers(self, mine: str, accounting: str, script: object = "/a/run.sh") -> None:
        """`mine`: the user's jobs and their states; `accounting`: what sacct does; `script`: that these jobs run."""
        scripts = "\n".join(f"{line}|{script}" for line in mine.splitlines())
        squeue = f"case \"$*\" in *%o*) cat <<'X'\n{scripts}\nX\n;; *--me*) cat <<'X'\n{mine}\nX\n;; *) cat <<'X'\n{PENDING}X\n;; esac"
        for name, does in (("squeue", squeue), ("sacct", accounting)):
            path = self.folder / name
            path.write_text(f"#!/bin/sh\necho {name} >> {self.folder}/asked\n{does}\n")
            path.chmod(0o755)

    def asked(self) -> list[str]:
        return (self.folder / "asked").read_text().split()


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Controller:
    made = Controller(tmp_path / "bin")
    monkeypatch.setattr("rlx.runs.run.PATIENCE", 0.1)
    monkeypatch.setenv("PATH", f"{made.folder}{os.pathsep}{os.environ['PATH']}")
    return made


def run_of(root: Path, job: str, state: str = "starting", *, old: bool = False) -> RunPaths:
    paths = RunPaths(root)
    root.mkdir(parents=True)
    status = Status(max_steps=9, step=4, job=job)
    if state in ("preempted", "completed"):
        status.finish(state)
    status.state = state
    status.write(paths)
    if old:
        paths.status.write_text(paths.status.read_text().replace(str(status.updated), str(status.updated - 600)))
    note_job(paths, job, script_of(paths).with_name(f"{job}_0_log.out"))
    return paths


def script_of(paths: RunPaths) -> Path:
    return paths.root / ".submitit" / ".submission_file_1.sh"


def test_a_job_that_waits_says_why_at_which_place_and_until_when(controller: Controller) -> None:
    assert {job: str(wait) for job, wait in waits(["7", "12_1", "9", "14", "15"]).items()} == {
        "7": "Priority, 1 of 3 waiting in gpu, start about 2026-11-23 14:20",
        "12_1": "Resources, 2 of 3 waiting in gpu,old",
        "9": "Priority, 1 of 1 waiting in cpu",
        "14": "Dependency, 3 of 3 waiting in gpu, start about 2026-11-24 08:00",
    }


def test_the_place_of_one_job_does_not_cost_that_of_every_other(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = "".join(f"{number}|gpu|N/A|Priority\n" for number in range(1000))
    monkeypatch.setattr(jobs, "ask", lambda *command: subprocess.CompletedProcess(command, 0, queued, ""))
    compared, rivals = [], jobs._rivals
    monkeypatch.setattr(jobs, "_rivals", lambda counts, partitions: compared.append(len(counts)) or rivals(counts, partitions))
    assert waits(["700"]) == {"700": Wait("Priority", "701 of 1000 waiting in gpu")}
    assert sum(compared) == 2, "one partition, counted once for the place and once for the number"


def test_the_list_of_runs_asks_once_for_all_and_tells_why_they_wait(controller: Controller, tmp_path: Path, capsys) -> None:
    controller.answers("12_1|PENDING\n14|PENDING\n15|RUNNING", "exit 1")
    for name, job in (("a", "12_1"), ("b", "14"), ("c", "15")):
        run_of(tmp_path / "out" / name, job)
    assert main(["runs", str(tmp_path / "out")]) == 0
    rows = {Path(line.split()[0]).name: line for line in capsys.readouterr().out.splitlines()}
    assert rows["a"].endswith("Resources, 2 of 3 waiting in gpu,old")
    assert rows["b"].endswith("Dependency, 3 of 3 waiting in gpu, start about 2026-11-24 08:00")
    assert rows["c"].endswith("ago")
    assert controller.asked() == ["squeue", "squeue"], "one question for all states, and one for the queue because some wait"


@pytest.mark.parametrize(
    ("before", "old", "mine", "accounting", "after", "said"),
    [
        ("starting", False, "12|CANCELLED", "exit 1", "interrupted", None),
        ("preempted", False, "12|CANCELLED", "exit 1", "interrupted", None),
        ("starting", False, "", "echo '12|CANCELLED by 1000|sbatch SCRIPT'", "interrupted", None),
        ("starting", False, "12|FAILED", "exit 1", "starting", None),  # what it wrote may not be visible yet
        ("starting", True, "12|FAILED", "exit 1", "failed", "SLURM job 12 ended as FAILED"),
        ("running", True, "12|NODE_FAIL", "exit 1", "failed", "SLURM job 12 ended as NODE_FAIL"),
        ("starting", True, "", "exit 1", "starting", None),  # perhaps the job of another cluster
        ("preempted", True, "12|PENDING", "exit 1", "preempted", None),
        ("completed", True, "12|CANCELLED", "exit 1", "completed", None),
    ],
)
def test_the_list_of_runs_writes_the_end_that_no_process_could_write(
    controller: Controller, tmp_path: Path, capsys, before, old, mine, accounting, after, said
) -> None:
    paths = run_of(tmp_path / "out" / "run", "12", before, old=old)
    controller.answers(mine, accounting.replace("SCRIPT", str(script_of(paths))), script_of(paths))
    lock = RunLock(paths)
    lock.share()  # a process of the run still lives
    assert main(["runs", str(tmp_path / "out")]) == 0
    assert read_status(paths).state == before
    lock.close()
    capsys.readouterr()
    assert main(["runs", str(tmp_path / "out")]) == 0
    status, shown = read_status(paths), capsys.readouterr().out
    assert (status.state, status.step) == (after, 4)
    assert said is None or (said in status.cause.reason and said in shown)


def test_the_list_of_runs_writes_nothing_for_another_runs_job_of_the_same_id(controller: Controller, tmp_path: Path) -> None:
    paths, other = run_of(tmp_path / "out" / "run", "12", old=True), run_of(tmp_path / "out" / "other", "12", old=True)
    unrecorded = run_of(tmp_path / "out" / "unrecorded", "12", old=True)
    note_job(unrecorded, "12")  # without its output, so it cannot be compared
    for mine, accounting in (("12|CANCELLED", "exit 1"), ("", f"echo '12|CANCELLED|sbatch {script_of(other)}'")):
        controller.answers(mine, accounting, tmp_path / "elsewhere" / ".submitit" / "x.sh")
        assert main(["runs", str(tmp_path / "out")]) == 0
    assert [read_status(each).state for each in (paths, other, unrecorded)] == ["starting", "interrupted", "starting"]


@pytest.mark.parametrize(
    ("directory", "name", "after"), [(None, "losses", "interrupted"), (None, "other", "starting"), ("/x", "losses", "starting")]
)
def test_the_accounting_of_a_slurm_without_submit_lines_tells_a_run_by_directory_and_name(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory, name, after
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = run_of(tmp_path / "out" / "run", "12_3")
    note_job(paths, "12_3", script_of(paths).with_name("12_3_0_log.out"), "losses")
    refuses = "*SubmitLine*) echo 'sacct: error: Invalid field requested: \"SubmitLine\"' >&2; exit 1"
    row = f"12_3|CANCELLED by 1000|{directory or tmp_path}|{name}"
    controller.answers("", f"case \"$*\" in {refuses};; *) echo '{row}';; esac")
    assert main(["runs", str(tmp_path / "out")]) == 0
    assert read_status(paths).state == after
    assert controller.asked() == ["squeue", "squeue", "sacct", "sacct"]


@pytest.mark.parametrize(
    ("row", "tasks"),
    [
        ("12_[3-7]", {3, 4, 5, 6, 7}),
        ("12_[3-7%2]", {3, 4, 5, 6, 7}),
        ("12_[1,4-6]", {1, 4, 5, 6}),
        ("12_[0-8:4]", {0, 4, 8}),
        ("12_[6]", {6}),
        ("12_6", {6}),
    ],
)
def test_tasks_that_were_cancelled_in_the_queue_share_a_row_of_the_accounting(
    controller: Controller, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, tasks: set[int]
) -> None:
    script = tmp_path / "out" / ".submitit" / ".submission_file_1.sh"
    for task in range(9):
        paths = run_of(tmp_path / "out" / f"seed={task}", f"12_{task}")
        note_job(paths, f"12_{task}", script.with_name(f"12_{task}_0_log.out"))
    its = tmp_path / "arguments"
    rows = f"12_2|COMPLETED|sbatch {script}\n{row}|CANCELLED by 1000|sbatch {script}\n13_[0-8]|FAILED|sbatch {script}"
    controller.answers("", f"echo \"$SLURM_BITSTR_LEN $*\" > {its}; cat <<'X'\n{rows}\nX")
    assert main(["runs", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("interrupted") == len(tasks)
    for task in range(9):
        assert read_status(RunPaths(tmp_path / "out" / f"seed={task}")).state == ("interrupted" if task in tasks else "starting")
    assert its.read_text().startswith("0 "), "else SLURM cuts long lists of tasks off"
    assert "--jobs=12 " in its.read_text(), "12_3 alone may not find the row"


def test_a_run_that_is_submitted_again_while_slurm_answers_keeps_its_new_status(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = run_of(tmp_path / "out" / "run", "12")

    def submitted_again(ids: Sequence[str]) -> dict[str, tuple[str, str]]:
        Status(max_steps=9, step=4).write(paths)
        note_job(paths, "13", script_of(paths).with_name("13_0_log.out"))
        return {"12": ("CANCELLED", str(script_of(paths)))}

    monkeypatch.setattr("rlx.launch.follow.find_jobs", submitted_again)
    close_ended([Run(paths)], {})
    assert read_status(paths).state == "starting"


def test_a_launcher_that_waits_for_its_job_says_why_the_job_waits(controller: Controller, tmp_path: Path, capsys, monkeypatch) -> None:
    paths = run_of(tmp_path / "run", "14")
    # The job waits when it is asked for first; then it is cancelled in the queue.
    states = f'if [ -e {tmp_path}/seen ]; then echo "14|CANCELLED"; else touch {tmp_path}/seen; echo "14|PENDING"; fi'
    squeue = controller.folder / "squeue"
    squeue.write_text(f"#!/bin/sh\ncase \"$*\" in *--me*) {states};; *) printf '%s' '{PENDING}';; esac\n")
    monkeypatch.setattr("rlx.launch.follow.ASK", 0.01)
    assert follow(paths, "14") == 130
    assert capsys.readouterr().out == "job 14 waits: Dependency, 3 of 3 waiting in gpu, start about 2026-11-24 08:00\n"


def test_the_place_of_a_waiting_job_is_told_ever_more_seldom_and_a_new_reason_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, day, told = [0.0], 24 * 3600.0, []
    reason, waiting = "Priority", Waiting()
    monkeypatch.setattr("rlx.launch.follow.time", SimpleNamespace(monotonic=lambda: clock[0]))
    # Others submit and end all the time: place and estimated start are new at each look.
    monkeypatch.setattr("rlx.launch.follow.waits", lambda names: {"7": Wait(reason, f"{clock[0]:.0f} of 9999 waiting in gpu")})
    while clock[0] < day:
        waiting.tell({"7": "job 7"})
        told += [(clock[0], line) for line in capsys.readouterr().out.splitlines()]
        clock[0] += 10
    times = [when for when, _ in told]
    assert times[:5] == [0, 60, 180, 420, 900], "first after a minute, then each time twice as long"
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) == SELDOM
    assert len(told) < 60, "a day in the queue"
    reason = "Resources"
    waiting.tell({"7": "job 7"})
    assert capsys.readouterr().out == f"job 7 waits: Resources, {day:.0f} of 9999 waiting in gpu\n"


def test_a_sweep_that_waits_says_why_its_jobs_wait_with_one_question_for_all(tmp_path: Path, capsys, monkeypatch) -> None:
    names = {f"12_{number}": f"seed={number}" for number in range(8)}
    runs = {job: run_of(tmp_path / name, job) for job, name in names.items()}
    elements = [SimpleNamespace(name=names[job], job=job, paths=paths) for job, paths in runs.items()]
    asked, looks = [], itertools.count()

    def why(wanted: Sequence[str]) -> dict[str, Wait]:
        asked.append(list(wanted))
        return {job: Wait("Priority", f"{int(job[3:]) + 1} of 9 waiting in gpu") for job in wanted}

    def states() -> dict[str, str]:
        if (look := next(looks)) == 4:
            for paths in runs.values():
                Status(state="completed").write(paths)
        return dict.fromkeys(names, "PENDING") | ({"12_0": "RUNNING"} if look else {})

    monkeypatch.setattr("rlx.launch.follow.ASK", 0.0)
    monkeypatch.setattr("rlx.launch.follow.waits", why)
    monkeypatch.setattr("rlx.launch.sweep.queue", states)
    monkeypatch.setattr("rlx.launch.sweep.LOOK", 0.01)
    sweep.wait_for_jobs(elements)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "seed=0 (job 12_0) waits: Priority, 1 of 9 waiting in gpu"
    assert lines[5:] == ["and 3 more jobs; rlx runs shows all"]
    assert asked == [list(names)], "again after half a minute at the earliest"


def test_a_sweep_that_waits_leaves_a_run_to_the_job_that_has_it_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = run_of(tmp_path / "run", "14")
    note_job(paths, "15")
    monkeypatch.setattr("rlx.launch.follow.ASK", 0.0)
    monkeypatch.setattr("rlx.launch.sweep.queue", lambda: {"14": "CANCELLED", "15": "PENDING"})
    monkeypatch.setattr("rlx.launch.sweep.LOOK", 0.01)
    sweep.wait_for_jobs([SimpleNamespace(name="run", job="14", paths=paths)])
    assert read_status(paths).state == "starting"


def test_a_launcher_that_waits_asks_slurm_every_ten_seconds_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, clock, asked = run_of(tmp_path / "run", "14"), itertools.count(1000), []
    times = SimpleNamespace(monotonic=lambda: next(clock), time=lambda: next(clock), sleep=lambda seconds: None)  # one passes at each look

    def queue() -> dict[str, str]:
        asked.append(next(clock))
        return {"14": "RUNNING" if len(asked) < 6 else "CANCELLED"}

    monkeypatch.setattr("rlx.launch.follow.time", times)
    monkeypatch.setattr("rlx.launch.follow.queue", queue)
    assert follow(paths, "14") == 130
    assert min(later - earlier for earlier, later in itertools.pairwise(asked)) >= 10


@pytest.mark.parametrize(
    ("state", "output_is_newer", "said"),
    [
        ("preempted", False, "run is in use by another run"),  # it has been requeued, so the attempt's own log says nothing of this start
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
    assert cause is not None
    assert cause.last_lines[-1] == said
    assert said in (paths.root / cause.log).read_text()


def test_who_follows_a_job_leaves_the_run_to_the_job_that_has_it_now(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = run_of(tmp_path / "run", "14")
    monkeypatch.setattr("rlx.launch.follow.queue", lambda: {"14": "CANCELLED", "15": "PENDING"})
    monkeypatch.setattr("rlx.launch.follow.ASK", 0.01)
    monkeypatch.setattr("rlx.launch.follow.UPDATE", 0.02)
    note_job(paths, "15")
    assert follow(paths, "14") == 1
    assert read_status(paths).state == "starting"
    assert "is job 15's now; job 14 has ended (CANCELLED)" in capsys.readouterr().err
