"""What a job does in its run directory, with fake SLURM commands: which job id it passes to them, and when it leaves the run alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import pytest

from rlx.checkpoints import folders
from rlx.config.load import compose
from rlx.config.roots import EVAL, SYNTHESIZE, TRAIN, Root
from rlx.launch.wait_for_job import close
from rlx.paths import RunPaths
from rlx.plan.process_spec import ProcessSpec
from rlx.runs.jobs import GONE, job_of, note_job, note_progress
from rlx.runs.run_dir import create, resolve_run_dir
from rlx.runs.status import EXIT_CODES, Status, read_status

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
STEP = 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'
COMMANDS = {
    "srun": STEP,
    "scancel": "exit 1",  # so the supervisor signals its own children
    "squeue": "echo 12_1.0 toy; echo 12_1.batch batch",
    "scontrol": "echo Restarts=0",
}
# Each in one line, because the fake commands write down what they were called with.
WAITS = (
    "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "pathlib.Path(sys.argv[1], 'waits').touch(); time.sleep(3600)"
)
FAILS_BESIDE_IT = (
    "import pathlib, sys, time; beside = pathlib.Path(sys.argv[1], 'waits'); "
    "[time.sleep(0.05) for _ in iter(beside.exists, True)]; sys.exit(3)"
)
LEAVES = "import sys; sys.exit(75)"
# No signal of SLURM's is on its way here, so an attempt does not wait for one before it ends.
ATTEMPT = """
import sys
from rlx.launch import slurm, verdict
verdict.SIGTERM_SPREADS, slurm.AGAIN = 0.1, 0.1
slurm.PAUSE = 0.1
slurm.Attempt(sys.argv[1])()
"""


class Job:
    """A run directory, and the fake SLURM commands that its job sees."""

    def __init__(self, folder: Path, *codes: str, argv: Sequence[str] = (), root: Root = TRAIN) -> None:
        line = [f"run.dir={folder / 'run'}", "hardware=cpu", "launcher.grace=0.5", *argv]
        composed = compose(line, {}, root)
        cfg = resolve_run_dir(composed.cfg, "label")
        plan = [
            ProcessSpec(role=f"toy{i}" if i else "toy", replica=0, node=0, gpus=(), argv=(sys.executable, "-c", code, str(folder / "run")))
            for i, code in enumerate(codes)
        ]
        self.paths, lock = create(cfg, [], plan)
        lock.close()
        self.folder = folder
        (folder / "bin").mkdir()
        for name, does in COMMANDS.items():
            self.command(name, does)

    def command(self, name: str, does: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.folder}/asked\n{does}\n')
        path.chmod(0o755)

    def notice(self, first: str = "") -> None:
        """Let every step send the supervisor SLURM's notice before it starts its process. `first`: what the step does before."""
        log = self.paths.latest_logs / "launcher.log"
        self.command("srun", f'{first} kill -USR2 "$PPID"; until grep -q "received SIGUSR2" \'{log}\'; do sleep 0.01; done; {STEP}')

    def run(self, output: IO[str] | None = None, **variables: str) -> int:
        """Run the job; return its exit code. `output`: the job's own output file."""
        slurm = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node1", **variables}
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)} | slurm
        argv = [sys.executable, "-c", ATTEMPT, str(self.paths.root)]
        return subprocess.run(argv, env=environment, stdout=output, timeout=600, check=False).returncode

    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return [line for line in path.read_text().splitlines() if not line.startswith("srun")] if path.exists() else []

    def status(self) -> Status:
        return read_status(self.paths)


def checkpoint(paths: RunPaths, step: int) -> Path:
    """An empty checkpoint; returns its folder."""
    folders.begin(paths, step)
    return folders.finish(paths, step, {}, {})


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    return lambda *codes, **options: Job(tmp_path, *codes, **options)


LAST = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1"}  # the last task of an array of two: its SLURM_JOB_ID is the array's


def test_the_last_of_an_array_names_itself_and_never_the_array(job):
    ends = job(FAILS_BESIDE_IT, WAITS)
    assert ends.run(**LAST) == 1
    assert "scancel --signal=INT 12_1" in ends.asked()
    assert "squeue --noheader --steps --jobs=12_1 --format=%i %j" in ends.asked()
    assert [line for line in ends.asked() if "12_1" not in line] == []
    assert ends.status().job == "12_1"


def test_the_last_of_an_array_requeues_itself_alone(job):
    leaves = job(LEAVES)
    leaves.notice()
    assert leaves.run(**LAST) == 75
    assert "scontrol requeue 12_1" in leaves.asked()
    assert [line for line in leaves.asked() if "12_1" not in line] == []


@pytest.mark.parametrize(("heard", "asks"), [(False, 2), (True, 1)])
def test_a_controller_that_does_not_answer_is_asked_again_for_a_requeue(job, tmp_path: Path, heard: bool, asks: int):
    """It may have heard a request that it did not answer."""
    leaves, file = job(LEAVES), tmp_path / "restarts"
    leaves.notice()
    late = f"echo Restarts=1 > {file}; " if heard else f"touch {file}; "
    says = 'echo "slurm_update error: Socket timed out on send/recv operation" >&2; exit 1'
    leaves.command(
        "scontrol",
        f'case "$*" in *requeue*) if [ ! -e {file} ]; then {late}{says}; fi;; *) [ -s {file} ] && cat {file} || echo Restarts=0;; esac',
    )
    assert leaves.run(**LAST) == 75
    assert leaves.status().state == "preempted"
    assert len([line for line in leaves.asked() if line.startswith("scontrol requeue")]) == asks


def test_a_requeue_that_slurm_refuses_fails_at_once(job):
    leaves = job(LEAVES)
    leaves.notice()
    leaves.command(
        "scontrol", "case \"$*\" in *requeue*) echo 'Requested operation is presently disabled' >&2; exit 1;; *) echo Restarts=0;; esac"
    )
    assert leaves.run(**LAST) == 1
    assert "SLURM refuses to requeue the job: Requested operation is presently disabled" in leaves.status().cause.reason
    assert len([line for line in leaves.asked() if line.startswith("scontrol requeue")]) == 1


def test_a_job_that_was_cancelled_while_it_left_is_not_brought_back(job):
    leaves = job(LEAVES)
    leaves.notice()
    leaves.command("scontrol", "echo JobState=COMPLETING Restarts=0")
    assert leaves.run(**LAST) == 130
    assert leaves.status().state == "interrupted"
    assert [line for line in leaves.asked() if line.startswith("scontrol requeue")] == []


def test_a_job_of_its_own_is_named_by_its_number(job):
    ends = job(FAILS_BESIDE_IT, WAITS)
    assert ends.run() == 1
    assert "scancel --signal=INT 12" in ends.asked()


@pytest.mark.parametrize(
    ("dead_for", "requeued_after", "code", "state"),
    [
        (99, 3, 75, "preempted"),  # SLURM gives the host up
        (1, 99, 1, "failed"),  # it answers the second time, so it was not the reason
        (0, 99, 1, "failed"),  # it answers at once
    ],
)
def test_a_process_that_fails_because_a_host_is_lost_leaves_the_job_to_slurm(
    job, dead_for: int, requeued_after: int, code: int, state: str
):
    fails = job("import sys; sys.exit(3)")
    asked = fails.folder / "asked"
    probe = f"case \"$*\" in *probe*node2*) [ $(grep -c 'probe.*node2' {asked}) -gt {dead_for} ]; exit;; esac"
    fails.command("srun", f"{probe}; {STEP}")
    restarts = f"[ $(grep -c 'show job' {asked}) -gt {requeued_after} ] && echo Restarts=1 || echo Restarts=0"
    fails.command("scontrol", f"case \"$*\" in *config*) echo 'SlurmdTimeout           = 60 sec';; *) {restarts};; esac")
    assert fails.run(SLURM_JOB_NODELIST="node[1-2]", SLURMD_NODENAME="node1") == code
    status = fails.status()
    assert (status.state, status.exit_code) == (state, code)
    assert (status.cause.role, status.cause.returncode) == ("toy", 3) if state == "failed" else status.cause is None
    log = fails.paths.log(0, "launcher").read_text()
    assert ("toy: exit code 3; node2 does not answer, which may be why" in log) == (dead_for > 0)
    assert ("SLURM requeues the job when it gives up node2: within 180 s" in log) == (dead_for > 0)
    assert not [line for line in fails.asked() if line.startswith("scontrol requeue")], "it could get the same host again"
    assert "--nodelist=node1 true" not in asked.read_text(), "this host needs no probe"


@pytest.mark.parametrize("notice", [True, False])
def test_a_job_that_waits_for_slurm_to_give_up_a_host_requeues_itself_at_the_notice_and_is_not_failed_by_a_silent_controller(
    job, notice: bool
):
    fails = job("import sys, time; time.sleep(1); sys.exit(3)")
    asked = fails.folder / "asked"
    fails.command(
        "srun", f"case \"$*\" in *probe*node2*) [ $(grep -c 'probe.*node2' {asked}) -gt {99 if notice else 1} ]; exit;; esac; {STEP}"
    )
    told = "[ $(grep -c 'show job' {asked}) -gt 1 ] && kill -USR2 $PPID; echo Restarts=0"  # the first question is asked at the start
    answer = told if notice else "[ $(grep -c 'probe.*node2' {asked}) -lt 1 ] && echo Restarts=0"
    fails.command("scontrol", f"case \"$*\" in *config*) echo 'SlurmdTimeout           = 60 sec';; *) {answer.format(asked=asked)};; esac")
    assert fails.run(SLURM_JOB_NODELIST="node[1-2]", SLURMD_NODENAME="node1") == 75
    assert fails.status().state == "preempted"
    assert "SLURM requeues the job when it gives up node2" in fails.paths.log(0, "launcher").read_text()
    assert any(line.startswith("scontrol requeue") for line in fails.asked()) == notice


def test_a_controller_that_says_nothing_does_not_hold_up_the_end(job, monkeypatch: pytest.MonkeyPatch):
    from rlx.launch.starters import SrunStarter
    from rlx.runs import jobs

    silent = job()
    for name in COMMANDS:
        silent.command(name, "exec sleep 30")
    monkeypatch.setenv("PATH", f"{silent.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(jobs, "TIMEOUT", 0.3)
    starter = SrunStarter("12", ["node1"])
    assert starter.terminate() is False
    starter.kill(["toy"])
    assert jobs.restarts_of("12") == -1
    with pytest.raises(RuntimeError, match=r"squeue gave no answer in 0.3 s"):
        jobs.queue()


def test_a_run_that_is_done_or_another_jobs_is_left_as_it_is(job):
    done = job("import pathlib, sys; pathlib.Path(sys.argv[1], 'ran').touch()")
    note_job(done.paths, "13")
    assert done.run() == 1
    note_job(done.paths, "12")
    Status(state="completed", step=9).write(done.paths)
    assert done.run() == 0
    assert not (done.paths.root / "ran").exists()
    assert (done.status().state, done.status().step, done.paths.logs(0).exists()) == ("completed", 9, False)


def test_a_job_that_finds_records_of_an_attempt_starts_from_its_checkpoint_though_slurm_counts_no_restart(job):
    again = job("import shutil, sys; shutil.copy(sys.argv[1] + '/metrics.jsonl', sys.argv[1] + '/seen')")
    again.paths.metrics.write_text('{"step": 0, "source": "trainer"}\n')
    assert again.run() == 0
    assert (again.paths.root / "seen").read_text() == ""


def test_a_job_that_came_back_too_often_is_refused(job):
    refused = job(LEAVES)
    assert note_progress(refused.paths, 0, 0) == 0
    assert refused.run(SLURM_RESTART_COUNT="99") == 1
    assert refused.status().state == "failed"
    assert "launcher.max_requeues" in refused.status().cause.reason


def test_a_job_that_comes_back_without_notice_has_the_steps_of_its_checkpoint(job):
    again = job("import pathlib, shutil, sys; run = pathlib.Path(sys.argv[1]); shutil.copy(run / 'status.json', run / 'seen')")
    Status(state="running", step=37, max_steps=40).write(again.paths)
    again.paths.metrics.write_text("".join(f'{{"step": {step}, "source": "trainer"}}\n' for step in range(37)))
    checkpoint(again.paths, 30)
    assert again.run(SLURM_RESTART_COUNT="1") == 0
    assert json.loads((again.paths.root / "seen").read_text())["step"] == 30
    assert again.status().step == 30


def test_the_link_to_the_jobs_output_holds_where_the_output_folder_is_behind_a_symlink(tmp_path: Path):
    (tmp_path / "disks" / "one").mkdir(parents=True)
    (tmp_path / "outputs").symlink_to(tmp_path / "disks" / "one")
    ends = Job(tmp_path / "outputs", "pass")
    with (tmp_path / "outputs" / "12_0_log.out").open("w") as output:
        output.write("said before rlx\n")
        output.flush()
        assert ends.run(output) == 0
    assert ends.paths.log(0, "job").is_symlink()
    assert ends.paths.log(0, "job").read_text().startswith("said before rlx\n")


def test_only_requeues_without_a_new_step_are_counted(tmp_path: Path):
    paths = RunPaths(tmp_path)
    note_job(paths, "12")
    starts = [(0, 3), (1, 3), (2, 3), (3, 4), (4, 4), (9, 4), (10, 8), (11, 9), (12, 6), (13, 6), (14, 7)]
    assert [note_progress(paths, *start) for start in starts] == [0, 1, 2, 0, 1, 6, 0, 0, 0, 1, 0]
    assert job_of(paths) == "12"
    note_job(paths, "13")
    assert note_progress(paths, 0, 9) == 0


@pytest.mark.parametrize(("minutes", "code", "said"), [(3, 1, "larger slurm.time_minutes"), (60, 75, None)])
def test_a_start_that_is_longer_than_the_time_before_the_notice_is_explained_the_second_time(job, minutes, code, said):
    leaves = job(LEAVES, argv=(f"slurm.time_minutes={minutes}", "slurm.signal_seconds=170"))
    leaves.notice()
    assert leaves.run() == 75, "the first time it comes back"
    assert leaves.run(SLURM_RESTART_COUNT="1") == code
    assert said is None or said in leaves.status().cause.reason


@pytest.mark.parametrize(("root", "plays"), [(EVAL, True), (SYNTHESIZE, True), (EVAL, False)])
def test_saved_rollouts_are_the_progress_of_a_command_without_checkpoints(job, root, plays):
    limits = ("env=reverse_text", "slurm.time_minutes=3", "slurm.signal_seconds=170")
    leaves = job(LEAVES, argv=limits, root=root)
    file = leaves.paths.root / ("eval/finished.jsonl" if root is EVAL else "rollouts/finished.jsonl")
    file.parent.mkdir(parents=True)
    leaves.notice(f"echo '{{}}' >> '{file}';" if plays else "")
    assert [leaves.run(SLURM_RESTART_COUNT=restart) for restart in "01"] == [75, 75 if plays else 1]
    if not plays:
        assert "a larger slurm.time_minutes" in leaves.status().cause.reason


def test_steps_up_to_a_damaged_checkpoint_are_no_progress_and_those_after_it_are(job):
    again = job("pass")
    again.paths.metrics.write_text('{"step": 0, "source": "trainer"}\n')
    checkpoint(again.paths, 60)
    damaged = checkpoint(again.paths, 100)
    (damaged / folders.COMPLETE).write_text(json.dumps({"step": 100, "files": {"gone": {"size": 1, "xxh3": "0"}}}))
    assert note_progress(again.paths, 0, 0) == 0
    assert again.run(SLURM_RESTART_COUNT="1") == 0
    assert json.loads(again.paths.job.read_text())["progress"] == {"restarts": 1, "step": 60}
    assert [note_progress(again.paths, *start) for start in [(2, 80), (3, 99), (4, 99)]] == [0, 0, 1]


def test_a_job_whose_newest_checkpoint_is_always_damaged_does_not_come_back_for_ever(job):
    again = job("import pathlib, sys; pathlib.Path(sys.argv[1], 'ran').touch()", argv=("launcher.max_requeues=3",))
    again.paths.metrics.write_text('{"step": 0, "source": "trainer"}\n')
    checkpoint(again.paths, 60)
    again.paths.checkpoint_of(70).mkdir()
    (again.paths.checkpoint_of(70) / folders.COMPLETE).write_text('{"step": 70, "files": {"gone": {"size": 1, "xxh3": "0"}}}')
    assert note_progress(again.paths, 0, 60) == 0
    assert again.run(SLURM_RESTART_COUNT="4") == 1
    assert "requeued 4 times without progress, more than launcher.max_requeues=3" in again.status().cause.reason
    assert not (again.paths.root / "ran").exists()


def test_a_job_that_comes_back_to_damaged_checkpoints_alone_fails_and_deletes_nothing(job):
    again = job("import pathlib, sys; pathlib.Path(sys.argv[1], 'ran').touch()")
    again.paths.metrics.write_text('{"step": 0, "source": "trainer"}\n')
    again.paths.checkpoint_of(1).mkdir(parents=True)
    assert again.run(SLURM_RESTART_COUNT="1") == 1
    assert (again.status().state, again.status().exit_code) == ("failed", 1)
    assert "every checkpoint" in again.status().cause.reason
    assert not (again.paths.root / "ran").exists()
    assert len(again.paths.metrics.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("before", "slurm", "after", "said"),
    [
        ("preempted", "CANCELLED", "interrupted", None),
        ("preempted", GONE, "interrupted", None),
        ("preempted", "NODE_FAIL", "failed", "ended as NODE_FAIL"),
        ("running", "CANCELLED", "interrupted", None),
        ("running", GONE, "failed", "job 12 is unknown to SLURM, and ended before the supervisor"),
        ("completed", GONE, "completed", None),
    ],
)
def test_what_becomes_of_a_run_whose_job_is_over(tmp_path: Path, before: str, slurm: str, after: str, said: str | None):
    paths = RunPaths(tmp_path)
    status = Status(state=before)
    if before in EXIT_CODES:
        status.finish(before)
    status.write(paths)
    (tmp_path / "output").write_text("no such module\n")
    note_job(paths, "12", tmp_path / "output")
    closed = close(paths, "12", slurm)
    assert (closed.state, closed.exit_code) == (after, EXIT_CODES[after])
    assert read_status(paths) == closed
    assert closed.cause is None or closed.cause.last_lines == ("no such module",)
    assert said is None if closed.cause is None else said in closed.cause.reason
