"""Several ranks of one program on this host: `python in_ranks.py 2 -m rlx.roles.trainer …`, with the variables that the plan gives them.

If one fails, the others are ended, and its exit code is that of all. What they print goes where this process's output goes.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlx.process import die_with_parent


def in_ranks(ranks: int) -> list[str]:
    """What stands between the interpreter and the program's arguments; nothing for one rank."""
    return [str(Path(__file__)), str(ranks)] if ranks > 1 else []


def main(ranks: int, command: list[str]) -> int:
    die_with_parent()
    token = secrets.token_hex(8)  # so that no address of an earlier start is theirs
    store = Path(tempfile.mkdtemp()) / "store"  # for programs that have no run directory
    group = {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "RLX_RUN_TOKEN": token, "STORE": str(store)}
    started = [subprocess.Popen([sys.executable, *command], env={**os.environ, **group, "RANK": str(rank)}) for rank in range(ranks)]
    signal.signal(signal.SIGTERM, lambda *_: [each.terminate() for each in started])
    while any(each.poll() is None for each in started):
        if failed := [each.returncode for each in started if each.returncode not in (None, 0, 75)]:
            for each in started:
                each.kill()
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        time.sleep(0.05)
    return max(each.returncode for each in started)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
