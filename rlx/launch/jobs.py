"""What SLURM says of jobs, through its commands; and which job a run was given to.

Knows `squeue`, `scontrol` and the run directory. Submits nothing and ends nothing.
"""

from __future__ import annotations

import json
import subprocess
import time

from rlx.paths import RunPaths, write_text

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED")
"""SLURM's words for a job that is over; one that the controller has forgotten is over too."""


def note_job(paths: RunPaths, job_id: str) -> None:
    write_text(paths.job, json.dumps({"id": job_id, "submitted": time.time()}) + "\n")


def job_of(paths: RunPaths) -> str | None:
    """The id of the SLURM job that a run was last given to; None: it never was."""
    try:
        return json.loads(paths.job.read_text())["id"]
    except FileNotFoundError:
        return None


def queue() -> dict[str, str]:
    """SLURM's word for the state of each of the user's jobs that it has not forgotten, by job id.

    Raises RuntimeError when the controller does not answer.
    """
    command = ["squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError("there is no squeue here") from error
    if done.returncode != 0:
        raise RuntimeError(f"squeue failed: {done.stderr.strip()}")
    return dict(line.strip().split("|", 1) for line in done.stdout.splitlines() if "|" in line)


def is_alive(job_id: str, states: dict[str, str] | None = None) -> bool:
    """Whether a job waits or runs. Raises RuntimeError when nobody can tell."""
    return (queue() if states is None else states).get(job_id, "CANCELLED") not in ENDED


def restarts_of(job_id: str) -> int:
    """How often SLURM has put a job back into the queue; it counts at once, before the job has ended. -1: it does not say."""
    done = subprocess.run(["scontrol", "show", "job", "--oneliner", job_id], capture_output=True, text=True, check=False)
    words = (word.partition("=") for word in done.stdout.split())
    return next((int(value) for name, _, value in words if name == "Restarts"), -1)
