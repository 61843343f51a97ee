"""What the plan of a shared trainer, and that of one of its runs, says and counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch_configs import config

from rlx.config.memory import trainer_memory
from rlx.plan.explain import explain
from rlx.plan.make import make_plan


def test_a_shared_trainer_has_states_for_the_adapter_of_every_run() -> None:
    one = trainer_memory(config("node8", lora={"rank": 32}))
    four = trainer_memory(config("node8", lora={"rank": 32}, trainer={"max_concurrent_runs": 4}))
    hosted = trainer_memory(config("node8", lora={"rank": 32}, trainer={"max_concurrent_runs": 1}))
    ranks = 8 / 4  # it starts no servers, so it has all GPUs
    assert hosted.gradients * ranks == pytest.approx(one.gradients)
    for part in ("gradients", "optimizer", "update", "published"):
        assert getattr(four, part) == pytest.approx(4 * getattr(hosted, part)), part
    assert four.parameters == pytest.approx(hosted.parameters + 3 * hosted.gradients), "the model is there once"


def test_a_shared_trainer_is_explained_without_the_batches_and_steps_that_only_runs_have() -> None:
    cfg = config("gpu1_shared", lora={"rank": 16}, trainer={"max_concurrent_runs": 3, "idle_timeout": 60})
    text = explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run")
    for words in (
        "at most 3 at a time, each with an adapter of rank 16",
        "rows       ",
        "after 60 s without a run",
        "of adapters of rank 16, one for each of 3 runs",
        "copy of the weights of each run",
    ):
        assert words.strip() in text, f"{words!r} is not in\n{text}"
    for words in ("staleness  ", "prompts  ", "rollouts in the run", "optimizer steps  ", "inference"):
        assert words not in text, f"{words!r} is in\n{text}"


def test_a_run_of_a_shared_trainer_is_explained_without_a_trainer_of_its_own() -> None:
    cfg = config("cpu", lora={"rank": 16}, trainer={"shared": "/outputs/host"})
    text = explain(cfg, make_plan(cfg, Path("/run")), {}, [], "/run")
    for words in (
        "256 = 32 prompts",
        "staleness",
        "rows of the shared trainer /outputs/host",
        "trainer: elsewhere (/outputs/host)",
    ):
        assert words in text, f"{words!r} is not in\n{text}"
    for words in ("trainer, each", "gradients"):
        assert words not in text, f"{words!r} is in\n{text}"
    on_gpu = config("gpu1_shared", lora={"rank": 16}, trainer={"shared": "/outputs/host"})
    assert "the trainer has the rest" not in explain(on_gpu, make_plan(on_gpu, Path("/run")), {}, [], "/run")
