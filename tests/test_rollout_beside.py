"""The order of evaluations beside supervised training, without an engine or an environment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlx.config.schema import SftRoot
from rlx.heartbeat import Heartbeat
from rlx.paths import RunPaths
from rlx.rollout import beside
from rlx.rollout.beside import Beside


class Noted:
    """Stands in for the evaluations, all of whose versions are due."""

    def __init__(self, *_: Any, oldest: int, **__: Any) -> None:
        self.oldest = oldest
        self.now: int | None = None
        self.recorded: list[int] = []

    def begin(self, version: int) -> None:
        self.now = version

    async def leave(self, delays: bool = True) -> None:
        assert not delays, "nothing of supervised training waits for an evaluation"
        if self.now is not None:
            self.recorded.append(self.now)
        self.now = None

    def next_stop(self, version: int, newest: int) -> int:
        return version + 1


def beside_of(root: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> Beside:
    monkeypatch.setattr(beside, "Evaluations", Noted)
    paths, nothing = RunPaths(root), None
    return Beside(SftRoot(max_steps=2, seq_len=8, **keys), paths, {}, nothing, nothing, Heartbeat(paths, "evaluator"))  # type: ignore[arg-type]


def test_a_record_is_written_as_soon_as_its_evaluation_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role = beside_of(tmp_path, monkeypatch)
    seen: list[list[int]] = []

    async def reach(version: int) -> None:  # the trainer takes long for it
        seen.append(list(role.evaluations.recorded))  # type: ignore[attr-defined]
        role.updates.version = version
        role.evaluations.begin(version)

    monkeypatch.setattr(role.updates, "reach", reach)
    monkeypatch.setattr(beside, "prune", lambda *_: None)
    asyncio.run(role._work())
    assert seen == [[0], [0, 1]]
    assert role.evaluations.recorded == [0, 1, 2]  # type: ignore[attr-defined]
