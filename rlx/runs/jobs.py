"""The state of SLURM jobs, from `squeue` and `scontrol`, and the job id of a run.

Submits and stops nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlx.checkpoints.folders import steps
from rlx.config.schema import CommandConfig
from rlx.paths import RunPaths, write_text
from rlx.runs.host_commands import outside

TIMEOUT = 10.0  # seconds to wait for an answer of the controller
GONE = "unknown to SLURM"  # state of a job that SLURM does not list
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED", GONE)
"""SLURM's states of a job that has ended. A job that the controller has forgotten has ended too."""


def note_job(paths: RunPaths, job_id: str, output: Path | None = None) -> None:
    """Record a submitted job and the file of its output."""
    write_text(paths.job, json.dumps({"id": job_id, "submitted": time.time(), "output": output and str(output)}) + "\n")


def job_of(paths: RunPaths) -> str | None:
    """Id of the last SLURM job that was submitted for a run; `None` if there was none."""
    return _noted(paths).get("id")


def output_of(paths: RunPaths) -> Path | None:
    """The file of that job's own output, which has what was printed before and after rlx ran."""
    output = _noted(paths).get("output")
    return Path(output) if output else None


def note_progress(paths: RunPaths, starts: int, saved: int) -> int:
    """How many starts in a row, up to the one that begins now, found nothing new. Records this one if there was progress.

    `starts`: how often the run was started before. `saved`: how much is saved. Any other value than at the last recorded start counts as
    progress, also a lower one: the newest checkpoint may turn out to be damaged, and `rlx eval` replaces rollouts by results.
    """
    noted = _noted(paths)
    last = noted.get("progress")
    if last is not None and last["restarts"] <= starts and last["step"] == saved:
        return starts - last["restarts"]
    write_text(paths.job, json.dumps({**noted, "progress": {"restarts": starts, "step": saved}}) + "\n")
    return 0


def saved_of(paths: RunPaths, cfg: CommandConfig) -> int:
    """How much a requeue keeps: steps of the newest checkpoint or, for a command that keeps all its records, bytes of these."""
    if cfg.has_checkpoints:
        return max(steps(paths), default=0)
    files = (paths.finished, *paths.evaluations.rglob("*.jsonl"))
    return sum(file.stat().st_size for file in files if file.exists())


def _noted(paths: RunPaths) -> dict[str, Any]:
    try:
        return json.loads(paths.job.read_text())
    except FileNotFoundError:
        return {}


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands. Raises RuntimeError if it is not installed or the controller does not answer."""
    try:
        return subprocess.run(outside(command), capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except FileNotFoundError as error:
        raise RuntimeError(f"there is no {command[0]} here") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} gave no answer in {TIMEOUT:g} s") from error


def queue() -> dict[str, str]:
    """Job id → SLURM's state, of all the user's jobs that SLURM still lists.

    Raises RuntimeError if the controller does not answer.
    """
    return {job: state for job, (state,) in _squeue("--states=all", "--format=%i|%T").items()}


def waits(wanted: Collection[str]) -> dict[str, str]:
    """Why jobs wait, by id: `Priority, start about 2026-11-23T14:20:00`. Only of jobs in the queue. Raises the error of `queue`."""
    told = _squeue("--states=PENDING", "--format=%i|%r|%S")
    return {
        job: reason + (f", start about {start}" if start[:1].isdecimal() else "") for job, (reason, start) in told.items() if job in wanted
    }


def _squeue(*options: str) -> dict[str, list[str]]:
    """The rows of the user's jobs, by job id."""
    done = ask("squeue", "--me", "--noheader", "--array", *options)
    if done.returncode != 0:
        raise RuntimeError(f"squeue failed: {done.stderr.strip()}")
    rows = (line.strip().split("|") for line in done.stdout.splitlines() if "|" in line)
    return {job: fields for job, *fields in rows}


def is_alive(job_id: str, states: Mapping[str, str] | None = None) -> bool:
    """Whether a job is queued or running. Raises RuntimeError if the controller does not answer."""
    return (queue() if states is None else states).get(job_id, GONE) not in ENDED


def restarts_of(job_id: str) -> int:
    """How often SLURM has requeued a job; -1 if it does not answer. SLURM counts a requeue at once, before the job has stopped."""
    return int(_fields(job_id).get("Restarts", -1))


def is_ending(job_id: str) -> bool:
    """Whether a job whose processes still run was cancelled or is otherwise ending: its state is no longer `RUNNING`."""
    return _fields(job_id).get("JobState", "RUNNING") != "RUNNING"


def patience_with_nodes() -> float:
    """Seconds after which SLURM gives up a node that does not answer (`SlurmdTimeout`); its default if it does not say."""
    try:
        found = re.search(r"^SlurmdTimeout\s*=\s*(\d+)", ask("scontrol", "show", "config").stdout, re.MULTILINE)
    except RuntimeError:
        return 300.0
    return float(found[1]) if found else 300.0


def _fields(job_id: str) -> dict[str, str]:
    """The controller's fields of a job, by SLURM's names; empty if it does not answer."""
    try:
        done = ask("scontrol", "show", "job", "--oneliner", job_id)
    except RuntimeError:
        return {}
    words = (word.partition("=") for word in done.stdout.split())
    return {name: value for name, _, value in words}
