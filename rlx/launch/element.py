"""One run of a local sweep, in a process of its own: `python -m rlx.launch.element RUN_DIR`.

The directory is made already, and CUDA_VISIBLE_DEVICES names those of the pool's GPUs that are this run's. Shows nothing: the pool does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlx.config.load import load_run
from rlx.launch.local import launch
from rlx.launch.supervisor import Limits
from rlx.paths import RunPaths
from rlx.runs.claim import RunLock
from rlx.runs.rewind import has_begun, rewind
from rlx.runs.status import read_status


def main(run_dir: str) -> int:
    paths = RunPaths(Path(run_dir))
    cfg = load_run(paths.root)
    lock = RunLock(paths)
    if not lock.exclusive():
        print(f"{paths.root} is in use by another run", file=sys.stderr)
        return 1
    # The directory may have been waiting for its turn for days, and nobody held it.
    status = read_status(paths)
    if status is not None and status.state == "completed":
        return 0
    if has_begun(paths):
        rewind(paths)
    lock.share()
    return launch(paths, Limits.of(cfg), lock)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
