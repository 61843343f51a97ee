"""How the status describes a process that has ended."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rlx.heartbeat import Heartbeat
from rlx.paths import RunPaths
from rlx.runs.status import Cause, Status, describe_returncode, last_lines, read_status


def test_a_status_survives_its_file(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert read_status(paths) is None
    status = Status(step=3, max_steps=9, processes=[{"role": "trainer", "replica": 0, "host": "h", "pid": 7}])
    status.finish("failed", Cause(role="trainer", replica=0, returncode=-9, reason="killed", log="logs/x.log", last_lines=("a", "b")))
    status.write(paths)
    assert read_status(paths) == status
    assert status.exit_code == 1


def test_a_status_that_another_host_replaces_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, read, stale = RunPaths(tmp_path), Path.read_text, [errno.ESTALE, errno.ESTALE]
    Status(step=3).write(paths)

    def once_stale(path: Path, **keys: str) -> str:
        if stale:
            raise OSError(stale.pop(), "Stale file handle")
        return read(path, **keys)

    monkeypatch.setattr(Path, "read_text", once_stale)
    assert read_status(paths).step == 3
    stale.append(errno.EIO)
    with pytest.raises(OSError, match="Stale"):
        read_status(paths)


@pytest.mark.parametrize(
    ("returncode", "service", "words"),
    [
        (3, False, "exit code 3"),
        (0, True, "exited early with exit code 0; it must serve"),
        (-9, False, "SIGKILL"),
        (-11, False, "SIGSEGV"),
        (-15, False, "killed by SIGTERM"),
        (-60, False, "signal 60"),
    ],
)
def test_the_end_of_a_process_in_words(returncode: int, service: bool, words: str) -> None:
    assert words in describe_returncode(returncode, service)


def test_last_lines_of_a_log_are_what_a_person_saw_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log, 5) == ()
    log.write_bytes(b"one\n\n10%\r50%\r100%\r\ntwo \xff\nthree")
    assert last_lines(log, 3) == ("100%", "two \ufffd", "three")
    assert last_lines(log, 0) == ()


def test_a_heartbeat_that_cannot_be_written_is_no_end_of_the_role(tmp_path):
    paths = RunPaths(tmp_path)
    heartbeat = Heartbeat(paths, "trainer")
    heartbeat.beat("loading")
    heartbeat.path.unlink()
    paths.heartbeats.rmdir()
    paths.heartbeats.write_text("no folder any more")
    heartbeat.beat("training")
    assert heartbeat.phase == "training"
