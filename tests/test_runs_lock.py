"""The lock of a run directory on a file system that has none."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch_configs import config

from rlx.config.errors import ConfigError
from rlx.config.schema import RunConfig
from rlx.lock import FileLock
from rlx.paths import RunPaths
from rlx.plan.make import make_plan
from rlx.runs.run_dir import create
from rlx.runs.status import Status

FLOCK = fcntl.flock


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on which `flock` answers what Lustre answers without its option for it."""
    folder, local = tmp_path / "shared", tmp_path / "tmp"
    folder.mkdir()
    local.mkdir()

    def flock(fd: int, mode: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{folder}/"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        FLOCK(fd, mode)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(tempfile, "tempdir", str(local))
    return folder


def test_without_locks_on_the_file_system_processes_of_one_host_still_keep_apart(shared: Path) -> None:
    (shared / "other").mkdir()
    one, two, other = FileLock(RunPaths(shared).lock), FileLock(RunPaths(shared).lock), FileLock(RunPaths(shared / "other").lock)
    assert one.share(timeout=0)
    assert two.share(timeout=0), "shared by both"
    assert not two.exclusive()
    assert other.exclusive(), "another run's lock"
    inherited = os.dup(one.fd)  # as a child has it
    one.close()
    assert not two.exclusive(), "held as long as a process has its descriptor"
    os.close(inherited)
    assert two.exclusive()
    for lock in (two, other):
        lock.close()


@pytest.mark.parametrize("changes", [{"resume": "latest"}, {"clean": True}], ids=["resume", "clean"])
def test_without_locks_the_status_of_a_run_on_another_host_keeps_others_out(shared: Path, changes: dict[str, Any]) -> None:
    def make(**changes: Any) -> None:
        cfg = replace(config("cpu"), run=RunConfig(name="run", dir=str(shared / "run")), **changes)
        create(cfg, [], make_plan(cfg, shared / "run"))[1].close()

    make()
    paths = RunPaths(shared / "run")
    status = Status(state="running", supervisor={"host": "elsewhere", "pid": 7})
    status.write(paths)
    with pytest.raises(ConfigError, match=r"a run is alive there: its status changes"):
        make(**changes)
    record = json.loads(paths.status.read_text())
    paths.status.write_text(json.dumps(record | {"updated": record["updated"] - 3600}))
    make(**changes)


def test_another_error_of_the_file_system_is_not_taken_for_a_missing_lock(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fd: int, mode: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(OSError, match="Input/output error"):
        FileLock(RunPaths(shared).lock).exclusive()


def test_a_lock_daemon_that_is_away_for_a_moment_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [errno.ENOLCK, errno.ENOLCK]

    def flock(fd: int, mode: int) -> None:
        if answers:
            raise OSError(answers.pop(), "No locks available")
        FLOCK(fd, mode)

    monkeypatch.setattr(fcntl, "flock", flock)
    one, two = FileLock(RunPaths(tmp_path).lock), FileLock(RunPaths(tmp_path).lock)
    assert one.exclusive()
    assert os.readlink(f"/proc/self/fd/{one.fd}").startswith(str(tmp_path)), "the file itself is locked"
    assert not two.exclusive()
    for lock in (one, two):
        lock.close()


def test_a_file_that_cannot_be_locked_is_named_once(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        lock = FileLock(RunPaths(shared).lock)
        assert lock.exclusive()
        lock.close()
    (record,) = [record for record in caplog.records if "cannot be locked" in record.getMessage()]
    assert str(shared) in record.getMessage()


def test_a_folder_for_locks_that_is_not_ones_own_is_refused(shared: Path) -> None:
    (shared.parent / "elsewhere").mkdir()
    (Path(tempfile.gettempdir()) / f"rlx-locks-{os.getuid()}").symlink_to(shared.parent / "elsewhere")
    with pytest.raises(PermissionError, match="is to hold this user's locks"):
        FileLock(RunPaths(shared).lock).exclusive()
