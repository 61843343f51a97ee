"""What the trainer writes when its run is preempted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlx.paths import RunPaths
from rlx.roles.trainer import Trainer


@pytest.mark.parametrize(
    ("bench", "step", "saved"), [(False, 3, [3]), (False, 1, []), (True, 3, [])], ids=["run", "no_step_done", "benchmark"]
)
def test_a_preempted_trainer_writes_a_checkpoint_unless_it_is_a_benchmark(tmp_path: Path, bench: bool, step: int, saved: list[int]) -> None:
    written: list[int] = []
    on_disk: list[int] = []
    trainer: Any = SimpleNamespace(
        cfg=SimpleNamespace(bench=bench),
        first_step=1,
        mesh=SimpleNamespace(first=True),
        paths=RunPaths(tmp_path),
        step_trainer=SimpleNamespace(give_up=lambda: None),
        broadcast=SimpleNamespace(leave_on_disk=on_disk.append),
        save=lambda step, phase: written.append(step),
        finish=lambda phase: None,
    )
    Trainer.give_way(trainer, step)
    assert written == saved
    assert on_disk == saved, "the version of a checkpoint must be on the disk"
    assert trainer.paths.preempted.is_file()
