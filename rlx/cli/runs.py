"""`rlx runs`: the runs below a directory, how far they are and what has become of them. Reads run directories, and asks SLURM."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.paths import RunPaths
    from rlx.runs.status import Status

SUMMARY = "list runs: state, steps, reward, job"


def help_text() -> str:
    return f"""\
rlx runs: {SUMMARY}.

usage: rlx runs [DIRECTORY …]        default: outputs

Newest last. The state is that of status.json, but:
  waiting (…)   its SLURM job is in the queue
  lost          the run has no final state, and nothing of it lives: start it again with resume=latest
The reward is the mean of the last five steps."""


def run(argv: list[str]) -> int:
    from rlx.plan.explain import table
    from rlx.runs.history import final_reward
    from rlx.runs.jobs import job_of
    from rlx.runs.status import read_status

    roots = [Path(part) for part in argv] or [Path("outputs")]
    absent = [str(root) for root in roots if not root.is_dir()]
    if absent:
        print(f"rlx: there is no directory {', '.join(absent)}. Usage: rlx runs [DIRECTORY …]", file=sys.stderr)
        return 2
    found = [(paths, status) for root in roots for paths in find(root) if (status := read_status(paths)) is not None]
    jobs = _jobs() if any(job_of(paths) for paths, _ in found) else {}
    rows = []
    for paths, status in sorted(found, key=lambda each: each[1].updated):
        reward = final_reward(paths)
        rows.append(
            [
                str(paths.root),
                state(paths, status, jobs),
                f"{status.step}/{status.max_steps}",
                "-" if reward is None else f"{reward:.3f}",
                job_of(paths) or "-",
                _age(status.updated),
            ]
        )
    print("\n".join(table(["run", "state", "steps", "reward", "job", "last sign"], rows)) if rows else "no runs")
    return 0


def find(root: Path, depth: int = 3) -> Iterator[RunPaths]:
    """Run directories below a folder, themselves not searched: `outputs/<name>` and `outputs/<sweep>/<element>`."""
    from rlx.paths import RunPaths

    if RunPaths(root).status.is_file():
        yield RunPaths(root)
    elif depth:
        for folder in sorted(root.iterdir()):
            if folder.is_dir() and not folder.is_symlink() and not folder.name.startswith("."):
                yield from find(folder, depth - 1)


def state(paths: RunPaths, status: Status, jobs: dict[str, str] | None) -> str:
    """What has become of a run, in a word or two. `jobs`: SLURM's states by job id; None: nobody can tell."""
    from rlx.runs.claim import RunLock
    from rlx.runs.jobs import ENDED, GONE, job_of
    from rlx.runs.status import FINAL

    job = job_of(paths)
    if job is not None and jobs is not None and jobs.get(job) in ("PENDING", "REQUEUED", "REQUEUE_HOLD"):
        return f"waiting ({jobs[job].lower()})"
    if status.state == "preempted" and job is not None and jobs is not None and jobs.get(job, GONE) in ("CANCELLED", GONE):
        return "interrupted"  # nobody was there to write it
    if status.state in FINAL:
        return status.state
    if job is not None:
        return status.state if jobs is None else "lost" if jobs.get(job, GONE) in ENDED else status.state
    lock = RunLock(paths)
    alone = lock.exclusive()
    lock.close()
    return "lost" if alone else status.state


def _jobs() -> dict[str, str] | None:
    from rlx.runs.jobs import queue

    try:
        return queue()
    except RuntimeError as error:
        print(f"rlx: states of jobs are not known: {error}", file=sys.stderr)
        return None


def _age(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
