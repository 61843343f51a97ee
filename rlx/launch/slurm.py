"""Runs as jobs of a SLURM cluster: one allocation for a run, one job array for a sweep, submitted through submitit.

    login node: submit(…) ── sbatch ──► first node of the job: submitit ──► Attempt(directory)() ──► Supervisor ──► one srun step a process

A job carries only the path of its run directory. When SLURM takes the machine away (time limit, preemption, requeue), the supervisor
has the roles write a checkpoint, and the job goes back into the queue: same job, same directory, next attempt.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from submitit import JobEnvironment

from rlx.config.errors import ConfigError
from rlx.config.load import load_command
from rlx.config.schema import CommandConfig
from rlx.launch.container import MOUNTS, RoleContainer
from rlx.launch.sbatch import check_directory, make_executor, own_job_forgotten, sbatch_options, sbatch_script
from rlx.launch.starters import SrunStarter
from rlx.launch.supervisor import Supervisor
from rlx.lock import FileLock
from rlx.paths import RunPaths, write_text
from rlx.runs import host_commands
from rlx.runs.history import final_reward
from rlx.runs.jobs import (
    ask,
    is_ending,
    job_of,
    note_job,
    note_progress,
    output_of,
    patience_with_nodes,
    restarts_of,
    saved_of,
)
from rlx.runs.provenance import take_snapshot
from rlx.runs.rewind import has_begun, rewind
from rlx.runs.status import Status, new_attempt, read_status

__all__ = ["FOLDER", "Attempt", "check_directory", "sbatch_options", "sbatch_script", "submit"]

FOLDER = ".submitit"  # submitit's files for the jobs of a run or sweep, inside its directory
OLD_ATTEMPT = 60.0  # seconds to wait for the processes of an earlier attempt to exit
MARGIN = 120.0  # seconds that SLURM may take longer than its `SlurmdTimeout` to requeue a job
AGAIN = 10.0  # seconds between two looks whether it has
START = 60.0  # seconds by which an attempt may begin later than its job, whose time limit counts from there
BUSY = re.compile(r"timed out|no answer|unable to contact|connection|zero bytes|try again|transport", re.IGNORECASE)
"""What SLURM's commands say of a controller that does not answer at the moment."""
PAUSE = 3.0  # seconds between two requests for a requeue
REQUEUE = 60.0  # seconds for which a requeue is asked for while the controller does not answer


def submit(runs: Sequence[tuple[RunPaths, CommandConfig]], name: str, folder: Path) -> list[str]:
    """Submit runs with existing directories and equal `sbatch_options` as one job or one array; return their job ids.

    The caller holds the runs' locks meanwhile. A job that starts at once waits for the lock, and by then its id is recorded.
    Raises RuntimeError with SLURM's message if SLURM rejects the job.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # its pickle is executed
    code = take_snapshot(folder)
    roots = [paths.root for paths, _ in runs]
    script = sbatch_script(runs[0][1], name, folder, roots, code)
    for paths, cfg in runs:
        Status(max_steps=cfg.total_steps, launcher={"host": os.uname().nodename, "pid": os.getpid()}).write(paths)
        paths.job.unlink(missing_ok=True)  # the new job would read an older id here as that of its successor
        write_text(paths.sbatch, script)
    executor = make_executor(runs[0][1], name, folder, code)
    try:
        # submitit prints what sbatch says; an error has it as well
        with own_job_forgotten(sbatch_options(runs[0][1], name)), contextlib.redirect_stderr(io.StringIO()) as said:
            jobs = executor.submit_array([Attempt(str(paths.root)) for paths, _ in runs])
        print(said.getvalue(), end="", file=sys.stderr)
    except Exception as error:  # submitit reports sbatch's errors through several exception types
        text = getattr(error, "stderr", None) or str(error)
        reason = text.decode(errors="replace") if isinstance(text, bytes) else text
        refused = f"SLURM rejected the job: {reason.strip()}"
        for paths, cfg in runs:
            Status(max_steps=cfg.total_steps).fail(paths, "launcher", refused, paths.log(0, "launcher"))
        raise RuntimeError(refused) from error
    for (paths, _), job in zip(runs, jobs, strict=True):
        note_job(paths, job.job_id, job.paths.stdout)
    return [job.job_id for job in jobs]


class Attempt:
    """The function that the SLURM job runs: one attempt at the run in a directory."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    def __call__(self) -> float | None:
        """Run the attempt and return the final reward. Raises SystemExit with the run's exit code if that is not 0."""
        received: list[int] = []
        for number in (signal.SIGUSR2, signal.SIGTERM):  # submitit's own handlers would requeue without recording it in the status
            signal.signal(number, lambda number, _: received.append(number))
        if host_commands.is_inside():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, lambda *_: received.append(signal.SIGTERM))
            received += [signal.SIGTERM if name == "INT" else signal.Signals[f"SIG{name}"] for name in host_commands.begin()]
        paths = RunPaths(Path(self.run_dir))
        cfg = load_command(paths.root)
        environment = JobEnvironment()
        # For an array task this is `12_5`. SLURM_JOB_ID must not be used: for the last task it is the array's id, and SLURM acts on all.
        job = environment.job_id
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        lock = FileLock(paths.lock)
        if not lock.take(timeout=OLD_ATTEMPT):
            print(f"{paths.root} is in use by another run; this job ends", file=sys.stderr)
            raise SystemExit(1)
        self._leave_to_others(paths, job)
        before = read_status(paths)
        status = Status(attempt=new_attempt(paths), step=before.step if before else 0, max_steps=cfg.total_steps, job=job)
        status.write(paths)
        lock.share()
        output = Path(os.readlink("/proc/self/fd/1"))  # the job's own, where SLURM also writes; in a container a pipe
        output = output if output.is_file() else output_of(paths) or output
        if output.is_file():
            paths.log(status.attempt, "job").symlink_to(os.path.relpath(output, paths.logs(status.attempt).resolve()))
        log = os.open(paths.log(status.attempt, "launcher"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        print(f"job {job}, restart {restarts}, on {', '.join(environment.hostnames)}", flush=True)
        if restarts or has_begun(paths):
            try:
                start = rewind(paths)
            except ConfigError as error:
                _give_up(paths, status, str(error))
            if cfg.has_checkpoints:
                status.step = start.step if start else 0
                status.write(paths)
                print(f"resuming after {start.step} steps" if start else "no checkpoint yet: starting from step 0", flush=True)
        saved = saved_of(paths, cfg)  # not before: the newest checkpoint may have been damaged
        barren = note_progress(paths, restarts, saved)
        if barren > cfg.launcher.max_requeues:
            most = f"launcher.max_requeues={cfg.launcher.max_requeues}"
            _give_up(paths, status, f"the job was requeued {barren} times without progress, more than {most}")
        container = RoleContainer.of(cfg, os.environ.get(MOUNTS, "").split(","))
        starter = SrunStarter(job, environment.hostnames, cfg.hardware.gpus_per_node, cfg.slurm.prefix, container, restarts)
        supervisor = Supervisor(paths, cfg, lock_fd=lock.fd, attempt=status.attempt, starter=starter)
        code = supervisor.run(received)
        left = self._leave_lost_hosts(paths, supervisor, starter, job, restarts) if supervisor.lost else None
        if left is not None:
            code = left
        elif supervisor.status.state == "preempted":
            barren = 0 if saved_of(paths, cfg) != saved else barren + 1
            code = self._requeue(paths, cfg, supervisor, job, restarts, barren)
        if code != 0:
            raise SystemExit(code)
        return final_reward(paths)

    def _leave_to_others(self, paths: RunPaths, job: str) -> None:
        """Exit without touching the directory if the run is completed or now belongs to another job."""
        status, other = read_status(paths), job_of(paths)
        if status is not None and status.state == "completed":
            print(f"{paths.root} is completed; job {job} has nothing to do", file=sys.stderr)
            raise SystemExit(0)
        if other is not None and other != job:
            print(f"{paths.root} is job {other}'s now; job {job} ends", file=sys.stderr)
            raise SystemExit(1)

    def _leave_lost_hosts(self, paths: RunPaths, supervisor: Supervisor, starter: SrunStarter, job_id: str, restarts: int) -> int | None:
        """Wait until SLURM has given up the hosts that do not answer and requeued the job; return the exit code.

        A requeue by rlx could get the same hosts again. If SLURM keeps them, they were not why a process failed. None: SLURM has given
        notice that the job's time ends, so rlx must requeue it now.
        """
        status, patience = supervisor.status, patience_with_nodes() + MARGIN
        print(f"SLURM requeues the job when it gives up {', '.join(supervisor.lost)}: within {patience:.0f} s", flush=True)
        deadline, look = time.monotonic() + patience, 0.0
        is_over = False
        while not is_over and not supervisor.interrupted:
            if supervisor.notice:
                return None
            if time.monotonic() > look:
                if restarts_of(job_id) > restarts:
                    return status.exit_code or 0
                is_over = time.monotonic() > deadline or not starter.lost_hosts(supervisor.lost)
                look = time.monotonic() + AGAIN
            time.sleep(0.2)
        known = restarts_of(job_id)  # SLURM counts a requeue before it signals
        if known > restarts or known < 0:  # a silent SLURM knows how the job ends: `rlx.launch.wait_for_job`
            return status.exit_code or 0
        if supervisor.interrupted:
            status.finish("interrupted")
        else:
            print("SLURM has not given them up", flush=True)
            status.finish("failed", supervisor.blamed)
        status.write(paths)
        return status.exit_code or 0

    def _requeue(self, paths: RunPaths, cfg: CommandConfig, supervisor: Supervisor, job_id: str, restarts: int, barren: int) -> int:
        """Requeue the job unless SLURM has done so or the limit is reached; return the exit code.

        `barren`: how many attempts in a row, up to this one, have ended without saving anything new.
        """
        status = supervisor.status
        if restarts_of(job_id) > restarts:
            return status.exit_code or 0
        if supervisor.interrupted or is_ending(job_id):  # the job was cancelled; a requeue would revive it
            status.finish("interrupted")
            status.write(paths)
            return status.exit_code or 0
        if barren >= 2 and time.time() - status.started >= 60 * cfg.slurm.time_minutes - cfg.slurm.signal_seconds - START:
            _give_up(
                paths,
                status,
                f"{barren} attempts in a row were preempted before the time limit without progress: what comes before a checkpoint takes "
                "longer than slurm.time_minutes less slurm.signal_seconds; continue with resume=latest and a larger slurm.time_minutes",
            )
        if barren > cfg.launcher.max_requeues:
            most = f"launcher.max_requeues={cfg.launcher.max_requeues}"
            _give_up(paths, status, f"preempted, and {most} requeues without progress are used up; continue with resume=latest")
        if (refused := back_to_the_queue(job_id, restarts)) is not None:
            _give_up(paths, status, f"preempted, and SLURM refuses to requeue the job: {refused}; continue with resume=latest")
        print("back in the queue", flush=True)
        return status.exit_code or 0


def back_to_the_queue(job_id: str, restarts: int) -> str | None:
    """Requeue a job that has been requeued `restarts` times; returns why SLURM refuses to.

    A controller that does not answer is asked again for REQUEUE seconds: many jobs may have had their notice at the same moment.
    """
    deadline = time.monotonic() + REQUEUE
    while True:
        try:
            done = ask("scontrol", "requeue", job_id)
            refused = done.stderr.strip() if done.returncode != 0 else None
        except RuntimeError as error:
            refused = str(error)
        if refused is None or restarts_of(job_id) > restarts:  # it may have heard the request that it did not answer
            return None
        if not BUSY.search(refused) or time.monotonic() > deadline:
            return refused
        time.sleep(PAUSE)


def _give_up(paths: RunPaths, status: Status, reason: str) -> NoReturn:
    """Write that the run failed, and why; exit."""
    status.give_up(paths, reason)
    raise SystemExit(1)
