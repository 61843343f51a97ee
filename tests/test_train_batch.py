"""All optimizer steps of a batch: the log-probabilities that ratios compare with, and the reference model."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_templates import PLAIN, small_tokenizer
from objective_worker import EVERYTHING
from test_train_step import LOSSES
from tokenizers import Tokenizer
from trainer_examples import gradients, make_model, make_samples, make_trainer, step_batch
from transformers import PreTrainedTokenizerFast

from rlx.config.schema import KlTerms
from rlx.data.packing import pack
from rlx.losses.aipo import opd
from rlx.losses.grpo import grpo
from rlx.losses.rloo import rloo
from rlx.models.policy import PolicyModel
from rlx.train.reference import Reference, check_tokenizers
from rlx.train.step import score_before
from rlx.types import RankBatch

pytestmark = pytest.mark.slow


def make_batch(mini_batches: int = 2, tokens: int = 200, step: int = 2) -> RankBatch:
    samples = make_samples()
    parts = np.array_split(np.arange(len(samples)), mini_batches)
    return pack(step_batch(step, [[samples[i] for i in part] for part in parts]), rank=0, ranks=1, tokens=tokens)


def test_recomputed_ratios_are_against_the_start_of_the_step_and_leave_one_with_every_optimizer_step():
    compared, spread, told = [], [], []

    def spy(tokens):
        compared.append(tokens.old_logp)
        ratio = tokens.ratio().detach()
        spread.append(float(ratio.max() - ratio.min()))
        return grpo(tokens)

    trainer = make_trainer(make_model(), spy, proximal="recompute", correction="tis")
    batch = make_batch(mini_batches=2, tokens=1000)
    before = [trainer.score(mini.micro_batches[0])[0] for mini in batch.mini_batches]
    values = trainer.train_batch(batch, iterations=2, starts=lambda update, of: told.append((update, of)))
    assert told == [(i, 4) for i in range(4)]
    assert trainer.updates == 4
    assert all(torch.equal(old, before[i % 2]) for i, old in enumerate(compared))
    assert spread[0] == 0
    assert min(spread[1:]) > 1e-3
    assert values["policy/ratio_max"] - values["policy/ratio_min"] >= max(spread) - 1e-6


def test_one_optimizer_step_recomputes_for_nothing():
    trainer = make_trainer(make_model(), grpo, proximal="recompute")
    batch = make_batch(mini_batches=1)
    rows = [{0: row} for row in batch.mini_batches[0].micro_batches]
    assert score_before(rows, {0: trainer}, set()) == {}
    values = trainer.train_batch(batch)
    assert values["policy/ratio_min"] == values["policy/ratio_max"] == 1.0
    assert values["mismatch/abs_logp_diff_max"] > 0.1, "the engine's log-probabilities differ"


def test_rloo_weighs_rollouts_of_older_versions_only():
    samples = make_samples()
    for sample in samples:
        sample.versions[sample.loss_mask] = 2 if sample.group % 2 else 1
    (mini_batch,) = pack(step_batch(2, [samples]), rank=0, ranks=1, tokens=1000).mini_batches
    seen = []

    def spy(tokens):
        seen.append(tokens.on_policy.tolist())
        return rloo(tokens)

    trainer = make_trainer(make_model(), spy, "seq_sum")
    trainer.accumulate_gradients(mini_batch, step=2)
    trainer.accumulate_gradients(mini_batch, step=2, stale=True)
    assert sorted(seen[0]) == [False] * 6 + [True] * 6
    assert seen[1] == [False] * 12


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_is_zero_against_the_initial_policy_and_grows_as_the_policy_moves(estimator):
    hf = make_model()
    reference = Reference(PolicyModel(copy.deepcopy(hf)))
    trainer = make_trainer(hf, grpo, kl=KlTerms(beta=0.1, estimator=estimator), reference=reference)
    batch = make_batch(mini_batches=1)
    first = trainer.train_batch(batch)
    assert first["loss/kl"] == pytest.approx(0, abs=1e-9)
    assert first["ref/kl"] == pytest.approx(0, abs=1e-9)
    assert first["ref/beta"] == 0.1
    for _ in range(2):
        later = trainer.train_batch(batch)
    assert later["ref/kl"] > 1e-4
    assert later["loss/total"] == pytest.approx(later["loss/policy"] + later["loss/kl"], rel=1e-6)
    assert all(p.grad is None and not p.requires_grad for p in reference.model.parameters())


def test_a_heavy_kl_weight_keeps_the_policy_near_the_reference():
    moved = []
    for beta in (0.0, 20.0):
        hf = make_model()
        reference = Reference(PolicyModel(copy.deepcopy(hf)))
        trainer = make_trainer(hf, grpo, kl=KlTerms(beta=beta), reference=reference, max_norm=0.1)
        for _ in range(5):
            values = trainer.train_batch(make_batch(mini_batches=1))
        moved.append(values["ref/kl"])
    assert moved[1] < 0.5 * moved[0]


def test_the_controller_sees_every_optimizer_step():
    hf = make_model()
    kl = KlTerms(beta=0.1, target_kl=1e9)
    trainer = make_trainer(hf, grpo, kl=kl, reference=Reference(PolicyModel(copy.deepcopy(hf))))
    values = trainer.train_batch(make_batch(mini_batches=2), iterations=2)
    assert trainer.losses.state_dict()["beta"] == pytest.approx(0.1 * 0.98**4)
    assert values["ref/beta"] == pytest.approx(0.1 * (1 + 0.98 + 0.98**2 + 0.98**3) / 4)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_mini_batch_without_a_trainable_token_changes_nothing(order):
    """It changes no parameters (by the previous step's momentum), not β, and not the metrics of the mini-batch with tokens."""
    found = []
    for parts in ([make_samples()], [[make_samples(), []][i] for i in order]):
        hf = make_model()
        kl = KlTerms(beta=0.1, target_kl=1e9)
        trainer = make_trainer(hf, grpo, kl=kl, reference=Reference(PolicyModel(copy.deepcopy(hf))))
        trainer.optimizer = torch.optim.AdamW(trainer.parameters, lr=0.01)
        values = trainer.train_batch(pack(step_batch(2, parts), rank=0, ranks=1, tokens=1000))
        found.append((values, trainer.updates, trainer.losses.state_dict(), [p.detach().clone() for p in trainer.parameters]))
    for name, value in found[0][0].items():
        assert name.startswith("time/") or found[1][0][name] == value, name
    assert found[0][1:3] == found[1][1:3] == (1, {"beta": pytest.approx(0.1 * 0.98)})
    assert all(torch.equal(a, b) for a, b in zip(found[0][3], found[1][3], strict=True))
    nothing = trainer.train_batch(pack(step_batch(2, [[], []]), rank=0, ranks=1, tokens=1000))
    assert nothing.keys() == values.keys()
    assert all(np.isfinite(value) for value in nothing.values())
    assert (nothing["ref/beta"], trainer.updates) == (pytest.approx(0.098), 1)
    assert all(torch.equal(a, b) for a, b in zip(found[0][3], trainer.parameters, strict=True))


def test_the_reference_takes_up_the_policy_when_it_is_time():
    policy, frozen = PolicyModel(make_model(seed=1)), PolicyModel(make_model(seed=2))
    old = [p.clone() for p in frozen.parameters()]
    reference = Reference(frozen, sync_interval=3, alpha=0.25)
    assert [reference.after_step(step, policy) for step in range(2)] == [False, False]
    assert all(torch.equal(a, b) for a, b in zip(old, frozen.parameters(), strict=True))
    assert reference.after_step(2, policy)
    for own, before, new in zip(frozen.parameters(), old, policy.parameters(), strict=True):
        torch.testing.assert_close(own, 0.75 * before + 0.25 * new)


def test_a_teacher_whose_ids_are_other_tokens_is_refused_although_it_has_enough(tmp_path: Path):
    own = small_tokenizer(PLAIN)
    words = json.loads(own.backend_tokenizer.to_str())
    same, other = copy.deepcopy(words), copy.deepcopy(words)
    vocab = other["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    same["added_tokens"].append({**same["added_tokens"][0], "id": len(own), "content": "<|more|>"})
    own.save_pretrained(tmp_path / "policy")
    for name, made in (("same", same), ("other", other)):
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(made))).save_pretrained(tmp_path / name)
    check_tokenizers(str(tmp_path / "policy"), str(tmp_path / "same"))
    a, b = own.convert_tokens_to_ids(["a", "b"])
    said = rf"\S+other has another tokenizer than the policy \S+policy, .* 2 of {len(own)} tokens differ, and 'a' is {a} here and {b} there"
    with pytest.raises(ValueError, match=said):
        check_tokenizers(str(tmp_path / "policy"), str(tmp_path / "other"))
    with pytest.raises(ValueError, match=rf"1 of .* tokens differ, and '<\|more\|>' is {len(own)} here and no token there"):
        check_tokenizers(str(tmp_path / "same"), str(tmp_path / "policy"))
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="cannot be compared"):
        check_tokenizers(str(tmp_path / "policy"), str(tmp_path / "none"))


def test_a_teacher_of_a_smaller_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"\(ref\.name\) has 30 token ids, but the policy has 40; it must have all of them"):
        Reference(PolicyModel(make_model(vocab_size=30))).check_vocabulary(PolicyModel(make_model()))


def test_distillation_brings_the_policy_to_its_teacher():
    hf = make_model(seed=0)
    trainer = make_trainer(hf, opd, reference=Reference(PolicyModel(make_model(seed=0, initializer_range=0.25))))
    batch = make_batch(mini_batches=1, tokens=1000)
    # This batch is not on-policy. With the engine's log-probabilities set to the policy's, the weight is 1, so each token's
    # log-probability moves towards the teacher's.
    (micro_batch,) = pack(step_batch(2, [make_samples()]), rank=0, ranks=1, tokens=1000).mini_batches[0].micro_batches
    teacher, _ = trainer.score(micro_batch, trainer.reference.model)
    gaps = []
    for _ in range(10):
        own, _ = trainer.score(micro_batch)
        gaps.append(float((teacher - own).square().mean()))
        trainer.train_batch(batch)
    assert gaps[-1] < 0.85 * gaps[0]


@pytest.mark.parametrize("name", [*LOSSES, "opd"])
def test_packing_changes_no_gradient_with_everything_added(name):
    """With scores by reference and old policy, recomputed ratios other than 1, correction, dual clip, entropy and KL."""
    function, aggregate = (opd, "token_mean") if name == "opd" else LOSSES[name]
    found = []
    for tokens in (1000, 60):
        frozen = Reference(PolicyModel(make_model(seed=1)))
        trainer = make_trainer(make_model(), function, aggregate, reference=frozen, **EVERYTHING)
        (mini_batch,) = make_batch(mini_batches=1, tokens=tokens).mini_batches
        before = score_before([{0: row} for row in mini_batch.micro_batches], {0: trainer}, {0})
        with torch.no_grad():  # stands for an optimizer step
            for parameter, other in zip(trainer.model.parameters(), make_model(seed=2).parameters(), strict=True):
                parameter.lerp_(other, 0.1)
        stats = trainer.accumulate_gradients(mini_batch, step=2, before=before, stale=True)
        assert stats.maxima["policy/ratio_max"] > 1.1
        found.append((gradients(trainer), trainer._reduce(stats, mini_batch)))
    scale = max(float(g.abs().max()) for g in found[0][0].values())
    for parameter, gradient in found[0][0].items():
        torch.testing.assert_close(found[1][0][parameter], gradient, rtol=1e-4, atol=2e-6 * scale, msg=parameter)
    for metric, value in found[0][1].items():
        assert found[1][1][metric] == pytest.approx(value, rel=1e-4, abs=1e-6), metric
