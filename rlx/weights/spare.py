"""Large files of deleted versions, kept to be overwritten by the next version.

Overwriting a file takes less than half the time of writing a new one, because its pages are in memory already; on a virtual machine whose
host must first find memory, a tenth. The disk's largest use stays the same: the version that is being written, or the spare files.
A file is overwritten only on a local file system that this module knows, and only if no process of this host has it open or mapped. Clients
of an NFS server on this host are not seen; they compare what they have read with the version's manifest, which they have read before.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path

from rlx.config.mounts import file_system
from rlx.weights import tmpfs

LOCAL = frozenset({"ext4", "xfs", "tmpfs"})  # where the kernel of this host knows of everybody who has a file open
SPARE = ".step_spare"  # beside the versions; hidden, so that no reader takes it for one, and a resumed run deletes it


def keep(doomed: Path, names: Iterable[str]) -> None:
    """Delete the folder, but keep the files of these names for `take`, instead of older ones. It may be a link to a folder in memory."""
    spare, names = doomed.resolve().with_name(SPARE), list(names)
    if names and file_system(spare.parent) in LOCAL:
        shutil.rmtree(spare, ignore_errors=True)
        spare.mkdir()
        for name in names:
            (doomed / name).rename(spare / name)
    tmpfs.delete(doomed)


def take(path: Path) -> None:
    """Move the spare file of this name to the new `path`, with whatever it holds, if there is one; delete it if somebody reads it."""
    spare = path.parent.resolve().with_name(SPARE) / path.name
    if spare.is_file():
        if _unused(spare):
            spare.rename(path)
        else:
            spare.unlink()  # a process that has it open keeps it; beside the new file it would be one copy too many


def delete(versions: Path) -> None:
    """Delete what is left, also in memory. `versions`: the folder of the versions."""
    for folder in (versions, versions / tmpfs.RECORD):
        shutil.rmtree(folder / SPARE, ignore_errors=True)


def _unused(path: Path) -> bool:
    """Whether no process has the file open or mapped, and it has no second name. Its kernel grants a lease only then."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:  # it is write-protected
        return False
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # if somebody opens it just now: the default, SIGIO, would end this process
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return os.fstat(file).st_nlink == 1
    except OSError:
        return False
    finally:
        os.close(file)
