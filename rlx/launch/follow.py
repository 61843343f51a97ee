"""Follow a SLURM job in the foreground until it ends.

Reads the run's status and asks SLURM every few seconds whether the job is still alive. Stops nothing: the job continues when this
process exits.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rlx.launch.local import UPDATE, Observer
from rlx.paths import RunPaths
from rlx.runs.jobs import ENDED, GONE, Wait, find_jobs, is_of, job_of, output_of, queue, waits
from rlx.runs.lock import RunLock
from rlx.runs.run import WAITS, Run
from rlx.runs.status import FINAL, Cause, Status, last_lines, read_status

ASK = 10.0  # seconds between two queries to the SLURM controller, which all users of a cluster share
WAIT = 30.0  # seconds between two questions why a job waits
SOON, SELDOM = 60.0, 1800.0  # seconds after which a changed place of a job is told, at first and at most: each time twice as long
MOST = 5  # jobs of a sweep about which one look at the queue prints a line
LATE = 3  # consecutive queries that must report the job as gone before a run without a final status counts as lost: files arrive late


def follow(paths: RunPaths, job_id: str, observer: Observer | None = None) -> int:
    """Wait until the job has ended and return the run's exit code. A preempted run whose job is queued again has not ended."""
    asked, gone, waiting = -math.inf, 0, Waiting()
    try:
        while True:
            status = read_status(paths)
            assert status is not None  # written before the job was submitted
            if status.state in FINAL and status.state != "preempted":
                break
            if time.monotonic() - asked > ASK:
                asked = time.monotonic()
                state = _state(job_id)
                gone = gone + 1 if state in ENDED else 0
                if gone >= LATE:
                    if (other := job_of(paths)) not in (None, job_id):
                        print(f"{paths.root} is job {other}'s now; job {job_id} has ended ({state})", file=sys.stderr, flush=True)
                        if observer is not None:
                            observer.close(1)
                        return 1
                    status = close(paths, job_id, state)
                    break
                if state in WAITS:
                    waiting.tell({job_id: f"job {job_id}"})
            if observer is not None:
                observer.update()
            time.sleep(UPDATE)
    except KeyboardInterrupt:
        print(f"\njob {job_id} continues; stop it with: scancel {job_id}", file=sys.stderr)
        raise
    assert status.exit_code is not None
    if observer is not None:
        observer.close(status.exit_code)
    return status.exit_code


def close(paths: RunPaths, job_id: str, state: str) -> Status:
    """Return the final status of a run whose job has ended. Writes it if the supervisor died before it could."""
    status = read_status(paths)
    assert status is not None
    # A preempted run waits in the queue. If its job is then cancelled or forgotten, the run has not failed.
    waited = status.state == "preempted"
    if (status.state in FINAL and not waited) or (waited and state == "PREEMPTED"):
        return status
    if state == "CANCELLED" or (waited and state == GONE):
        status.finish("interrupted")
    else:
        log = _says_why(paths, status, job_id)
        ended = f"is {GONE}, and ended" if state == GONE else f"ended as {state}"
        reason = f"SLURM job {job_id} {ended} before the supervisor could say why"
        lines = last_lines(log, 10)
        status.finish(
            "failed",
            Cause(role="supervisor", replica=0, returncode=None, reason=reason, log=os.path.relpath(log, paths.root), last_lines=lines),
        )
    status.write(paths)
    return status


def _says_why(paths: RunPaths, status: Status, job_id: str) -> Path:
    """The log of the job's last start: its own output if that start has not become an attempt, as when a comeback is refused."""
    launcher, output = paths.log(status.attempt, "launcher"), output_of(paths)
    if output is None or not output.is_file():
        return launcher
    if status.job != job_id or status.state == "preempted" or not launcher.is_file():
        return output
    # An attempt that could not write its end is `running`, whether it was the last start or not. Only a later start, or SLURM, writes then.
    return max(launcher, output, key=lambda file: file.stat().st_mtime)


def close_ended(runs: Sequence[Run], jobs: Mapping[str, str]) -> None:
    """Write the final status of the runs whose jobs have ended, if no process of theirs could: the job was cancelled in the queue, say.

    `jobs`: job id → SLURM's state. A run is left alone if SLURM and its accounting do not know its job, if the job of this id is not the
    run's (another cluster has it, or the ids began anew), if the run is in use, or if its directory may not be written.
    """
    ended = [
        (run, job, status)
        for run in runs
        if (job := run.job) is not None
        and (status := run.status) is not None
        and (status.state not in FINAL or status.state == "preempted")
        and jobs.get(job, GONE) in ENDED
    ]
    found = find_jobs([job for _, job, _ in ended]) if ended else {}
    for run, job, status in ended:
        paths = run.paths
        state, command = found.get(job, (GONE, ""))
        # What a job wrote last may not be visible here yet; what it would write about its cancellation is the same.
        if state not in ENDED or state == GONE or (state != "CANCELLED" and run.is_written(status)):
            continue
        if not is_of(paths, command):
            continue
        try:
            lock = RunLock(paths)
        except OSError:
            continue
        if lock.exclusive():
            with contextlib.suppress(OSError):
                if job_of(paths) == job and read_status(paths) == status:  # else it was submitted again while SLURM answered
                    close(paths, job, state)
        lock.close()


class Waiting:
    """Prints why jobs wait, asked for at most every `WAIT` seconds: of each when its reason changes.

    Its place and the estimated start change with every job that others submit, so these alone are told ever more seldom.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        """`file`: where to; None: standard output."""
        self._file, self._asked = file, -math.inf
        self._told: dict[str, tuple[Wait, float, float]] = {}  # by job: what was told, when, and how long it holds if its place changes

    def tell(self, names: Mapping[str, str]) -> None:
        """`names`: job id → what the lines call it, of all jobs in the queue. One question for all."""
        now = time.monotonic()
        if not names or now - self._asked < WAIT:
            return
        self._asked = now
        try:
            found = waits(names)
        except RuntimeError:  # the controller may answer later
            return
        new = [job for job, wait in found.items() if self._is_news(job, wait, now)]
        for job in new[:MOST]:
            print(f"{names[job]} waits: {found[job]}", file=self._file, flush=True)
        if len(new) > MOST:
            print(f"and {len(new) - MOST} more jobs; rlx runs shows all", file=self._file, flush=True)

    def _is_news(self, job: str, wait: Wait, now: float) -> bool:
        """Whether to tell it; if so, it counts as told."""
        before, then, holds = self._told.get(job, (None, now, SOON))
        if before is not None and before.reason == wait.reason:
            if before == wait or now - then < holds:
                return False
            self._told[job] = wait, now, min(2 * holds, SELDOM)
        else:
            self._told[job] = wait, now, SOON
        return True


def _state(job_id: str) -> str:
    try:
        return queue().get(job_id, GONE)
    except RuntimeError:  # the controller does not answer; it may later
        return "UNKNOWN"
