"""A tmux session for a run: its console, and a pane for the log of each role. `rlx watch --tmux`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys

from rlx.config.errors import ConfigError
from rlx.runs.run import Run
from rlx.terminal import shown

MAX_PANES = 9  # panes; more cannot be read on one screen
# `tail -F` does not notice that a folder in the path was replaced, so the loop follows the link to the newest attempt. What steers a
# terminal is taken out of the log.
FOLLOW = r"""
while :; do
  at=$(readlink "$1")
  tail -n 200 -F "$(dirname "$1")/$at/$2" &
  while [ "$(readlink "$1")" = "$at" ]; do sleep 1; done
  kill $!
done | LC_ALL=C sed -u 's/[\x00-\x08\x0b-\x1f\x7f]//g; s/\xc2[\x80-\x9f]//g'"""


def session_of(run: Run) -> str:
    """The session's name. tmux allows neither a dot nor a colon, and executes `#(…)`."""
    return re.sub(r"[^\w-]", "_", f"rlx-{run.name}")


def logs_of(run: Run) -> list[str]:
    """Names of the processes whose logs are followed: the roles of the plan, then what else writes a log (environment workers)."""
    planned = [spec.name for spec in run.plan]
    there = sorted(path.stem for path in run.paths.latest_logs.glob("*.log"))
    return [*planned, *(name for name in there if name not in planned)]


def make(run: Run, session: str) -> list[str]:
    """The command of tmux that creates the session in the background: the display, and a pane for each of the first logs."""
    names = logs_of(run)[: MAX_PANES - 1]
    watch = shlex.join([sys.executable, "-m", "rlx.cli", "watch", str(run.root.absolute())])
    words = ["new-session", "-d", "-s", session, "-x", "200", "-y", "60", watch]
    # In one call: `rlx watch` of a run that has ended may end before a second one, and the session with it.
    for option, value in (("remain-on-exit", "on"), ("pane-border-status", "top"), ("pane-border-format", " #{pane_title} ")):
        words += [";", "set-option", "-w", "-t", f"={session}:", option, value]
    words += [";", "select-pane", "-T", _text(run.name)]
    for name in names:
        log = shlex.join(["sh", "-c", FOLLOW, "sh", str(run.paths.latest_logs.absolute()), f"{name}.log"])
        words += [";", "split-window", "-t", f"={session}:", log, ";", "select-pane", "-T", _text(name)]
        words += [";", "select-layout", "-t", f"={session}:", "tiled"]
    return ["tmux", *words]


def show(run: Run) -> int:
    """Create the session of a run, or find the one that exists, and show it in this terminal."""
    if shutil.which("tmux") is None or not sys.stdout.isatty():
        raise ConfigError("--tmux needs tmux and a terminal.\n  fix: apt-get install tmux, or rlx watch without --tmux")
    session = session_of(run)
    if subprocess.run(["tmux", "has-session", "-t", f"={session}"], capture_output=True, check=False).returncode != 0:
        subprocess.run(make(run, session), check=True)
    command = ["tmux", "switch-client" if os.environ.get("TMUX") else "attach-session", "-t", f"={session}"]
    return subprocess.run(command, check=False).returncode


def _text(name: str) -> str:
    """A title that tmux shows as it is: it would execute `#(…)`."""
    return shown(name).replace("#", "##")
