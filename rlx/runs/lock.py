"""The lock of a run directory, which says that processes of a run live there.

On a file system without locks (`rlx.lock`), only the run's SLURM job and its status show processes of other hosts.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from rlx.lock import sees_other_hosts, try_lock
from rlx.paths import RunPaths

SWEEP = ".sweep.lock"  # the lock of a sweep, in its directory, in which each run has a directory of its own


class RunLock:
    """A lock on a run directory. It is held while this object, or a process that inherited its file descriptor, is alive."""

    def __init__(self, paths: RunPaths | Path) -> None:
        """`paths`: the run's paths, or the path of another lock file."""
        self.path = paths if isinstance(paths, Path) else paths.lock
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)

    @property
    def sees_other_hosts(self) -> bool:
        return sees_other_hosts(self.fd, self.path)

    def exclusive(self) -> bool:
        """Try to take the lock exclusively. If another process holds it, returns False, and this process holds no lock at all."""
        return try_lock(self.fd, self.path)

    def take(self, timeout: float) -> bool:
        """Take the lock exclusively; wait at most `timeout` seconds. Returns whether this succeeded."""
        return self._wait(timeout, shared=False)

    def share(self, timeout: float = 5.0) -> bool:
        """Take the lock shared; wait at most `timeout` seconds for a process that creates the directory."""
        return self._wait(timeout, shared=True)

    def _wait(self, timeout: float, *, shared: bool) -> bool:
        deadline = time.monotonic() + timeout
        while not (taken := try_lock(self.fd, self.path, shared=shared)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return taken

    def close(self) -> None:
        os.close(self.fd)
