"""A run of `rlx train` on environments that this project did not write: what is recorded and trained is exactly what was sampled."""

from __future__ import annotations

import os

import pytest
import torch
from public_environments import V1, folder
from public_installed import installed
from recorded import check_recorded, normalised

from rlx.config.schema import WarmStartConfig
from rlx.models import tiny

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
CLASSIC = "classic-2026-01"
NAMES = ("games", "words", "sums")
STEPS, CONTEXT = 2, 2048


def test_public_environments_of_both_kinds_are_trained_as_they_were_sampled(start, tmp_path):
    torch.manual_seed(0)  # the model is not trained: what it says is noise, and that is recorded and trained like any other text
    tiny.save(
        tiny.build_model(WarmStartConfig(hidden_size=32, num_hidden_layers=2), CONTEXT), tiny.build_tokenizer(CONTEXT), tmp_path / "model"
    )
    packages = [folder(V1) / "kuhn_poker", folder(V1) / "glossary", folder(CLASSIC) / "reasoning_gym_env"]
    job = start(
        "run",
        *("env=[]", "+envs.games.id=kuhn_poker", "+envs.words.id=glossary", "+envs.sums.id=reasoning_gym_env"),
        *("+envs.sums.args.gym=chain_sum", "+envs.sums.args.num_train_examples=16", "+envs.sums.args.num_eval_examples=4"),
        *(
            "max_async_level=0",
            f"max_steps={STEPS}",
            "orchestrator.batch_size=12",
            "orchestrator.rollouts_per_example=4",
            "orchestrator.max_retries=20",
        ),
        *("model=tiny_trained", f"model.name={tmp_path}/model", f"seq_len={CONTEXT}", f"model.context_length={CONTEXT}"),
        *("sampling.max_tokens=64", "ckpt.interval=null"),
        env={"PYTHONPATH": os.pathsep.join(map(str, map(installed, packages)))},
    )
    assert job.wait() == 0, job.text()
    for record in job.metrics("trainer"):
        assert record["mismatch/kl"] <= 1e-6
        assert record["mismatch/abs_logp_diff_max"] <= 1e-3
    assert {rollout["env"] for step in range(STEPS) for rollout in job.rollouts(step)} == set(NAMES)
    tokens, groups = check_recorded(job.run_dir, STEPS, normalised)
    assert tokens > 0
    assert groups > 0
