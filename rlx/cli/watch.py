"""`rlx watch RUN`: the console of any run, from its files, in any terminal; with --tmux also panes that follow the log of each role."""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rlx.runs.run import Run

T = TypeVar("T")
SUMMARY = "follow a run: progress, phases, last log lines, closing summary"
UPDATE = 0.2  # seconds between two displays
ASK = 10.0  # seconds between two questions to SLURM
WAIT = 30.0  # seconds between two questions why the job waits, which are about all users' jobs
LOST_SECONDS = 5.0  # seconds after which a run that seems lost is: files of another host arrive late
ENDED = ("completed", "failed", "interrupted", "preempted", "lost", "not started")


def help_text() -> str:
    return f"""\
rlx watch: {SUMMARY}.

usage: rlx watch [--tmux] RUN

  rlx watch outputs/mine              what the launcher shows, also over SSH and for a job on a cluster; without a terminal as lines
  rlx watch --tmux outputs/mine       a tmux session with this display and a pane for each role's log; Ctrl-b d leaves it

It reads the run's files. For a SLURM job it also asks SLURM: every 10 s for the job's state, and every 30 s why the job waits.
Ctrl-C ends the display, and the run goes on.

exit codes: that of the run once it has ended; 0 after Ctrl-C; 1 if its processes are gone without a final state"""


def run(argv: list[str]) -> int:
    from rlx.cli.arguments import Parser
    from rlx.runs.run import Run

    parser = Parser("watch")
    parser.add_argument("run", type=Path)
    parser.add_argument("--tmux", action="store_true")
    given = parser.parse_args(argv)
    found = Run.open(given.run)
    if given.tmux:
        from rlx.cli.tmux import show

        return show(found)
    try:
        return watch(found)
    except KeyboardInterrupt:
        print(f"\nthe run goes on; look again with: rlx watch {shlex.quote(str(given.run))}", file=sys.stderr)
        return 0


def watch(run: Run) -> int:
    """Display a run until it ends. Returns its exit code; 1 if its processes are gone."""
    from rlx.cli.commands import BY_NAME
    from rlx.cli.start import failure
    from rlx.config.errors import ConfigError
    from rlx.config.roots import root_of
    from rlx.runs.jobs import queue, waits

    cfg, status = run.config, run.status
    if cfg is None or status is None:
        raise ConfigError(f"{run.root} has not been started (a dry run?).\n  fix: name a run that has; rlx runs lists them")
    console = BY_NAME[root_of(cfg).command].show(run.root, cfg)
    console.started = status.started
    console.tail = [spec.name for spec in run.plan]
    jobs: dict[str, str] | None = None  # SLURM's states; None: the run is no job, or SLURM does not answer now
    asked = explained = -math.inf
    seen = time.monotonic()  # that it is not lost
    while True:
        now = time.monotonic()
        if run.job is not None and now - asked > ASK:
            jobs, asked = _answered(queue), now
        state, sign = run.state(jobs), (run.status or status).updated
        if state != "lost" or sign != status.updated:  # the clock of another host may be wrong, but its file changes
            seen, status = now, run.status or status
        if state in ENDED and now - seen >= (LOST_SECONDS if state == "lost" else 0) and not _comes_back(run, state, jobs):
            break
        if not state.startswith("waiting"):
            console.note, explained = "", -math.inf
        elif now - explained > WAIT:
            why = (_answered(lambda: waits([str(run.job)])) or {}).get(str(run.job))
            console.note, explained = f"job {run.job} is {state}" + (f": {why}" if why else ""), now
        console.update()
        time.sleep(UPDATE)
    status = run.status or status
    console.started = time.time() - (status.updated - status.started)  # the summary says how long the run took
    console.close(status.exit_code if status.exit_code is not None else 1)
    if state == "lost":
        print(f"{run.root} has no final state and no living process: resume it with resume=latest", file=sys.stderr)
    elif status.cause is not None:
        print(failure(status.cause, run.root), file=sys.stderr)
    return status.exit_code if status.exit_code is not None else 1


def _comes_back(run: Run, state: str, jobs: Mapping[str, str] | None) -> bool:
    """Whether a preempted run's job is still in SLURM's hands: it is about to be in the queue again."""
    from rlx.runs.jobs import ENDED as GONE_STATES
    from rlx.runs.jobs import GONE

    return state == "preempted" and run.job is not None and jobs is not None and jobs.get(run.job, GONE) not in GONE_STATES


def _answered(ask: Callable[[], T]) -> T | None:
    """SLURM's answer; None if there is none now."""
    try:
        return ask()
    except RuntimeError:
        return None
