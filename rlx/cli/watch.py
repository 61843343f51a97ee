"""`rlx watch RUN`: the console of any run, from its files, in any terminal; with --tmux also panes that follow the log of each role."""

from __future__ import annotations

import math
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.runs.run import Run
    from rlx.runs.status import Status

SUMMARY = "follow a run: progress, phases, last log lines, closing summary"
UPDATE = 0.2  # seconds between two displays
ASK = 10.0  # seconds between two questions to SLURM
WAIT = 30.0  # seconds between two questions why the job waits, which are about all users' jobs
PATIENCE = 5.0  # seconds that a run on another host has to show that it is alive: its clock may be wrong, and its files arrive late
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
    from rlx.runs.run import Run

    places = [part for part in argv if part != "--tmux"]
    if len(places) != 1 or places[0].startswith("-"):
        print("usage: rlx watch [--tmux] RUN. See rlx watch --help.", file=sys.stderr)
        return 2
    found = Run.open(Path(places[0]))
    if "--tmux" in argv:
        from rlx.cli.panes import show

        return show(found)
    try:
        return watch(found)
    except KeyboardInterrupt:
        print(f"\nthe run goes on; look again with: rlx watch {shlex.quote(places[0])}", file=sys.stderr)
        return 0


def watch(run: Run) -> int:
    """Display a run until it ends. Returns its exit code; 1 if its processes are gone."""
    import importlib

    from rlx.cli.command import failure
    from rlx.config.errors import ConfigError
    from rlx.config.roots import root_of

    cfg, status = run.config, run.status
    if cfg is None or status is None:
        raise ConfigError(f"{run.root} has not been started (a dry run?).\n  fix: name a run that has; rlx runs lists them")
    command = importlib.import_module(f"rlx.cli.{root_of(cfg).command}").command()
    console = command.display(run.root, cfg, run.overrides)
    console.started = status.started
    console.tail = [spec.name for spec in run.plan]
    jobs, asked, explained, pulse = _jobs(run), time.monotonic(), -math.inf, Pulse()
    while (state := run.state(jobs)) not in ENDED or pulse.alive(run, state) or _comes_back(run, state, jobs):
        if not state.startswith("waiting"):
            console.note, explained = "", -math.inf
        elif time.monotonic() - explained > WAIT:
            console.note, explained = _why(run, state), time.monotonic()
        console.update()
        time.sleep(UPDATE)
        if time.monotonic() - asked > ASK:
            jobs, asked = _jobs(run), time.monotonic()
    status = run.status or status
    console.started = time.time() - (status.updated - status.started)  # the summary says how long the run took
    console.close(status.exit_code if status.exit_code is not None else 1)
    if state == "lost":
        print(f"{run.root} has no final state and no living process: resume it with resume=latest", file=sys.stderr)
    elif status.cause is not None:
        print(failure(status.cause, run.root), file=sys.stderr)
    return status.exit_code if status.exit_code is not None else 1


class Pulse:
    """Whether a run on other hosts is alive, by changes of its status and this host's own clock: the clocks of two hosts may differ."""

    def __init__(self) -> None:
        self._updated: float | None = None
        self._since, self._patience = time.monotonic(), PATIENCE

    def alive(self, run: Run, state: str) -> bool:
        """Whether a run that seems lost may be alive."""
        from rlx.runs.run import STALE

        status = run.status
        if state != "lost" or status is None or not (run.job or _is_elsewhere(status)):
            return False
        now = time.monotonic()
        if status.updated != self._updated:
            self._patience = PATIENCE if self._updated is None or run.job else STALE  # SLURM knows of a job
            self._updated, self._since = status.updated, now
        return now - self._since < self._patience


def _is_elsewhere(status: Status) -> bool:
    named = [each for each in (status.launcher, status.supervisor, *status.processes) if each is not None]
    return any(each["host"] != socket.gethostname() for each in named)


def _comes_back(run: Run, state: str, jobs: Mapping[str, str] | None) -> bool:
    """Whether a preempted run's job is still in SLURM's hands: it is about to be in the queue again."""
    from rlx.runs.jobs import ENDED as GONE_STATES
    from rlx.runs.jobs import GONE

    return state == "preempted" and run.job is not None and jobs is not None and jobs.get(run.job, GONE) not in GONE_STATES


def _why(run: Run, state: str) -> str:
    """Why the run's job waits in SLURM's queue."""
    from rlx.runs.jobs import waits

    try:
        why = waits([run.job or ""]).get(run.job or "", "")
    except RuntimeError:
        why = ""
    return f"job {run.job} is {state}" + (f": {why}" if why else "")


def _jobs(run: Run) -> dict[str, str] | None:
    """SLURM's states; `None` if the run is no job, or SLURM does not answer now."""
    from rlx.runs.jobs import queue

    if run.job is None:
        return None
    try:
        return queue()
    except RuntimeError:
        return None
