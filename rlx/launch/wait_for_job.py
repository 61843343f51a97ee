"""Follow SLURM jobs in the foreground until they end.

Reads the runs' status files and asks SLURM every few seconds whether their jobs are still alive. Stops nothing: the jobs continue when
this process exits.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rlx.launch.local import UPDATE, Observer
from rlx.paths import RunPaths
from rlx.runs.jobs import ENDED, GONE, job_of, output_of, queue, waits
from rlx.runs.run import WAITS
from rlx.runs.status import FINAL, Status, read_status

ASK = 10.0  # seconds between two queries to the SLURM controller, which all users of a cluster share
SHOWN = 10  # lines at the end of the log of a job that ended without a word
LATE = 3  # consecutive queries that must report the job as gone before a run without a final status counts as lost: files arrive late


def follow(paths: RunPaths, job_id: str, observer: Observer | None = None) -> int:
    """Wait until the job has ended and return the run's exit code. A preempted run whose job is queued again has not ended."""
    try:
        wait_for_jobs({job_id: paths}, observer.update if observer else lambda: None)
    except KeyboardInterrupt:
        print(f"\njob {job_id} continues; stop it with: scancel {job_id}", file=sys.stderr)
        raise
    status, other = read_status(paths), job_of(paths)
    if other not in (None, job_id):
        print(f"{paths.root} is job {other}'s now; job {job_id} has ended", file=sys.stderr, flush=True)
    code = status.exit_code if status is not None and status.exit_code is not None else 1
    if observer is not None:
        observer.close(code)
    return code


def wait_for_jobs(jobs: Mapping[str, RunPaths], update: Callable[[], None] = lambda: None) -> None:
    """Wait until all jobs have ended, and write the final status of runs that could not. Prints why jobs wait in the queue.

    `update` is called about five times a second. A run that was submitted again meanwhile is left to its new job.
    """
    told: dict[str, str] = {}
    left, gone, asked = dict(jobs), Counter[str](), -math.inf
    while left := {job: paths for job, paths in left.items() if not _is_over(paths)}:
        if time.monotonic() - asked > ASK:
            asked = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the controller does not answer; it may later
                states = queue()
                for job in list(left):
                    state = states.get(job, GONE)
                    gone[job] = gone[job] + 1 if state in ENDED else 0
                    if gone[job] >= LATE:
                        paths = left.pop(job)
                        if job_of(paths) in (None, job):
                            close(paths, job, state)
                say_why((job for job in left if states.get(job) in WAITS), told)
        update()
        time.sleep(UPDATE)


def _is_over(paths: RunPaths) -> bool:
    status = read_status(paths)
    return status is not None and status.state in FINAL and status.state != "preempted"


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
        ended = f"is {GONE}, and ended" if state == GONE else f"ended as {state}"
        reason = f"SLURM job {job_id} {ended} before the supervisor could say why"
        status.fail(paths, "supervisor", reason, _says_why(paths, status), SHOWN)
        return status
    status.write(paths)
    return status


def _says_why(paths: RunPaths, status: Status) -> Path:
    """The log of the job's last start: its own output if that start has not become an attempt, as when a comeback is refused."""
    logs = [file for file in (paths.log(status.attempt, "launcher"), output_of(paths)) if file is not None and file.is_file()]
    return max(logs, key=lambda file: file.stat().st_mtime, default=paths.log(status.attempt, "launcher"))


def say_why(jobs: Iterable[str], told: dict[str, str]) -> None:
    """Print why jobs in the queue wait: of each when its reason changes. The estimated start alone changes with every job of others.

    `told`: the reasons that were printed, by job id. Raises RuntimeError if the controller does not answer.
    """
    wanted = list(jobs)
    new: dict[str, list[str]] = {}
    for job, why in waits(wanted).items() if wanted else ():
        reason = why.partition(",")[0]
        if told.get(job) != reason:
            new.setdefault(why, []).append(job)
            told[job] = reason
    for why, (job, *more) in new.items():
        print(f"job {job}{f' (and {len(more)} more)' if more else ''} waits: {why}", flush=True)
