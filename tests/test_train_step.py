"""The optimizer step: invariance of gradients, metrics, schedules, and the refusal of numbers that are not finite."""

from __future__ import annotations

import copy
import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from test_train_models import own_log_probabilities
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_examples import gradients, make_model, make_sample, make_samples, make_trainer, step_batch, train_minibatch

from rlx.config.schema import AcConfig, SchedulerConfig
from rlx.data.packing import pack
from rlx.losses.aipo import aipo, masked_is
from rlx.losses.cispo import cispo
from rlx.losses.dppo import dppo
from rlx.losses.grpo import grpo
from rlx.losses.gspo import gspo, gspo_token
from rlx.losses.opo import opo
from rlx.losses.reinforce import reinforce
from rlx.losses.rloo import rloo
from rlx.losses.sapo import sapo
from rlx.losses.sft import sft
from rlx.models.shard import PRODUCTS, checkpoint_activations
from rlx.parallel.mesh import Mesh
from rlx.train.optim import NotFiniteError, clip_gradients, learning_rate
from rlx.train.step import merge_metrics
from rlx.types import RankBatch

pytestmark = pytest.mark.slow

# name: (objective with bounds that some tokens of the examples cross, aggregate)
LOSSES = {
    "reinforce": (reinforce, "token_mean"),
    "grpo": (grpo, "seq_mean"),
    "dr_grpo": (grpo, "fixed_length"),
    "dapo": (partial(grpo, eps_high=0.28), "token_mean"),
    "gspo": (partial(gspo, eps_low=0.2, eps_high=0.2), "seq_mean"),
    "gspo_token": (partial(gspo_token, eps_low=0.2, eps_high=0.2), "seq_mean"),
    "rloo": (rloo, "seq_sum"),
    "opo": (opo, "token_mean"),
    "cispo": (cispo, "token_mean"),
    "aipo": (aipo, "token_mean"),
    "masked_is": (partial(masked_is, kl_tau=0.1), "token_mean"),
    "dppo": (partial(dppo, d_low=0.02, d_high=0.02), "token_mean"),
    "sapo": (sapo, "seq_mean"),
    "sft": (sft, "token_mean"),
    "dapo_as_in_the_paper": (partial(grpo, eps_high=0.28), "group_token_mean"),
}
WALL_CLOCK = ("time/", "perf/")


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_and_metrics_do_not_depend_on_packing(name):
    samples = make_samples(groups=5)
    results = []
    for tokens, order in ((10_000, 1), (140, 1), (60, 1), (60, -1)):
        trainer = make_trainer(make_model(), *LOSSES[name], entropy_coef=0.01)
        (mini_batch,) = pack(step_batch(0, [samples[::order]]), rank=0, ranks=1, tokens=tokens).mini_batches
        trainer.accumulate_gradients(mini_batch)
        found = gradients(trainer)
        results.append((found, train_minibatch(trainer, mini_batch, step=2), len(mini_batch.micro_batches)))
    assert [rows for _, _, rows in results[:2]] == [1, 2]
    assert results[2][2] >= 4
    scale = max(float(g.abs().max()) for g in results[0][0].values())
    for found, metrics, _ in results[1:]:
        for parameter, gradient in found.items():
            torch.testing.assert_close(gradient, results[0][0][parameter], rtol=1e-4, atol=2e-6 * scale, msg=parameter)
        for metric, value in metrics.items():
            if not metric.startswith(WALL_CLOCK):
                assert value == pytest.approx(results[0][1][metric], rel=1e-4, abs=1e-6), metric


def test_the_gradient_is_that_of_a_plain_hugging_face_forward():
    samples = make_samples()
    hf = make_model()
    plain = copy.deepcopy(hf)
    trainer = make_trainer(hf, reinforce)
    (mini_batch,) = pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=80).mini_batches
    trainer.accumulate_gradients(mini_batch)
    logp, _ = own_log_probabilities(plain, samples)
    advantages = torch.from_numpy(np.concatenate([s.advantages[s.loss_mask] for s in samples])).double()
    (-(advantages * logp).sum() / len(logp)).backward()
    for (name, ours), theirs in zip(hf.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_rank_without_work_contributes_zero_gradients():
    trainer = make_trainer(make_model())
    (mini_batch,) = pack(step_batch(0, [[]]), rank=0, ranks=1, tokens=10).mini_batches
    metrics = train_minibatch(trainer, mini_batch, step=0)
    trainer.accumulate_gradients(mini_batch)
    assert all(not p.grad.any() for p in trainer.parameters if p.grad is not None)
    assert all(np.isfinite(value) for value in metrics.values())
    assert metrics["optim/grad_norm"] == 0


def test_groups_without_any_advantage_cost_no_backward_and_change_nothing():
    samples = [
        sample if sample.group % 2 else dataclasses.replace(sample, advantages=np.zeros_like(sample.advantages))
        for sample in make_samples(groups=8)
    ]
    (together,) = pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=1000).mini_batches
    (apart,) = pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=60).mini_batches
    moving = [row for row in apart.micro_batches if row.advantages.any()]
    assert 1 < len(moving) < len(apart.micro_batches)
    assert apart.micro_batches[: len(moving)] == tuple(moving), "a row has groups of one kind, and the first has a gradient"
    trainer, backwards = make_trainer(make_model()), []
    trainer.model.layers[0].register_full_backward_hook(lambda *_: backwards.append(1))
    stats = [trainer.accumulate_gradients(together), None]
    wanted = gradients(trainer)
    backwards.clear()
    stats[1] = trainer.accumulate_gradients(apart)
    assert len(backwards) == len(moving)
    for name, gradient in gradients(trainer).items():
        torch.testing.assert_close(gradient, wanted[name])
    assert stats[0].sums.keys() == stats[1].sums.keys()
    for name, value in stats[0].sums.items():
        torch.testing.assert_close(stats[1].sums[name], value)


def test_on_policy_mismatch_is_nothing_but_rounding():
    samples = make_samples()
    hf = make_model()
    with torch.no_grad():
        logp, entropy = own_log_probabilities(hf, samples)
    at = 0
    exact = []
    for sample in samples:
        n = int(sample.loss_mask.sum())
        reported = np.zeros(len(sample.token_ids), dtype=np.float32)
        reported[sample.loss_mask] = logp[at : at + n]
        at += n
        exact.append(type(sample)(**{f: getattr(sample, f) for f in sample.__slots__} | {"inference_logprobs": reported}))
    metrics = train_minibatch(make_trainer(hf), pack(step_batch(0, [exact]), rank=0, ranks=1, tokens=100).mini_batches[0], step=3)
    assert metrics["mismatch/kl"] < 1e-9
    assert metrics["mismatch/abs_logp_diff_max"] < 1e-4
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["policy/ess"] == pytest.approx(1, abs=1e-6)
    assert metrics["policy/clip_frac_low"] == metrics["policy/clip_frac_high"] == 0
    assert metrics["policy/entropy"] == pytest.approx(float(entropy.mean()), rel=1e-5)


def test_lag_is_the_age_of_the_trained_tokens():
    samples = make_samples()
    versions = np.concatenate([s.versions[s.loss_mask] for s in samples])
    metrics = train_minibatch(
        make_trainer(make_model()), pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=100).mini_batches[0], step=4
    )
    assert metrics["off_policy/lag_mean"] == pytest.approx(4 - versions.mean())
    assert metrics["off_policy/lag_max"] == 4 - versions.min()


def test_samples_of_another_trainers_policy_are_not_taken_for_this_ones():
    """A replay with another objective: its version 2 is not the policy that sampled as version 2."""
    seen = []

    def spy(tokens):
        seen.append(tokens.on_policy.tolist())
        return rloo(tokens)

    trainer, samples = make_trainer(make_model(), spy, "seq_sum"), make_samples()
    for sample in samples:
        sample.versions[sample.loss_mask] = 2
    (mini_batch,) = pack(step_batch(2, [samples]), rank=0, ranks=1, tokens=1000).mini_batches
    for trainer.sampled_by_this_run in (True, False):
        trainer.accumulate_gradients(mini_batch, step=2)
    assert [any(marks) for marks in seen] == [True, False]


def test_training_raises_the_probability_of_what_was_good():
    rng = np.random.default_rng(0)
    good, bad = ([3, 4, 5, 6, *end] for end in ([7, 8, 9], [10, 11, 12]))
    samples = [make_sample(0, 0, good, [4, 5, 6], rng), make_sample(0, 1, bad, [4, 5, 6], rng)]
    samples = [type(s)(**{f: getattr(s, f) for f in s.__slots__} | {"advantages": np.where(s.loss_mask, a, 0).astype(np.float32)})
               for s, a in zip(samples, (1, -1), strict=True)]  # fmt: skip
    trainer = make_trainer(make_model(), reinforce)
    (mini_batch,) = pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=100).mini_batches
    before, _ = trainer.score(mini_batch.micro_batches[0])
    train_minibatch(trainer, mini_batch)
    after, _ = trainer.score(mini_batch.micro_batches[0])
    assert ((after - before)[:3].sum() > 0) & ((after - before)[3:].sum() < 0)


def test_gradients_are_clipped_to_the_norm_and_reported_before():
    (mini_batch,) = pack(step_batch(0, [make_samples()]), rank=0, ranks=1, tokens=1000).mini_batches
    moved = []
    for max_norm in (None, 1e-3):
        hf = make_model()
        before = [p.detach().clone() for p in hf.parameters()]
        metrics = train_minibatch(make_trainer(hf, max_norm=max_norm), mini_batch)
        change = torch.stack([(a - b).norm() for a, b in zip(before, hf.parameters(), strict=True)]).norm().item() / 0.1
        moved.append((change, metrics["optim/grad_norm"]))
    assert moved[0][0] == pytest.approx(moved[0][1], rel=1e-3)
    assert moved[1][1] == pytest.approx(moved[0][1], rel=1e-6)
    assert moved[1][0] == pytest.approx(1e-3, rel=1e-2)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in PRODUCTS
        return func(*args, **(kwargs or {}))


def test_activation_checkpointing_changes_no_gradient():
    (mini_batch,) = pack(step_batch(0, [make_samples()]), rank=0, ranks=1, tokens=1000).mini_batches
    found, products = [], {}
    for ac, offload in (
        (AcConfig(freq=0), False),
        (AcConfig(freq=1), False),
        (AcConfig(freq=2), False),
        (AcConfig(freq=1, mode="selective"), False),
        (AcConfig(freq=1), True),
        (AcConfig(freq=1, mode="selective"), True),
    ):
        trainer = make_trainer(make_model())
        checkpoint_activations(trainer.model, ac, offload=offload)
        with Products() as counted:
            trainer.accumulate_gradients(mini_batch)
        found.append(gradients(trainer))
        products[ac.freq, ac.mode] = counted.count
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert torch.equal(gradient, other[name]), name
    assert products[1, "selective"] == products[0, "full"] < products[2, "full"] < products[1, "full"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_before_anything_changes(value):
    samples = make_samples()
    samples[0].advantages[samples[0].loss_mask] = value
    hf = make_model()
    before = copy.deepcopy(hf.state_dict())
    with pytest.raises(NotFiniteError, match="optimizer step 0: the loss is"):
        train_minibatch(make_trainer(hf, reinforce), pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=1000).mini_batches[0])
    assert all(torch.equal(before[name], tensor) for name, tensor in hf.state_dict().items())


def test_a_gradient_that_is_not_finite_stops():
    samples = make_samples()
    for sample in samples:
        sample.advantages[sample.loss_mask] *= 1e36
    (mini_batch,) = pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=1000).mini_batches
    with pytest.raises(NotFiniteError, match="the gradient norm is inf"):
        train_minibatch(make_trainer(make_model(), reinforce, "seq_sum"), mini_batch)


def test_schedules():
    def rates(total: int, **keys) -> list[float]:
        return [round(learning_rate(i, 1.0, SchedulerConfig(**keys), total), 4) for i in range(total)]

    assert rates(6, type="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert rates(6, type="linear", warmup_steps=2, min_lr=0.2) == [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert rates(6, type="linear", decay_steps=2) == [1, 1, 1, 1, 0.5, 0]
    assert rates(4, type="cosine") == [0.8536, 0.5, 0.1464, 0]
    with pytest.raises(ValueError, match=r"scheduler\.type is `step`"):
        rates(1, type="step")


def test_metrics_of_several_mini_batches_are_merged_by_their_meaning():
    merged = merge_metrics([{"a_max": 1, "a_min": 1, "time/x": 2, "loss/total": 1}, {"a_max": 3, "a_min": 0, "time/x": 3, "loss/total": 2}])
    assert merged == {"a_max": 3, "a_min": 0, "time/x": 5, "loss/total": 1.5}


def test_what_the_objective_does_not_consume_is_refused_before_anything_changes():
    samples = make_samples()
    learned = np.arange(len(samples[3].token_ids)) > 0  # nothing predicts a first token
    samples[3] = dataclasses.replace(samples[3], ce_weights=learned.astype(np.float32))
    trainer = make_trainer(make_model(), reinforce)
    batch = pack(step_batch(0, [make_samples(), samples]), rank=0, ranks=1, tokens=1000)
    with pytest.raises(ValueError, match="the batch has the stream `ce_weights`, but this objective consumes policy_weights"):
        trainer.train_batch(batch)
    assert trainer.updates == 0, "also if only a later mini-batch has it"
    make_trainer(make_model(), reinforce, ce_coef=0.5).train_batch(batch)


def test_bounds_on_sequences_that_are_tighter_than_the_measured_mismatch_are_told_once():
    def told(function, versions: int, gap: float, own: bool = True, noise: float = math.inf, **terms) -> str | None:
        trainer = make_trainer(make_model(), function, "seq_mean", **terms)
        trainer.sampled_by_this_run, trainer.engine_noise = own, noise
        (mini_batch,) = pack(step_batch(2, [make_samples()]), rank=0, ranks=1, tokens=10_000).mini_batches
        (row,) = mini_batch.micro_batches
        logp, _ = trainer.score(row)
        reported = np.zeros(len(row.token_ids), dtype=np.float32)
        reported[row.loss_mask] = logp.numpy() + gap
        row = dataclasses.replace(row, inference_logp=reported, versions=np.where(row.loss_mask, versions, -1).astype(np.int32))
        trainer.train_batch(RankBatch(step=2, mini_batches=(dataclasses.replace(mini_batch, micro_batches=(row,)),) * 2, num_tokens=1))
        return trainer.warning

    text = told(gspo, 2, 0.003)
    assert told(gspo, 2, 0.003, own=False) is None, "a replay: it sampled with another policy"
    assert text is not None
    assert "differ by 0.003 nats" in text
    assert "allow 0.0003 (loss.eps_low=0.0003, loss.eps_high=0.0004). Set loss.proximal=recompute" in text
    assert told(partial(gspo_token, eps_low=1e-3), 2, 0.003) is not None
    assert told(gspo, 2, 1e-4) is None, "within the bounds; the second optimizer step's mismatch comes from learning"
    assert told(gspo, 1, 0.003) is None, "tokens of an older version: the mismatch is not rounding alone"
    assert told(gspo, 2, 0.003, proximal="recompute") is None
    assert told(partial(gspo, eps_low=0.1, eps_high=0.1), 2, 0.003) is None
    assert told(grpo, 2, 0.3) is None
    assert "differ by 0.3 nats in the mean, and rounding explains at most 0.01" in str(told(grpo, 2, 0.3, noise=0.01))
    assert told(grpo, 1, 0.3, noise=0.01) is None
    assert told(grpo, 2, 0.003, noise=0.01) is None


@pytest.mark.parametrize("what", ["tokens", "sequences", "groups"])
def test_a_batch_whose_counts_are_not_what_it_holds_is_refused(what: str) -> None:
    batch = pack(step_batch(0, [make_samples()]), rank=0, ranks=1, tokens=80)
    counts = batch.mini_batches[0].counts
    wrong = dataclasses.replace(counts, all=dataclasses.replace(counts.all, **{what: getattr(counts.all, what) + 1}))
    batch = dataclasses.replace(batch, mini_batches=(dataclasses.replace(batch.mini_batches[0], counts=wrong),))
    with pytest.raises(ValueError, match=rf"trainable {what} over all ranks .*; the packing counted wrongly"):
        make_trainer(make_model()).train_batch(batch)


def test_a_rank_clips_and_refuses_by_the_norm_of_rank_0():
    class Another(Mesh):
        def broadcast(self, tensor: torch.Tensor) -> None:
            tensor.fill_(norm)

    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    mesh, norm = Another(device=torch.device("cpu")), 10.0
    assert clip_gradients([parameter], 1.0, "step 1", mesh) == 10
    assert parameter.grad.tolist() == pytest.approx([0.3, 0.4], rel=1e-5)
    norm = float("inf")
    with pytest.raises(NotFiniteError, match="step 1: the gradient norm is inf"):
        clip_gradients([parameter], 1.0, "step 1", mesh)
