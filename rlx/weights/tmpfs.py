"""A folder in memory for the versions that only the servers need, such as a folder in `/dev/shm` (`weight_broadcast.folder`).

    run.dir/weights/.memory   →  /dev/shm/rlx-mine-3f9a2c1b            `make`, when the trainer starts
    run.dir/weights/step_12      a version that lasts, on the disk
    run.dir/weights/step_13   →  /dev/shm/rlx-mine-3f9a2c1b/step_13    `fresh`; its name in the run directory is a link

Readers find every version in the run directory. A link whose target is gone, as after a reboot, is not a version. The folder's name depends
on the run directory's path, so a copy of that directory never deletes what belongs to the original.
Servers may still read a version when the trainer has ended. So whoever ends the run's processes calls `clear`, as does the next attempt.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import xxhash

from rlx.config.memory import size

RECORD = ".memory"  # next to the versions: a link to the run's folder in memory


def make(weights: Path, folder: Path, need: float) -> Path:
    """Make the run's own folder in `folder`, which only its owner can enter. `weights`: the folder of the run's versions.

    Call `clear` first: an attempt that was killed may have left one. Raises OSError, also if there is no room for `need` bytes.
    """
    if shutil.disk_usage(folder).free < need:
        raise OSError(errno.ENOSPC, f"the versions of weight_broadcast.folder take {size(need)}", str(folder))
    weights.mkdir(parents=True, exist_ok=True)
    own = folder / _name(weights)
    if own.is_dir():  # an attempt on another host came in between, and removed the link
        shutil.rmtree(own)
    (weights / RECORD).symlink_to(own)  # first, so that no kill leaves a folder without a link to it
    own.mkdir(mode=0o700)
    return own


def place(weights: Path) -> Path:
    """The run's folder in memory. Raises OSError before `make`."""
    return (weights / RECORD).readlink()


def fresh(weights: Path, name: str) -> Path:
    """Make an empty folder in memory for the version of this name. It replaces an older one."""
    folder = place(weights) / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def real(folder: Path) -> Path:
    """Where a version is: its folder in memory, or the given one."""
    try:
        return folder.readlink()
    except OSError:  # not a link; perhaps the version was written to the disk at this moment
        return folder


def delete(folder: Path) -> None:
    """Delete a version's folder, if there is one; of a link also its target in memory. Any other target is where a user has moved it."""
    if folder.is_symlink():
        target, own = folder.readlink(), folder.parent / RECORD
        if own.is_symlink() and target.parent == own.readlink():
            shutil.rmtree(target, ignore_errors=True)
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def clear(weights: Path) -> None:
    """Delete what a run has in memory, and the links to it; nothing if it has no folder there. Raises OSError.

    No process of the run may need a version in memory any more.
    """
    record = weights / RECORD
    if not record.is_symlink():  # a copy of a run directory that followed the links has a folder
        shutil.rmtree(record, ignore_errors=True)
        return
    own = record.readlink()
    for link in weights.iterdir():
        if link.is_symlink() and link.readlink().parent == own:
            link.unlink()
    if own.is_dir() and own.name == _name(weights):
        shutil.rmtree(own)
    record.unlink()  # last, so that a kill leaves it to the next call


def _name(weights: Path) -> str:
    return f"rlx-{weights.parent.name}-{xxhash.xxh32_hexdigest(str(weights.resolve()).encode())}"
