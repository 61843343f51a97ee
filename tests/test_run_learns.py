"""The tiny model learns shipped environments of several turns and of tools after its warm start, and with adapters alone."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.parametrize("experiment", ["word_guess_tiny", "tool_math_tiny"])
def test_the_tiny_model_learns_problems_that_it_is_not_trained_on(start, experiment: str) -> None:
    env = experiment.removesuffix("_tiny")
    job = start("run", f"experiment={experiment}", "max_steps=60", "eval.interval=60", "eval.num_examples=64")
    assert job.wait() == 0, job.text()
    rewards = [r["reward/mean"] for r in job.metrics("orchestrator") if "reward/mean" in r]
    held_out = [r for r in job.metrics() if f"eval/{env}/avg@1" in r]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    assert held_out[-1][f"eval/{env}/avg@1_low"] > held_out[0][f"eval/{env}/avg@1_high"]


def test_adapters_alone_learn_the_default_run(start) -> None:
    job = start("run", "lora.rank=16")
    assert job.wait() == 0, job.text()
    rewards = [r["reward/mean"] for r in job.metrics("orchestrator") if "reward/mean" in r]
    assert len(rewards) == 100
    assert sum(rewards[-5:]) / 5 >= 0.9
