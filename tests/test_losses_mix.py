"""Several kinds of loss in one step, alone and mixed: values and gradients against plain loops, over packings, and in the trainer."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from mixed_examples import GRPO, GRPO_OF_GROUPS, MIXES, OPD, SFT, mix_of, mixed_samples, naive_total, taught, terms
from trainer_examples import gradients, make_model, step_batch, train_minibatch

from rlx.config.load import compose
from rlx.data.packing import pack
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.losses.mix import LossMix
from rlx.losses.tokens import TokenBatch
from rlx.models.policy import PolicyModel
from rlx.train.build import losses_of
from rlx.train.reference import Reference
from rlx.train.step import PolicyTrainer
from rlx.types import MicroBatch, TrainingSample

pytestmark = pytest.mark.slow

OPD_ALONE = replace(OPD, terms=terms())  # without the KL term, so without a reference model
ALL = pytest.mark.parametrize("name", MIXES)


def with_own_ids(samples: list[TrainingSample]) -> list[TrainingSample]:
    """The samples with token ids that occur once in the batch, so that a label says which token it is."""
    starts = np.cumsum([0, *(len(sample.token_ids) for sample in samples)])
    return [replace(s, token_ids=np.arange(len(s.token_ids), dtype=np.int32) + starts[i]) for i, s in enumerate(samples)]


def tokens_of(m: MicroBatch, table: dict[str, torch.Tensor]) -> TokenBatch:
    """The tokens of a row. `table` has float64 numbers by token id."""
    scored = m.scored
    labels = torch.from_numpy(m.labels[scored]).long()

    def of_token(array: Any) -> torch.Tensor:
        return torch.from_numpy(array[scored].astype(np.float64))

    streams = {"policy_weights", "ce_weights", "ref_kl_weights", "teacher_logp"}
    given = {name: of_token(getattr(m, name)) for name in streams if getattr(m, name) is not None}
    return TokenBatch(
        logp=table["logp"][labels],
        old_logp=table["old"][labels],
        inference_logp=of_token(m.inference_logp),
        entropy=table["entropy"][labels],
        advantages=of_token(m.advantages),
        rollout_ids=torch.from_numpy(m.rollout_ids[scored]).long(),
        rollout_lengths=torch.from_numpy(np.bincount(m.rollout_ids[scored], minlength=len(m.rollout_lengths))),
        tokens_elsewhere=torch.from_numpy(m.tokens_elsewhere).long(),
        group_lengths=torch.from_numpy(m.group_lengths).long(),
        objectives=torch.from_numpy(m.objectives).long(),
        ref_logp=table["ref"][labels],
        sampled=torch.from_numpy(m.loss_mask[scored]),
        **given,
    )


def numbers(samples: list[TrainingSample]) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(5)
    inf = np.concatenate([s.inference_logprobs for s in samples]).astype(np.float64)
    n = len(inf)
    logp = torch.tensor(inf - 0.3 * np.abs(rng.normal(size=n)), requires_grad=True)
    entropy = torch.tensor(np.abs(rng.normal(size=n)), requires_grad=True)
    return {"logp": logp, "old": torch.tensor(inf), "entropy": entropy, "ref": torch.tensor(inf - 0.2 * rng.normal(size=n))}


@ALL
@pytest.mark.parametrize("rows", [10_000, 40])
def test_loss_and_gradient_equal_plain_loops_whatever_the_rows(name: str, rows: int):
    specs, mix = MIXES[name], mix_of(MIXES[name])
    samples = with_own_ids(mixed_samples(mix))
    table = numbers(samples)
    (mini_batch,) = pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=rows, loss_of=mix.loss_of).mini_batches
    assert len(mini_batch.micro_batches) >= (1 if rows == 10_000 else 3)
    totals = [mix(tokens_of(row, table), mini_batch.counts)[0] for row in mini_batch.micro_batches]
    found = torch.stack(totals).sum()
    places = {(i, t): int(token) for i, s in enumerate(samples) for t, token in enumerate(s.token_ids)}
    wanted = naive_total(
        samples,
        specs,
        {p: table["logp"][n] for p, n in places.items()},
        {p: float(table["old"][n]) for p, n in places.items()},
        {p: float(table["ref"][n]) for p, n in places.items()},
        {p: table["entropy"][n] for p, n in places.items()},
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    inputs = (table["logp"], table["entropy"])
    ours, theirs = (torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True) for total in (found, wanted))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)
    assert float(ours[0].norm()) > 0


@ALL
def test_the_trainers_gradient_is_that_of_plain_loops_on_a_hugging_face_forward(name: str):
    specs, mix = MIXES[name], mix_of(MIXES[name])
    samples = mixed_samples(mix)
    hf, other = make_model(), make_model(seed=1)
    plain, plain_other = copy.deepcopy(hf).double(), copy.deepcopy(other).double()  # before the trainer changes their attention
    trainer = PolicyTrainer(PolicyModel(hf), mix, torch.optim.SGD(hf.parameters(), lr=0.1), reference=Reference(PolicyModel(other)))
    (mini_batch,) = pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=80, loss_of=mix.loss_of).mini_batches
    trainer.accumulate_gradients(mini_batch, step=2)
    found = gradients(trainer)
    logp, entropy, ref = {}, {}, {}
    for i, s in enumerate(samples):
        for model, into in ((plain, logp), (plain_other, ref)):
            logits = model(torch.from_numpy(s.token_ids).long()[None]).logits[0, :-1] / torch.from_numpy(s.temperature[1:, None]).double()
            scores = torch.log_softmax(logits, -1)
            for t in range(1, len(s.token_ids)):
                value = scores[t - 1, s.token_ids[t]]
                into[i, t] = value if model is plain else float(value.detach())
                if model is plain:
                    entropy[i, t] = -(scores[t - 1].exp() * scores[t - 1]).sum()
    old = {(i, t): float(s.inference_logprobs[t]) for i, s in enumerate(samples) for t in range(len(s.token_ids))}
    naive_total(samples, specs, logp, old, ref, entropy).backward()
    wanted = {f"hf.{parameter}": p.grad for parameter, p in plain.named_parameters()}
    scale = max(float(g.abs().max()) for g in wanted.values())
    for parameter, gradient in found.items():
        torch.testing.assert_close(gradient.double(), wanted[parameter], rtol=2e-3, atol=2e-5 * scale, msg=parameter)


def test_environments_with_equal_objectives_are_trained_like_one():
    """Own counts are by kind, so two objectives of one kind divide by the tokens of both."""
    twice = LossMix([Objective(grpo, GRPO.terms, label="a"), Objective(grpo, GRPO.terms, label="b+c")], {"a": 0, "b": 1, "c": 1})
    results = []
    for mix in (mix_of(dict.fromkeys("abc", GRPO)), twice):
        samples = mixed_samples(mix)
        hf = make_model()
        trainer = PolicyTrainer(
            PolicyModel(hf), mix, torch.optim.SGD(hf.parameters(), lr=0.1), reference=Reference(PolicyModel(make_model()))
        )
        (mini_batch,) = pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=80, loss_of=mix.loss_of).mini_batches
        trainer.accumulate_gradients(mini_batch, step=2)
        results.append((gradients(trainer), train_minibatch(trainer, mini_batch, step=2)))
    (one, metrics), (two, others) = results
    for name, gradient in one.items():
        torch.testing.assert_close(two[name], gradient, rtol=1e-4, atol=1e-7)
    assert others.pop("loss/a/total") + others.pop("loss/b+c/total") == pytest.approx(others["loss/total"])
    for name, value in metrics.items():
        assert name.startswith("time/") or others[name] == pytest.approx(value, rel=1e-5, abs=1e-8), name


def test_a_token_that_the_teacher_did_not_score_is_refused_not_trained():
    mix = mix_of(MIXES["distillation alone"])
    samples = mixed_samples(mix)
    holes = [replace(s, teacher_logprobs=np.full(len(s.token_ids), np.nan, np.float32)) if s.group == 1 else s for s in samples]
    (mini_batch,) = pack(step_batch(0, [with_own_ids(holes)]), rank=0, ranks=1, tokens=10_000, loss_of=mix.loss_of).mini_batches
    with pytest.raises(ValueError, match=r"the teacher did not score \d+ of \d+ tokens of opd"):
        mix(tokens_of(mini_batch.micro_batches[0], numbers(holes)), mini_batch.counts)


@pytest.mark.parametrize("left", ["no sample of the distilled environment", "no sample"])
def test_a_mini_batch_without_a_token_to_distil_trains_the_others(left: str):
    mix = mix_of({"a": GRPO_OF_GROUPS, "b": OPD_ALONE})
    samples = mixed_samples(mix, envs="ab")
    others = [replace(s, teacher_logprobs=None, ref_kl_weights=None) for s in samples if s.env == "a"] if left != "no sample" else []
    hf = make_model()
    trainer = PolicyTrainer(PolicyModel(hf), mix, torch.optim.SGD(hf.parameters(), lr=0.1))
    for mini_batches in ([samples, others], [others, samples], [others]):
        metrics = trainer.train_batch(pack(step_batch(2, mini_batches), rank=0, ranks=1, tokens=80, loss_of=mix.loss_of))
        assert np.isfinite(metrics["loss/total"])
        assert (metrics["teacher/kl"] == 0) == (mini_batches == [others])


def test_the_perplexity_of_a_teachers_tokens_is_that_of_a_mean():
    mix = mix_of(dict.fromkeys("abc", SFT))
    samples = [taught(s) for s in mixed_samples(mix)]
    hf = make_model()
    trainer = PolicyTrainer(PolicyModel(hf), mix, torch.optim.SGD(hf.parameters(), lr=0.1))
    metrics = trainer.train_batch(pack(step_batch(0, [samples]), rank=0, ranks=1, tokens=80, loss_of=mix.loss_of))
    assert metrics["loss/nll"] == pytest.approx(metrics["ce/nll"], rel=1e-5)
    assert metrics["loss/perplexity"] == pytest.approx(np.exp(metrics["ce/nll"]), rel=1e-4)


@pytest.mark.parametrize("endpoint", [False, True])
def test_distillation_reads_the_reference_where_no_endpoint_teaches(endpoint: bool) -> None:
    """Another environment's samples may bring numbers of self-distillation, which are not its own."""
    teacher = ["teacher.base_url=[http://127.0.0.1:1/v1]", "teacher.model=m", "teacher.api_key=k"] if endpoint else ["ref.name=a/teacher"]
    keys = ["env=[sums,reverse_text]", "envs.sums.loss=sdft", "teacher.demonstration=answer", "envs.reverse_text.loss=opd"]
    mix = losses_of(compose([*keys, *teacher, "inference.max_model_len=200"], {}).cfg)
    reads = {env: "teacher_logprobs" in mix.objectives[number].streams for env, number in mix.by_env.items()}
    assert reads == {"sums": True, "reverse_text": endpoint}
