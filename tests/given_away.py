"""A file of another user, as it looks to this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def give_away(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file belong to somebody else. Only root can; anybody else becomes another user in their own eyes."""
    if os.geteuid() == 0:
        os.chown(file, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
