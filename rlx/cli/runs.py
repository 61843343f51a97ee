"""`rlx runs`: list the runs below a directory with their progress and state. Reads run directories and asks SLURM.

Writes the final status of runs whose SLURM jobs could not."""

from __future__ import annotations

import sys
import time
from pathlib import Path

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
SLURM is asked once for all runs. If a run's job ended before it could write its state, this command writes it."""


def run(argv: list[str]) -> int:
    from rlx.config.errors import ConfigError, may_read
    from rlx.plan.explain import table
    from rlx.runs.run import find

    roots = [Path(part) for part in argv] or [Path("outputs")]
    with may_read(roots[0]):
        absent = [str(root) for root in roots if not root.is_dir()]
    if absent:
        print(f"rlx: there is no directory {', '.join(absent)}. Usage: rlx runs [DIRECTORY …]", file=sys.stderr)
        return 2
    found, unreadable = [], []
    for each in (run for root in roots for run in find(root)):
        try:
            found.append((each, each.status, each.job, each.history.final_reward, each.command or "-"))
        except ConfigError as error:
            unreadable.append([str(each.root), "-", "unreadable", "-", "-", "-", "-", ""])
            print(f"rlx: {error.problems[0].partition(chr(10))[0]}", file=sys.stderr)
    jobs = _jobs() if any(job for _, _, job, _, _ in found) else {}
    if jobs is not None and any(job for _, _, job, _, _ in found):
        from rlx.launch.follow import close_ended

        close_ended([each for each, *_ in found], jobs)
    states = {each: each.state(jobs) for each, *_ in found}
    waiting = {job for each, _, job, _, _ in found if job and states[each].startswith("waiting")}
    why = _waits(waiting) if waiting else {}
    rows = []
    for each, _, job, reward, kind in sorted(found, key=lambda row: row[1].updated if row[1] else 0.0):
        if (status := each.status) is not None:
            steps, shown = f"{status.step}/{status.max_steps}", "-" if reward is None else f"{reward:.3f}"
            note = why.get(job or "", "") if states[each].startswith("waiting") else ""
            if status.cause is not None:
                note = status.cause.line
            rows.append([str(each.root), kind, states[each], steps, shown, job or "-", _age(status.updated), note])
    rows = unreadable + rows
    print("\n".join(table(["run", "kind", "state", "steps", "reward", "job", "last sign", ""], rows)) if rows else "no runs")
    return 0


def _waits(jobs: set[str]) -> dict[str, str]:
    from rlx.runs.jobs import waits

    try:
        return waits(jobs)
    except RuntimeError:
        return {}


def _jobs() -> dict[str, str] | None:
    from rlx.runs.jobs import queue

    try:
        return queue()
    except RuntimeError as error:
        print(f"rlx: the states of jobs are unknown: {error}", file=sys.stderr)
        return None


def _age(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
