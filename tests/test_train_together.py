"""Several runs in one trainer: each adapter learns what it would learn alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from trainer_examples import make_model, make_samples, step_batch

from rlx.config.schema import KlTerms, LoraConfig, LossTerms, SchedulerConfig
from rlx.data.packing import pack, pack_together
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.losses.reinforce import reinforce
from rlx.models.layout import AdapterRouting, AdapterSpan
from rlx.models.lora import AdaptedLinear, add_adapters, draw_adapters
from rlx.models.policy import PolicyModel
from rlx.models.slots import Slot
from rlx.parallel.mesh import Mesh
from rlx.train.muon import groups_of
from rlx.train.reference import Reference
from rlx.train.step import PolicyTrainer, train
from rlx.types import StepBatch

pytestmark = pytest.mark.slow

TOKENS = 90
RUNS: list[dict[str, Any]] = [  # what runs may set of their own
    {"lora": LoraConfig(rank=4, alpha=12.0), "seed": 0, "groups": 5, "minis": 1, "iterations": 1},
    {
        "lora": LoraConfig(rank=4, alpha=3.0, rslora=True),
        "seed": 7,
        "groups": 2,
        "minis": 2,
        "iterations": 2,
        "objective": reinforce,
        "terms": LossTerms(aggregate="seq_mean", proximal="recompute", kl=KlTerms(beta=0.1), entropy_coef=0.01),
        "schedule": SchedulerConfig(type="linear", warmup_steps=2),
        "lr": 3e-2,
        "max_norm": 0.05,
    },
]


def trainer_of(model: PolicyModel | Slot, whole: PolicyModel, run: Mapping[str, Any]) -> PolicyTrainer:
    terms = run.get("terms", LossTerms(aggregate="token_mean"))
    return PolicyTrainer(
        model,
        Objective(run.get("objective", grpo), terms, max_length=16),
        torch.optim.AdamW(groups_of(model.layers, model), lr=run.get("lr", 1e-2)),
        schedule=run.get("schedule"),
        total_updates=40,
        max_norm=run.get("max_norm"),
        reference=Reference(whole, adapters=False) if terms.kl.beta else None,
    )


def batch_of(run: Mapping[str, Any], step: int) -> StepBatch:
    minis = [make_samples(groups=run["groups"], seed=100 * run["seed"] + 10 * step + number) for number in range(run["minis"])]
    if run.get("streams"):
        minis = [[replace(sample, policy_weights=sample.loss_mask.astype("float32")) for sample in mini] for mini in minis]
    return step_batch(step, minis)


def alone(run: Mapping[str, Any], steps: int) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    hf = make_model()
    add_adapters(hf, run["lora"])
    draw_adapters(hf, run["seed"])
    model = PolicyModel(hf, attention=run.get("attention", "auto"))
    trainer = trainer_of(model, model, run)
    metrics = []
    for step in range(steps):
        batch = pack(batch_of(run, step), rank=0, ranks=1, tokens=TOKENS)
        metrics.append(trainer.train_batch(batch, iterations=run["iterations"]))
    return {name: tensor.clone() for name, tensor in model.named_weights()}, metrics


class Host:
    """A model with slots, and the runs in them."""

    def __init__(self, count: int = 2, attention: str = "auto") -> None:
        hf = make_model()
        here = add_adapters(hf, LoraConfig(rank=4), slots=count)
        draw_adapters(hf, seed=99)
        self.model = PolicyModel(hf, attention=attention)
        self.model.slots = here
        self.trainers: dict[int, PolicyTrainer] = {}
        self.runs: dict[int, Mapping[str, Any]] = {}

    def join(self, slot: int, run: Mapping[str, Any]) -> None:
        view = Slot(self.model, slot)
        view.begin(run["lora"], run["seed"])
        self.runs[slot], self.trainers[slot] = run, trainer_of(view, self.model, run)

    def train(self, steps: Mapping[int, int]) -> dict[int, Any]:
        """One common step: of each run the batch of its own step."""
        losses = {slot: self.trainers[slot].losses.loss_of for slot in steps}
        batches = {slot: batch_of(self.runs[slot], step) for slot, step in steps.items()}
        packed = pack_together(batches, rank=0, ranks=1, tokens=TOKENS, loss_of=losses)
        return train(packed, self.trainers, {slot: self.runs[slot]["iterations"] for slot in steps})

    def weights(self, slot: int) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.trainers[slot].model.named_weights()}


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("attention", ["auto", "rows"])
def test_runs_trained_together_are_each_as_if_alone_although_one_joins_later_and_one_leaves(attention: str):
    runs = [run | {"attention": attention} for run in RUNS]
    host = Host(attention=attention)
    host.join(1, runs[0])
    host.train({1: 0})
    host.join(0, runs[1])  # in the slot before
    metrics = [host.train({0: step, 1: step + 1}) for step in range(3)]
    left = host.weights(1)
    del host.trainers[1]
    host.train({0: 3})
    host.join(1, runs[0])  # a slot is as new for the next run
    last = host.train({0: 4, 1: 0})
    expected, records = alone(runs[0], 4)
    same(left, expected)
    same(host.weights(1), alone(runs[0], 1)[0])
    same(host.weights(0), alone(runs[1], 5)[0])
    assert last[0]["optim/lr"] < metrics[2][0]["optim/lr"]  # a schedule of its own
    for step, found in enumerate(metrics):
        assert {name for name in found[1] if not name.startswith("time/")} == {n for n in records[step + 1] if not n.startswith("time/")}
        for name, value in records[step + 1].items():
            assert name.startswith("time/") or found[1][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def test_equal_prompts_of_two_runs_are_computed_by_each_adapter():
    run = RUNS[0] | {"minis": 1}
    other = run | {"lora": LoraConfig(rank=4, alpha=40.0)}  # the same seed: the same samples
    host = Host()
    host.join(0, run)
    host.join(1, other)
    for step in range(3):
        host.train({0: step, 1: step})
    same(host.weights(0), alone(run, 3)[0])
    same(host.weights(1), alone(other, 3)[0])


def test_a_run_whose_loss_is_not_finite_or_fails_does_not_disturb_the_other():
    def broken(tokens: Any, **_: Any) -> Any:
        raise KeyError("no such column")

    def detached(tokens: Any, **_: Any) -> Any:
        found = grpo(tokens)
        return replace(found, loss=found.loss.detach())

    reasons = {"is inf|is nan": {"lora": LoraConfig(rank=4, alpha=float("inf"))}}
    reasons |= {"no such column": {"objective": broken}, "something in it is detached": {"objective": detached}}
    for reason, keys in reasons.items():
        bad = RUNS[0] | keys
        host = Host()
        host.join(0, bad)
        host.join(1, RUNS[1])
        before = host.weights(0)
        found = host.train({0: 0, 1: 0})
        assert isinstance(found[0], Exception)
        assert re.search(reason, str(found[0]))
        assert all(torch.equal(tensor, before[name]) for name, tensor in host.weights(0).items())
        same(host.weights(1), alone(RUNS[1], 1)[0])


def test_a_run_that_failed_is_left_out_of_its_other_steps_also_if_no_other_run_has_any():
    def broken(tokens: Any, **_: Any) -> Any:
        raise KeyError("no such column")

    host = Host()
    host.join(0, RUNS[0])
    host.join(1, RUNS[1] | {"objective": broken})  # two mini-batches, twice
    before = host.weights(1)
    assert isinstance(host.train({0: 0, 1: 0})[1], KeyError)
    assert all(torch.equal(tensor, before[name]) for name, tensor in host.weights(1).items())
    same(host.weights(0), alone(RUNS[0], 1)[0])


def test_a_loss_that_fails_on_another_rank_leaves_the_run_as_it_was_on_this_one(monkeypatch: pytest.MonkeyPatch):
    host = Host()
    host.join(0, RUNS[0])
    before = host.weights(0)
    monkeypatch.setattr(Mesh, "any", lambda self, flag: True)
    assert "failed on another rank, whose log says why" in str(host.train({0: 0})[0])
    assert all(torch.equal(tensor, before[name]) for name, tensor in host.weights(0).items())


def test_a_stream_of_one_run_is_not_one_of_the_other():
    runs = [RUNS[0] | {"streams": True}, RUNS[1]]
    host = Host()
    for slot, run in enumerate(runs):
        host.join(slot, run)
    for step in range(2):
        host.train({0: step, 1: step})
    for slot, run in enumerate(runs):
        same(host.weights(slot), alone(run, 2)[0])


def test_a_layer_that_gets_some_of_the_tokens_only_is_named():
    here = AdapterRouting()
    layer = AdaptedLinear(torch.nn.Linear(4, 4), LoraConfig(rank=2), torch.float32, 1, here)
    here.stretches = (AdapterSpan(0, 0, 6),)
    with pytest.raises(ValueError, match=r"got 5 of 6 tokens .*lora.target_modules"):
        layer(torch.zeros(5, 4))
