"""Locks of files, which say that a process lives: of a run's directory, a sweep's, a model folder, an end of a shared trainer.

Lustre mounted without `flock` and NFS without its lock daemon have no locks. A lock on this host keeps its processes apart; processes of
other hosts are not seen: only a run's SLURM job and its status show them. The kernel releases a lock when the last process that has the
file open ends.

The file on this host is in $TMPDIR, or else in /tmp. So processes that see different ones are not kept apart either, though on one host:
jobs that have a $TMPDIR or a /tmp of their own, and a job and the shell that it was submitted from.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import os
import stat
import tempfile
import time
from pathlib import Path

log = logging.getLogger(__name__)

DAEMON_RESTART_SECONDS = 3.0  # seconds: a lock daemon that starts again also answers that there are no locks
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system without locks answers


class FileLock:
    """The lock of a file. It is held while this object, or a process that inherited its file descriptor, is alive."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o644)

    @property
    def sees_other_hosts(self) -> bool:
        """Whether it keeps processes of other hosts apart; False once it was taken where the file system has no locks."""
        return os.path.samestat(os.fstat(self.fd), os.stat(self.path))

    def exclusive(self) -> bool:
        """Try to take the lock exclusively. If another process holds it, returns False, and this process holds no lock at all."""
        return self._try(fcntl.LOCK_EX)

    def take(self, timeout: float) -> bool:
        """Take the lock exclusively; wait at most `timeout` seconds. Returns whether this succeeded."""
        return self._wait(timeout, fcntl.LOCK_EX)

    def share(self, timeout: float = 5.0) -> bool:
        """Take the lock shared; wait at most `timeout` seconds for a process that creates the directory."""
        return self._wait(timeout, fcntl.LOCK_SH)

    def close(self) -> None:
        os.close(self.fd)

    def _wait(self, timeout: float, how: int) -> bool:
        deadline = time.monotonic() + timeout
        while not (taken := self._try(how)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return taken

    def _try(self, how: int) -> bool:
        """Take the lock. Without locks there, `fd` becomes a file on this host: its number stays, because others may have been told it."""
        try:
            _insist(self.fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            _warn(self.path, error.strerror)
            local = _on_this_host(self.path)
            os.dup2(local, self.fd, inheritable=os.get_inheritable(self.fd))
            os.close(local)
            return self._try(how)
        return True


def _insist(fd: int, how: int) -> None:
    """`flock`, again for a few seconds where a lock daemon does not answer. Raises what the file system answers at last."""
    deadline = time.monotonic() + DAEMON_RESTART_SECONDS
    while True:
        try:
            return fcntl.flock(fd, how)
        except OSError as error:
            if error.errno != errno.ENOLCK or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


@functools.cache  # once for each path
def _warn(path: Path, why: str | None) -> None:
    log.warning("%s cannot be locked (%s): processes of other hosts are not kept from it", path, why)


def _on_this_host(path: Path) -> int:
    """A descriptor of the file that stands for a lock file of a file system without locks."""
    folder = Path(tempfile.gettempdir()) / f"rlx-locks-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():  # anybody may make a name in the temporary folder
        raise PermissionError(
            f"{folder} is to hold this user's locks, but it is user {found.st_uid}'s, or no folder; remove it, or set TMPDIR"
        )
    name = hashlib.blake2b(str(path.parent.resolve() / path.name).encode(), digest_size=16).hexdigest()
    return os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
