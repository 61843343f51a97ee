"""A folder in memory for the versions that only the servers need, such as a folder in `/dev/shm` (`weight_broadcast.folder`).

    run.dir/weights/.memory   →  /dev/shm/rlx-mine-3f9a2c1b            `make`, when the trainer starts
    run.dir/weights/step_12      a version that lasts, on the disk
    run.dir/weights/step_13   →  /dev/shm/rlx-mine-3f9a2c1b/step_13    `fresh`; its name in the run directory is a link

Readers find every version in the run directory. A link that leads nowhere, as after a reboot, is no version. The folder names the run
directory (`run`), so a copy of that directory never deletes what belongs to the original.
Servers may still read a version when the trainer has ended. So whoever ends the run's processes calls `clear`, as does the next attempt.
"""

from __future__ import annotations

import contextlib
import glob
import secrets
import shutil
from pathlib import Path

from rlx.config.memory import size
from rlx.config.mounts import IN_MEMORY, file_system

RECORD = ".memory"  # beside the versions: a link to the run's folder in memory
BACK = "run"  # in that folder: a file with the path of the versions; not a link, which would lead whoever copies the run in a circle


class NoRoom(ValueError):
    """Versions cannot be kept in the configured folder. The message says why and what to do."""


def check(folder: Path, need: float) -> None:
    """Raise NoRoom unless the folder exists, is in memory and has `need` bytes of room."""
    said, other = f"weight_broadcast.folder={folder}", "or set weight_broadcast.folder=null"
    if not folder.is_dir():
        raise NoRoom(f"{said} does not exist on the trainer's host. Name a folder in memory such as /dev/shm, {other}")
    if (kind := file_system(folder)) not in IN_MEMORY:
        raise NoRoom(f"{said} is not in memory: its file system is {kind}. Name a folder such as /dev/shm, {other}")
    if (free := shutil.disk_usage(folder).free) < need:
        raise NoRoom(
            f"{said} has {size(free)} of room, and the versions that are kept there take {size(need)}. Free some of it, make it larger "
            f"(mount -o remount,size=…; docker run --shm-size=…), lower weight_broadcast.keep_last or max_async_level, {other}"
        )


def make(weights: Path, folder: Path) -> Path:
    """Make the run's own folder in `folder`, which only its owner can enter. `weights`: the folder of the run's versions.

    Call `clear` before, for an attempt that was killed may have left one. One that it left on this host before an attempt on another host
    is deleted here. Raises OSError.
    """
    weights.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"rlx-{glob.escape(weights.parent.name)}-*"):
        with contextlib.suppress(PermissionError):  # another user's
            if (left / BACK).is_file() and _belongs(left, weights):
                shutil.rmtree(left)
    own = folder / f"rlx-{weights.parent.name}-{secrets.token_hex(4)}"
    (weights / RECORD).symlink_to(own)  # first, so that no kill leaves a folder that nobody knows of
    own.mkdir(mode=0o700)
    (own / BACK).write_text(str(weights.resolve()))
    return own


def place(weights: Path) -> Path:
    """The run's folder in memory. Raises OSError before `make`."""
    return (weights / RECORD).readlink()


def fresh(weights: Path, name: str) -> Path:
    """An empty folder in memory for the version of this name. Replaces an older one."""
    folder = place(weights) / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def real(folder: Path) -> Path:
    """Where a version is: its folder in memory, or the given one."""
    try:
        return folder.readlink()
    except OSError:  # no link; perhaps the version has gone to the disk at this moment
        return folder


def lost(folder: Path) -> str:
    """Why a version is not there, if it was in memory; else an empty text."""
    try:
        if not folder.is_symlink() or folder.is_dir():
            return ""
    except PermissionError:
        return f"{folder.name} is in the memory of a run of another user ({folder.readlink()}), who alone can read it"
    return (
        f"{folder.name} was in memory alone ({folder.readlink()}), which is gone or of another host; versions of checkpoints, those "
        "that are evaluated and the last one are on the disk (weight_broadcast.folder)"
    )


def delete(folder: Path) -> None:
    """Delete a version's folder; of a link, what it leads to as well. Raises OSError."""
    if folder.is_symlink():
        shutil.rmtree(folder.readlink(), ignore_errors=True)
        folder.unlink()
    else:
        shutil.rmtree(folder)


def clear(weights: Path) -> None:
    """Delete what a run has in memory, and the links to it. Nothing if it has none there. Raises OSError.

    No process of the run may need a version in memory any more.
    """
    record = weights / RECORD
    if record.is_dir() and not record.is_symlink():  # of a copied run directory, whose copy followed the links
        shutil.rmtree(record)
    if not record.is_symlink():
        return
    own = record.readlink()
    for link in weights.iterdir():
        if link.is_symlink() and link.readlink().parent == own:
            link.unlink()
    if own.is_dir() and _belongs(own, weights):
        shutil.rmtree(own)
    record.unlink()  # last, so that a kill leaves it to the next one


def _belongs(own: Path, weights: Path) -> bool:
    """Whether a folder in memory is that of this run: it names the run's versions, or is still empty."""
    try:
        return Path((own / BACK).read_text()).samefile(weights)
    except FileNotFoundError:  # no such file, or the run that it names is gone
        return not any(own.iterdir())
