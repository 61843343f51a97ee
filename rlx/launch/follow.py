"""Staying in front of a SLURM job until it is over, however it ends.

Reads the run's status and asks SLURM now and then whether the job still lives. Ends nothing: the job goes on when this process ends.
"""

from __future__ import annotations

import sys
import time

from rlx.launch.local import UPDATE, Observer
from rlx.paths import RunPaths
from rlx.runs.jobs import ENDED, GONE, queue
from rlx.runs.status import FINAL, Cause, Status, last_lines, read_status

ASK = 3.0  # seconds between two questions to the controller
LATE = 3  # questions in a row to which a job is gone, before a run without a final status is taken for lost: files arrive late


def follow(paths: RunPaths, job_id: str, observer: Observer | None = None) -> int:
    """Wait until the job has ended; the run's exit code. A preempted run whose job waits again is not over."""
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
        print(f"\njob {job_id} goes on; end it with: scancel {job_id}", file=sys.stderr)
        raise
    assert status.exit_code is not None
    if observer is not None:
        observer.close(status.exit_code)
    return status.exit_code


def close(paths: RunPaths, job_id: str, state: str) -> Status:
    """The final status of a run whose job is over; written here where the supervisor did not live to write it."""
    status = read_status(paths)
    assert status is not None
    # A run that left for a preemption waits with its job: cancelled or forgotten then, nothing of it had failed.
    waited = status.state == "preempted"
    if (status.state in FINAL and not waited) or (waited and state == "PREEMPTED"):
        return status
    if state == "CANCELLED" or (waited and state == GONE):
        status.finish("interrupted")
    else:
        log = paths.log(status.attempt, "launcher")
        ended = f"is {GONE}, and ended" if state == GONE else f"ended as {state}"
        reason = f"SLURM job {job_id} {ended} before the supervisor could say why"
        lines = last_lines(log, 10)
        status.finish(
            "failed",
            Cause(role="supervisor", replica=0, returncode=None, reason=reason, log=str(log.relative_to(paths.root)), last_lines=lines),
        )
    status.write(paths)
    return status


def _state(job_id: str) -> str:
    try:
        return queue().get(job_id, GONE)
    except RuntimeError:  # a controller that does not answer now may do so later
        return "UNKNOWN"
