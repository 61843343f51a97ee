"""What SLURM says of jobs, through its commands; and which job a run was given to.

Knows `squeue`, `scontrol` and the run directory. Submits nothing and ends nothing.
"""

from __future__ import annotations

import json
import subprocess
import time

from rlx.paths import RunPaths, write_text

TIMEOUT = 10.0  # seconds in which the controller answers, or is taken for silent
GONE = "unknown to SLURM"  # for a job that it does not list
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED", GONE)
"""SLURM's words for a job that is over; one that the controller has forgotten is over too."""


def note_job(paths: RunPaths, job_id: str) -> None:
    write_text(paths.job, json.dumps({"id": job_id, "submitted": time.time()}) + "\n")


def job_of(paths: RunPaths) -> str | None:
    """The id of the SLURM job that a run was last given to; None: it never was."""
    try:
        return json.loads(paths.job.read_text())["id"]
    except FileNotFoundError:
        return None


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    """What one of SLURM's commands says. Raises RuntimeError when it is not there or the controller is silent."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except FileNotFoundError as error:
        raise RuntimeError(f"there is no {command[0]} here") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} gave no answer in {TIMEOUT:g} s") from error


def queue() -> dict[str, str]:
    """SLURM's word for the state of each of the user's jobs that it has not forgotten, by job id.

    Raises RuntimeError when the controller does not answer.
    """
    done = ask("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%T")
    if done.returncode != 0:
        raise RuntimeError(f"squeue failed: {done.stderr.strip()}")
    return dict(line.strip().split("|", 1) for line in done.stdout.splitlines() if "|" in line)


def is_alive(job_id: str, states: dict[str, str] | None = None) -> bool:
    """Whether a job waits or runs. Raises RuntimeError when nobody can tell."""
    return (queue() if states is None else states).get(job_id, GONE) not in ENDED


def restarts_of(job_id: str) -> int:
    """How often SLURM has put a job back into the queue; it counts at once, before the job has ended. -1: it does not say."""
    return int(_fields(job_id).get("Restarts", -1))


def is_ending(job_id: str) -> bool:
    """Whether a job that still runs was cancelled: then it is `COMPLETING`, whatever else it is."""
    return _fields(job_id).get("JobState", "RUNNING") != "RUNNING"


def _fields(job_id: str) -> dict[str, str]:
    """What the controller says of a job, by its own names; nothing where it is silent."""
    try:
        done = ask("scontrol", "show", "job", "--oneliner", job_id)
    except RuntimeError:
        return {}
    words = (word.partition("=") for word in done.stdout.split())
    return {name: value for name, _, value in words}
