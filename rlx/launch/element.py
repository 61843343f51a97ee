"""One run of a local sweep, in its own process: `python -m rlx.launch.element RUN_DIR`.

The run directory exists already, and CUDA_VISIBLE_DEVICES lists this run's GPUs. Displays no progress; the pool does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlx.config.errors import ConfigError
from rlx.config.load import load_command
from rlx.launch.local import launch
from rlx.launch.supervisor import Limits
from rlx.paths import RunPaths
from rlx.runs.completed import has_done
from rlx.runs.lock import RunLock
from rlx.runs.rewind import has_begun, rewind
from rlx.runs.status import Status, new_attempt, read_status


def main(run_dir: str) -> int:
    paths = RunPaths(Path(run_dir))
    cfg = load_command(paths.root)
    lock = RunLock(paths)
    if not lock.exclusive():
        print(f"{paths.root} is in use by another run", file=sys.stderr)
        return 1
    # The directory may have waited in the pool for days without a lock, so its state may have changed.
    status = read_status(paths)
    if has_done(paths, status, cfg):
        return 0
    if has_begun(paths):
        try:
            rewind(paths)
        except ConfigError as error:
            status = status or Status(max_steps=cfg.total_steps)
            status.attempt = new_attempt(paths)
            log = paths.log(status.attempt, "launcher")
            log.write_text(f"{error}\n")
            status.fail(paths, "launcher", str(error), log)
            print(error, file=sys.stderr)
            return 1
    lock.share()
    return launch(paths, Limits.of(cfg), lock)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
