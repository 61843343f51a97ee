"""What submitit starts instead of its own module: the same, but it does not outwait a launcher that is gone.

submitit starts the job first and hands over its pickle afterwards; a launcher killed in between would leave a job that waits a
minute for it. Command line: LAUNCHER_PID LAUNCHER_START_TIME -u -m submitit.core._submit FOLDER.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from submitit.core.submission import submitit_main
from submitit.core.utils import JobPaths

from rlx.launch.processes import start_time


def main(arguments: list[str]) -> int:
    launcher, since, folder = int(arguments[0]), int(arguments[1]), arguments[-1]
    pickle: Path = JobPaths(folder, job_id=os.environ["SUBMITIT_LOCAL_JOB_ID"]).submitted_pickle
    while not pickle.exists():
        if start_time(launcher) != since:
            print(f"the launcher (process {launcher}) is gone; leaving", file=sys.stderr)
            return 1
        time.sleep(0.01)
    sys.argv = [sys.argv[0], folder]
    submitit_main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
