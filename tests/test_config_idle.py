"""Keys that do not apply in a kind of run: the tables of `rlx.config.checks.idle` against what each key changes, and their messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlx.config.checks.idle import OF_A_TEACHERS_TOKENS, OF_ROWS
from rlx.config.checks.shared import OF_A_RUN, OF_A_SHARED_TRAINER
from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.roots import SFT, TRAIN
from rlx.config.schema import LossTerms, split_terms
from rlx.config.tree import leaves
from rlx.losses.base import Objective
from rlx.losses.mix import LossMix
from rlx.losses.sft import sft
from rlx.losses.tokens import TokenBatch
from rlx.types import Count, LossCounts

MOVED: dict[str, Any] = {  # key of `loss` -> another value than in `BASE`
    "aggregate": "token_mean",
    "max_length": 17,
    "proximal": "recompute",
    "correction": "tis",
    "correction_cap": 1.5,
    "dual_clip": 1.5,
    "kl.beta": 0.4,
    "kl.estimator": "k1",
    "kl.target_kl": 1e-3,
    "kl.gain": 0.9,
    "entropy_coef": 0.3,
    "ce_coef": 0.5,
    "mask_overlong": True,  # acts where samples are made, before a loss
}
BASE: dict[str, Any] = {"aggregate": "fixed_length", "max_length": 9, "kl": {"beta": 0.1, "target_kl": 50.0}}


def tokens(taught: bool) -> tuple[TokenBatch, LossCounts]:
    """Eight tokens of two sequences: rows of a data set, or what a teacher played."""
    made = torch.Generator().manual_seed(3)
    logp, entropy = (torch.rand(8, generator=made, dtype=torch.float64).requires_grad_() for _ in range(2))
    nobody = torch.zeros(8, dtype=torch.bool)
    batch = TokenBatch(
        logp=logp,
        old_logp=logp.detach(),
        inference_logp=torch.zeros(8, dtype=torch.float64),
        entropy=entropy,
        advantages=(~nobody).double(),
        rollout_ids=torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]),
        rollout_lengths=torch.tensor([0, 0] if taught else [3, 5]),
        ref_logp=torch.rand(8, generator=made, dtype=torch.float64),
        sampled=nobody if taught else None,
        ce_weights=torch.ones(8, dtype=torch.float64) if taught else None,
    )
    count = Count(tokens=0 if taught else 8, sequences=0 if taught else 2, groups=0 if taught else 2)
    return batch, LossCounts(all=count, own={}, kl=count, ce_tokens=8 if taught else 0)


def outcome(taught: bool, node: dict[str, Any]) -> list[torch.Tensor]:
    """Losses and gradients of two steps with the objective `sft`; a controller may move between them."""
    mix = LossMix([Objective(sft, split_terms(node, LossTerms)[0])])
    found = []
    for _ in range(2):
        batch, counts = tokens(taught)
        loss, stats = mix(batch, counts)
        gradients = torch.autograd.grad(loss, (batch.logp, batch.entropy), allow_unused=True, materialize_grads=True)
        found += [loss.detach(), *gradients]
        mix.after_update({"ref/kl": float(stats.sums["ref/kl"])})
    return found


@pytest.mark.parametrize("taught", [False, True])
def test_the_keys_that_are_refused_are_those_that_change_neither_loss_nor_gradient(taught: bool):
    base = BASE | ({"ce_coef": 0.7} if taught else {})
    before = outcome(taught, base)
    without_effect = set()
    for key in leaves(LossTerms):
        section, _, name = key.rpartition(".")
        moved = base | {section: base[section] | {name: MOVED[key]}} if section else base | {key: MOVED[key]}
        if all(torch.equal(a, b) for a, b in zip(before, outcome(taught, moved), strict=True)):
            without_effect.add(key)
    refused = set(OF_A_TEACHERS_TOKENS) if taught else {key.removeprefix("loss.") for key in OF_ROWS if key.startswith("loss.")}
    # A teacher's cut answers are left out with `mask_overlong`; rows have nothing that could be cut.
    assert without_effect == (refused | {"mask_overlong"} if taught else refused)


def test_the_keys_of_the_trainer_that_rows_refuse_are_those_that_are_not_of_its_processes():
    applies = {"batch_timeout"}  # how long other ranks wait for the batch that rank 0 makes
    assert {key.removeprefix("trainer.") for key in OF_ROWS if key.startswith("trainer.")} == {*OF_A_RUN, *OF_A_SHARED_TRAINER} - applies


@pytest.mark.parametrize(
    ("key", "value"),
    [("loss.ce_coef", "0.5"), ("loss.mask_overlong", "true"), ("trainer.num_iterations", "2"), ("trainer.shared", "outputs/other")],
)
def test_a_key_that_does_not_apply_to_rows_is_named_with_the_reason_and_the_remedy(key: str, value: str):
    with pytest.raises(ConfigError) as caught:
        compose(["data=fake", f"{key}={value}"], {}, SFT)
    (text,) = caught.value.problems
    assert text.startswith(f"{key}={value} (command line) does not apply in `rlx sft`: {OF_ROWS[key][0]}.\nLeave it out, or set {key}=")


TAUGHT = [
    *("env=[sums,reverse_text]", "envs.sums.played_by=teacher", "teacher.base_url=[http://host:8000]", "teacher.model=big"),
    *("envs.sums.loss=sft", "envs.sums.loss.ce_coef=1"),
]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["envs.sums.loss.kl.beta=0.1"], "envs.sums.loss.kl.beta=0.1 (command line) does not apply where the teacher plays (envs.sums)"),
        (["envs.sums.loss.aggregate=seq_mean"], "Leave it out, or set envs.sums.loss.aggregate=token_mean."),
        (["envs.sums.advantage=group_norm"], "so group_norm would be computed for nothing.\nSet envs.sums.advantage=none."),
        (["env=sums", "ref.name=other"], "does not apply where the teacher plays all environments"),
    ],
)
def test_a_key_that_does_not_apply_to_a_teachers_tokens_is_refused(keys: list[str], said: str):
    with pytest.raises(ConfigError, match="does not apply") as caught:
        compose([*TAUGHT, *keys], {}, TRAIN)
    assert any(said in problem for problem in caught.value.problems)


@pytest.mark.parametrize(
    "keys",
    [
        ["loss.kl.beta=0.1", "loss.entropy_coef=0.01", "envs.sums.loss.mask_overlong=true"],  # the policy plays reverse_text
        ["envs.sums.advantage=group_norm", "orchestrator.difficulty_filter.zero_advantage=true"],  # the filter reads it
    ],
)
def test_keys_that_something_reads_are_taken_beside_a_teacher(keys: list[str]):
    compose([*TAUGHT, *keys], {}, TRAIN)
