"""The end of a role that plays environments: its exit code, and the last line of its log."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlx.policy.base import PolicyError
from rlx.rollout.role import end


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], int]:
    """Ends a role, but for the process. Returns the exit code."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    monkeypatch.setattr(sys, "argv", ["role", "--run-dir", "/the/run"])

    def run(main: Callable[[], int]) -> int:
        with pytest.raises(SystemExit) as caught:
            end(main, "synthesizer", plain=(PolicyError,))
        return int(caught.value.code or 0)

    return run


def raising(error: Exception) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


def test_a_role_ends_with_the_exit_code_of_its_main(ended, capsys):
    assert ended(lambda: 75) == 75
    assert capsys.readouterr().err == ""


def test_an_error_is_logged_with_its_traceback_and_the_last_line_says_it(ended, capsys, caplog):
    assert ended(raising(ValueError("the rows are empty"))) == 1
    assert capsys.readouterr().err == "ValueError: the rows are empty\n"
    assert [(record.name, record.exc_info is not None) for record in caplog.records] == [("rlx.synthesizer", True)]


def test_an_error_whose_message_says_it_all_has_no_traceback(ended, capsys, caplog):
    assert ended(raising(PolicyError("the endpoint refuses the key"))) == 1
    assert capsys.readouterr().err == "the endpoint refuses the key\n"
    assert caplog.records == []


def test_a_full_disk_is_one_line_that_names_the_file(ended, capsys, tmp_path: Path):
    file = tmp_path / "finished.jsonl"
    assert ended(raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file)))) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert str(file) in said
    assert said.count("\n") == 1
