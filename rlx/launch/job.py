"""Replaces submitit's entry module for local jobs: it does the same, but exits when the launcher is gone.

submitit starts the job first and writes the job's pickle afterwards. If the launcher is killed in between, submitit's own module
waits a minute for the pickle. Command line: LAUNCHER_PID LAUNCHER_START_TIME -u -m submitit.core._submit FOLDER.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from submitit.core.submission import submitit_main
from submitit.core.utils import JobPaths

from rlx.launch.processes import start_time
from rlx.paths import listed


def main(arguments: list[str]) -> int:
    launcher, since, folder = int(arguments[0]), int(arguments[1]), arguments[-1]
    pickle: Path = JobPaths(folder, job_id=os.environ["SUBMITIT_LOCAL_JOB_ID"]).submitted_pickle
    while not listed(pickle):
        if start_time(launcher) != since:
            print(f"the launcher (process {launcher}) is gone; leaving", file=sys.stderr)
            return 1
        time.sleep(0.01)
    sys.argv = [sys.argv[0], folder]
    submitit_main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
