"""The order of evaluations beside supervised training, without an engine or an environment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlx.checkpoints.folders import Start, begin, write_start
from rlx.config.schema import SftRoot
from rlx.heartbeat import Heartbeat
from rlx.paths import COMPLETE, RunPaths
from rlx.roles import evaluator
from rlx.roles.evaluator import Beside


class Noted:
    """Stands in for the evaluations, all of whose versions are due."""

    def __init__(self, *_: Any, oldest: int, **__: Any) -> None:
        self.oldest = oldest
        self.now: int | None = None
        self.recorded: list[int] = []

    def begin(self, version: int) -> None:
        self.now = version

    async def leave(self, stop: int | None = None) -> None:
        assert stop is None, "nothing of supervised training waits for an evaluation"
        if self.now is not None:
            self.recorded.append(self.now)
        self.now = None

    def next_stop(self, version: int, newest: int) -> int:
        return version + 1


def beside_of(root: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> Beside:
    monkeypatch.setattr(evaluator, "Evaluations", Noted)
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
    asyncio.run(role._work())
    assert seen == [[0], [0, 1]]
    assert role.evaluations.recorded == [0, 1, 2]  # type: ignore[attr-defined]


def test_the_weights_of_a_checkpoint_that_is_still_being_written_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role = beside_of(tmp_path, monkeypatch)
    assert role.config.versions_kept == 1
    role.updates.version = 2  # the last
    for version in (1, 2):
        role.paths.weights_of(version).mkdir(parents=True)
        (role.paths.weights_of(version) / COMPLETE).write_text('{"files": {}}')
    begin(role.paths, 1)
    asyncio.run(role._work())
    assert role.updates.published.on_disk(1)


@pytest.mark.parametrize(("resume", "oldest"), [(None, 0), ("latest", 0), ("3", 0), ("/runs/a/checkpoints/step_4", 4)])
def test_a_fork_does_not_look_for_evaluations_of_versions_that_the_other_run_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str | None, oldest: int
) -> None:
    paths = RunPaths(tmp_path)
    paths.root.mkdir(exist_ok=True)
    write_start(paths, Start(step=6, checkpoint=paths.checkpoint_of(6)))  # the fork's own, or the other run's that it has adopted
    assert beside_of(tmp_path, monkeypatch, resume=resume).evaluations.oldest == oldest  # type: ignore[attr-defined]
