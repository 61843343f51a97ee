"""The reaper: a small process that cleans up a run after its supervisor has died.

It reads `+GROUP` and `-GROUP` lines from its standard input, a pipe whose other end only the supervisor holds. The pipe closes when
the supervisor dies, for any reason. The reaper then kills the supervisor's remaining processes, writes the run's final status, and deletes
what the run has in memory.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from rlx.paths import RunPaths
from rlx.process_tree import kill_all
from rlx.runs.status import FINAL, read_status
from rlx.weights import tmpfs


def main(run_dir: str, token: str, num_lines: int) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    kill_all(groups, token)
    paths = RunPaths(Path(run_dir))
    try:
        close_status(paths, num_lines)
    finally:
        tmpfs.clear(paths.weights)


def close_status(paths: RunPaths, num_lines: int) -> None:
    """Mark the run as failed if its status is not final: the supervisor died before it could write one."""
    status = read_status(paths)
    if status is None or status.state in FINAL:
        return
    reason = "the supervisor died (killed, or out of memory); all its processes were killed too"
    status.fail(paths, "supervisor", reason, paths.log(status.attempt, "launcher"), num_lines)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
