"""Follow a SLURM job in the foreground until it ends.

Reads the run's status and asks SLURM every few seconds whether the job is still alive. Stops nothing: the job continues when this
process exits.
"""

from __future__ import annotations

import os
import sys
import time

from rlx.launch.local import UPDATE, Observer
from rlx.paths import RunPaths
from rlx.runs.jobs import ENDED, GONE, output_of, queue
from rlx.runs.status import FINAL, Cause, Status, last_lines, read_status

ASK = 3.0  # seconds between two queries to the SLURM controller
LATE = 3  # consecutive queries that must report the job as gone before a run without a final status counts as lost: files arrive late


def follow(paths: RunPaths, job_id: str, observer: Observer | None = None) -> int:
    """Wait until the job has ended and return the run's exit code. A preempted run whose job is queued again has not ended."""
    asked, gone = 0.0, 0
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
                    status = close(paths, job_id, state)
                    break
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
        log = paths.log(status.attempt, "launcher")
        if status.job != job_id:  # the job has not begun its attempt
            log = output_of(paths) or log
        ended = f"is {GONE}, and ended" if state == GONE else f"ended as {state}"
        reason = f"SLURM job {job_id} {ended} before the supervisor could say why"
        lines = last_lines(log, 10)
        status.finish(
            "failed",
            Cause(role="supervisor", replica=0, returncode=None, reason=reason, log=os.path.relpath(log, paths.root), last_lines=lines),
        )
    status.write(paths)
    return status


def _state(job_id: str) -> str:
    try:
        return queue().get(job_id, GONE)
    except RuntimeError:  # the controller does not answer; it may later
        return "UNKNOWN"
