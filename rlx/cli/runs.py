"""`rlx runs`: list the runs below a directory with their progress and state. Reads run directories and asks SLURM.

Writes the final status of runs whose SLURM jobs could not."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.terminal import duration

if TYPE_CHECKING:
    from rlx.runs.run import Run

SUMMARY = "list runs: kind, state, steps, reward, job"


def help_text() -> str:
    return f"""\
rlx runs: {SUMMARY}.

usage: rlx runs [DIRECTORY …]        default: outputs

Newest last. The state comes from status.json, except:
  waiting (…)   the run's SLURM job is in the queue; the last column says why, and SLURM's estimate of the start
  lost          the run has no final state and no living process: resume it with resume=latest
The kind is the command that made the run: train, sft, eval, synthesize.
The reward is the mean of the last five steps. The last column says why a run failed or waits.
SLURM is asked once for all runs. Nothing is written."""


def run(argv: list[str]) -> int:
    from rlx.config.errors import ConfigError, may_read
    from rlx.plan.explain import table
    from rlx.runs.jobs import waits
    from rlx.runs.run import find

    roots = [Path(part) for part in argv] or [Path("outputs")]
    with may_read(roots[0]):
        absent = [str(root) for root in roots if not root.is_dir()]
    if absent:
        raise ConfigError(f"there is no directory {', '.join(absent)}.\n  fix: rlx runs DIRECTORY …")
    found, rows = [], []
    for each in (run for root in roots for run in find(root)):
        try:
            found.append((each, each.status, each.job, each.history.final_reward, each.command or "-"))
        except ConfigError as error:
            rows.append([str(each.root), "-", "unreadable", "-", "-", "-", "-", ""])
            print(f"rlx: {error.problems[0].partition(chr(10))[0]}", file=sys.stderr)
    jobs = jobs_of([each for each, *_ in found])
    states = {each: each.state(jobs) for each, *_ in found}
    waiting = {job for each, _, job, _, _ in found if job and states[each].startswith("waiting")}
    why: Mapping[str, object] = {}
    with contextlib.suppress(RuntimeError):  # SLURM does not answer
        why = waits(waiting) if waiting else {}
    for each, status, job, reward, kind in sorted(found, key=lambda row: row[1].updated if row[1] else 0.0):
        if status is not None:
            steps, shown = f"{status.step}/{status.max_steps}", "-" if reward is None else f"{reward:.3f}"
            note = status.cause.line if status.cause is not None else str(why.get(job or "", ""))
            age = f"{duration(max(0.0, time.time() - status.updated))} ago"
            rows.append([str(each.root), kind, states[each], steps, shown, job or "-", age, note])
    print("\n".join(table(["run", "kind", "state", "steps", "reward", "job", "last sign", ""], rows)) if rows else "no runs")
    return 0


def jobs_of(runs: Sequence[Run]) -> dict[str, str] | None:
    """SLURM's states of all jobs; empty if no run has one, None if SLURM does not answer."""
    from rlx.runs.jobs import queue

    try:
        return queue() if any(map(_has_job, runs)) else {}
    except RuntimeError as error:
        print(f"rlx: the states of jobs are unknown: {error}", file=sys.stderr)
        return None


def _has_job(run: Run) -> bool:
    from rlx.config.errors import ConfigError

    try:
        return run.job is not None
    except ConfigError:  # of a run that may not be read
        return False
