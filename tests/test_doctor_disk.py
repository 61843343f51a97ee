"""What `rlx doctor` says that a run's disk must hold: the checkpoints and versions that are there at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlx.checkpoints import folders
from rlx.config.load import compose
from rlx.config.memory import trainer_memory
from rlx.config.roots import SFT
from rlx.config.schema import Config
from rlx.paths import RunPaths
from rlx.preflight.needs import PROCESS, most_checkpoints, needed_disk, needed_memory

MODEL = ("model=qwen3_8b", "hardware=node8", "env=math", "max_steps=100")


def config(*overrides: str) -> Config:
    return compose([*overrides, "dry_run=true"], {}).cfg


@pytest.mark.parametrize("keep_last", [None, 1, 2, 20])
@pytest.mark.parametrize(("interval", "keep_interval"), [(1, None), (10, None), (10, 15), (10, 50), (7, 14), (200, None)])
def test_as_many_checkpoints_are_counted_as_a_run_has_at_a_time(
    tmp_path: Path, keep_last: int | None, interval: int, keep_interval: int | None
) -> None:
    last, paths, most = 30, RunPaths(tmp_path), 0
    for step in range(1, last + 1):
        if step % interval == 0 or step == last:
            paths.checkpoint_of(step).mkdir(parents=True)
            (paths.checkpoint_of(step) / "COMPLETE").write_text("{}")
            most = max(most, len(folders.steps(paths)))
            folders.prune(paths, keep_last, keep_interval)
    none = "null"
    cfg = config(f"ckpt.interval={interval}", f"ckpt.keep_last={keep_last or none}", f"ckpt.keep_interval={keep_interval or none}")
    cfg.max_steps = last
    assert most_checkpoints(cfg) == most


def test_the_best_checkpoint_is_one_more_and_without_an_interval_there_is_one() -> None:
    evaluated = ("env=sums", "eval.interval=10", "ckpt.interval=10", "max_steps=100")
    assert most_checkpoints(config(*evaluated)) == 3
    assert most_checkpoints(config(*evaluated, "ckpt.keep_best=eval/sums/avg@1", "eval.rollouts_per_example=1")) == 4
    assert most_checkpoints(config(*evaluated, "ckpt.interval=null")) == 1


def test_the_disk_must_hold_the_versions_that_are_written_to_it() -> None:
    cfg = config(*MODEL, "ckpt.interval=50")
    need, version = needed_disk(cfg), int(trainer_memory(cfg).published)
    without = needed_disk(config(*MODEL, "ckpt.interval=50", "weight_broadcast.type=nccl"))
    assert (need - without) // version == 3, "max_async_level=1: three are kept, and one is written; without files the last one alone is"
    assert needed_disk(config(*MODEL, "ckpt.interval=50", "weight_broadcast.keep_last=7")) == need + 4 * version
    assert needed_disk(config(*MODEL, "ckpt.interval=null")) < need < needed_disk(config(*MODEL, "ckpt.interval=1"))
    many = needed_disk(config(*MODEL, "ckpt.interval=1", "ckpt.keep_last=null"))
    assert many > 100 * 7 * version, "weights in float32, two states of the optimizer and the version itself, a hundred times"


def test_supervised_training_needs_the_disk_for_its_checkpoints_too() -> None:
    def of(*overrides: str) -> int:
        given = (*MODEL[:2], "max_steps=100", "ckpt.interval=10", "data.name=x/y", "dry_run=true")
        return needed_disk(compose([*given, *overrides], {}, SFT).cfg)

    version = 2 * 8e9  # bytes of one, in 16 bits
    assert of() == pytest.approx(7 * version * 3, rel=0.1), "two that are kept and one that is written, with the optimizer's states"
    assert of("ckpt.keep_last=4") == pytest.approx(7 * version * 5, rel=0.1)
    assert of("ckpt.keep_last=null") == pytest.approx(7 * version * 10, rel=0.1)
    assert of("lora.rank=16") < version / 5, "adapters alone"
    evaluated = ("env=math", "eval.interval=50")
    assert of(*evaluated) > of(), "versions, until the servers have evaluated them"


def test_supervised_training_needs_memory_for_its_trainer_too() -> None:
    cfg = compose(["data.name=x/y", "hardware=cpu", "dry_run=true"], {}, SFT).cfg
    assert needed_memory(cfg) >= 3 * PROCESS
