"""The state of SLURM jobs, from `squeue` and `scontrol`, and the job id of a run.

Submits and stops nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.checkpoints.folders import steps
from rlx.config.schema import CommandConfig
from rlx.paths import RunPaths, write_text
from rlx.runs.outside import outside

TIMEOUT = 10.0  # seconds to wait for an answer of the controller
WHOLE = {"SLURM_BITSTR_LEN": "0"}  # else SLURM cuts the task numbers of `12_[1,3,5-9]` off after 64 characters
GONE = "unknown to SLURM"  # state of a job that SLURM does not list
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED", GONE)
"""SLURM's states of a job that has ended. A job that the controller has forgotten has ended too."""
ARRAY = re.compile(r"(\d+)_\[([\d,:-]+)(?:%\d+)?\]")  # %: how many tasks run at a time
TASKS = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+))?")


def note_job(paths: RunPaths, job_id: str, output: Path | None = None, name: str | None = None) -> None:
    """Record a submitted job, the file of its output and its name, as submitted from the working directory."""
    noted = {"id": job_id, "submitted": time.time(), "output": output and str(output), "name": name, "directory": os.getcwd()}
    write_text(paths.job, json.dumps(noted) + "\n")


def job_of(paths: RunPaths) -> str | None:
    """Id of the last SLURM job that was submitted for a run; `None` if there was none."""
    return _noted(paths).get("id")


def output_of(paths: RunPaths) -> Path | None:
    """The file of that job's own output, which has what was printed before and after rlx ran."""
    output = _noted(paths).get("output")
    return Path(output) if output else None


def barren_requeues(paths: RunPaths, restarts: int, step: int) -> int:
    """How many requeues in a row have saved nothing new, up to the job's `restarts`-th. Records nothing.

    `step`: how much is saved. Any value other than that at the last recorded start counts as progress, also a lower one: a newest
    checkpoint may turn out to be damaged, and `rlx eval` replaces the rollouts of a version by its results.
    """
    noted = _noted(paths)
    last = noted.get("progress")
    if last is None or last["restarts"] > restarts or step != last["step"]:
        return 0
    return restarts - last["restarts"] + noted.get("missed", 0)


def note_progress(paths: RunPaths, restarts: int, step: int) -> int:
    """`barren_requeues` of a job that starts now, from `step`. Records the start if there was progress."""
    barren = barren_requeues(paths, restarts, step)
    if barren == 0:
        noted = {name: value for name, value in _noted(paths).items() if name != "missed"}
        write_text(paths.job, json.dumps({**noted, "progress": {"restarts": restarts, "step": step}}) + "\n")
    return barren


def note_missed(paths: RunPaths, restarts: int, step: int) -> int:
    """`note_progress` of a start that ends before its attempt, because a host is missing. It counts as one without progress."""
    barren = note_progress(paths, restarts, step)
    noted = _noted(paths)
    write_text(paths.job, json.dumps({**noted, "missed": noted.get("missed", 0) + 1}) + "\n")
    return barren + 1


def saved_of(paths: RunPaths, cfg: CommandConfig) -> int:
    """How much a requeue keeps: steps of the newest checkpoint or, for a command that keeps all its records, bytes of these."""
    if cfg.has_checkpoints:
        return max(steps(paths), default=0)
    files = (paths.finished, *paths.evaluations.glob("*/step_*/*.jsonl"))
    return sum(file.stat().st_size for file in files if file.exists())


def unit_of(cfg: CommandConfig) -> str:
    """What `saved_of` grows by, for messages."""
    return "step" if cfg.has_checkpoints else "rollout"


def _noted(paths: RunPaths) -> dict[str, Any]:
    try:
        return json.loads(paths.job.read_text())
    except FileNotFoundError:
        return {}


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    """Run one of SLURM's commands. Raises RuntimeError if it is not installed or the controller does not answer."""
    try:
        return subprocess.run(outside(command), capture_output=True, text=True, check=False, timeout=TIMEOUT, env=os.environ | WHOLE)
    except FileNotFoundError as error:
        raise RuntimeError(f"there is no {command[0]} here") from error
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command[0]} gave no answer in {TIMEOUT:g} s") from error


def queue() -> dict[str, str]:
    """Job id → SLURM's state, of all the user's jobs that SLURM still lists.

    Raises RuntimeError if the controller does not answer.
    """
    done = ask("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%T")
    if done.returncode != 0:
        raise RuntimeError(f"squeue failed: {done.stderr.strip()}")
    return dict(line.strip().split("|", 1) for line in done.stdout.splitlines() if "|" in line)


@dataclass(frozen=True)
class Wait:
    """Why a job waits, as SLURM says (`Priority`), and where: `3 of 12 waiting in gpu, start about 2026-11-23 14:20`."""

    reason: str
    place: str

    def __str__(self) -> str:
        return f"{self.reason}, {self.place}"


def waits(wanted: Collection[str]) -> dict[str, Wait]:
    """Why jobs wait, by id. Only of jobs in the queue.

    The place is among all users' jobs. Raises RuntimeError if the controller does not answer.
    """
    done = ask("squeue", "--noheader", "--array", "--states=PENDING", "--sort=-p,i", "--format=%i|%P|%S|%r")
    if done.returncode != 0:
        raise RuntimeError(f"squeue failed: {done.stderr.strip()}")
    jobs = [line.strip().split("|", 3) for line in done.stdout.splitlines() if line.count("|") >= 3]  # the first to run comes first
    before: Counter[str] = Counter()  # jobs so far by their partitions, `gpu` or `gpu,old`
    mine = []
    for job, partitions, start, reason in jobs:
        before[partitions] += 1
        if job in wanted:
            mine.append((job, partitions, start, reason, _rivals(before, partitions)))
    found = {}
    for job, partitions, start, reason, place in mine:
        about = f", start about {start[:16].replace('T', ' ')}" if start[:1].isdecimal() else ""
        why = "not considered yet" if reason == "None" else reason
        found[job] = Wait(why, f"{place} of {_rivals(before, partitions)} waiting in {partitions}{about}")
    return found


def _rivals(counts: Mapping[str, int], partitions: str) -> int:
    """How many of the counted jobs can run in one of these partitions."""
    return sum(count for theirs, count in counts.items() if not {*partitions.split(",")}.isdisjoint(theirs.split(",")))


def find_jobs(job_ids: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Job id → its state and what tells whose it is, of the user's jobs that SLURM or its accounting knows: see `is_of`.

    Empty where SLURM does not answer. The accounting is asked for whole arrays, because one row may stand for several tasks.
    """
    found = _table("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%T|%o") or {}
    if unknown := [job for job in job_ids if job not in found]:
        accounting = (
            "sacct",
            "--allocations",
            "--noheader",
            "--parsable2",
            f"--jobs={','.join(dict.fromkeys(job.partition('_')[0] for job in unknown))}",
        )
        told = _table(*accounting, "--format=JobID,State,SubmitLine")
        if told is None:  # SLURM before 21.08 has no such column
            told = _table(*accounting, "--format=JobID,State,WorkDir,JobName")
        found |= told or {}
    return found


def is_of(paths: RunPaths, command: str) -> bool:
    """Whether a job that `find_jobs` has found is the run's. Ids do not tell: two clusters, or one whose ids began anew, use the same.

    `command`: the path of the batch script (`/runs/a/.submitit/x.sh`), with what was before it; or where the accounting of an older
    SLURM has no command, the directory from which the job was submitted and its name: `/home/me|losses`.
    """
    noted, output = _noted(paths), output_of(paths)
    if output is not None and f" {output.parent}/" in f" {command}":
        return True
    return bool(noted.get("name")) and command == f"{noted['directory']}|{noted['name']}"


def _table(*command: str) -> dict[str, tuple[str, str]] | None:
    """The rows of an answer of SLURM, by their first column. None if it refuses the question; empty if it does not answer."""
    try:
        done = ask(*command)
    except RuntimeError:
        return {}
    if done.returncode != 0:
        return None
    rows = (line.strip().split("|", 2) for line in done.stdout.splitlines() if line.count("|") >= 2)
    told = {job: (state.split()[0], command) for job, state, command in rows if state}  # CANCELLED by 1000
    return {job: answer for row, answer in told.items() for job in _jobs_of(row)}


def _jobs_of(row: str) -> list[str]:
    """The jobs of a row. The accounting has one for all tasks of an array that have not started: `12_[1,4-6,8-20:4%2]`."""
    found = ARRAY.fullmatch(row)
    if found is None:
        return [row]
    jobs = []
    for first, last, step in TASKS.findall(found[2]):
        jobs += [f"{found[1]}_{task}" for task in range(int(first), int(last or first) + 1, int(step or 1))]
    return jobs


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
    found = _setting("SlurmdTimeout")
    return 300.0 if found is None else float(found)


def max_array_size() -> int | None:
    """The most jobs that one array may have (`MaxArraySize`); None if SLURM does not say."""
    return _setting("MaxArraySize")


def _setting(name: str) -> int | None:
    """A number of SLURM's configuration."""
    try:
        done = ask("scontrol", "show", "config")
    except RuntimeError:
        return None
    found = re.search(rf"^{name}\s*=\s*(\d+)", done.stdout, re.MULTILINE)
    return int(found[1]) if found else None


def _fields(job_id: str) -> dict[str, str]:
    """The controller's fields of a job, by SLURM's names; empty if it does not answer."""
    try:
        done = ask("scontrol", "show", "job", "--oneliner", job_id)
    except RuntimeError:
        return {}
    words = (word.partition("=") for word in done.stdout.split())
    return {name: value for name, _, value in words}
