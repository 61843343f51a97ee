"""Samples of several environments with all streams, objectives for them, and the same total loss as plain loops over tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import naive_objectives as naive
import numpy as np
import torch
from naive_objectives import NaiveRollout
from torch import Tensor
from trainer_examples import make_samples

from rlx.config.schema import KlTerms, LossTerms
from rlx.losses.aipo import opd, sdft
from rlx.losses.base import Objective
from rlx.losses.dppo import dppo
from rlx.losses.grpo import grpo
from rlx.losses.gspo import gspo
from rlx.losses.mix import LossMix
from rlx.losses.sft import sft
from rlx.types import TrainingSample

MAX_LENGTH = 16
Place = tuple[int, int]  # index of a sample, position in it


@dataclass(frozen=True)
class Spec:
    """An objective for some environments, and its naive form."""

    function: Any
    loss_of: Callable[[NaiveRollout], list]
    kind: str
    terms: LossTerms
    penalty_of: Callable[[NaiveRollout], list] | None = None
    reference_teaches: bool = False


def terms(aggregate: str = "token_mean", beta: float = 0.0, **keys: Any) -> LossTerms:
    return LossTerms(aggregate=aggregate, kl=KlTerms(beta=beta), **keys)


GSPO = Spec(gspo, naive.gspo, "policy", terms("seq_mean", ce_coef=0.3))
GRPO = Spec(grpo, naive.grpo, "policy", terms("token_mean", beta=0.2, ce_coef=0.5))
GRPO_OF_GROUPS = Spec(grpo, naive.grpo, "policy", terms("group_token_mean"))
GRPO_FIXED = Spec(grpo, naive.grpo, "policy", terms("fixed_length", entropy_coef=0.01))
OPD = Spec(opd, naive.opd, "ref_kl", terms("token_mean", beta=0.1))
OPD_FROM_REFERENCE = Spec(opd, naive.opd, "ref_kl", terms("seq_mean"), reference_teaches=True)
SDFT = Spec(sdft, naive.opd, "ref_kl", terms("token_mean"))
SFT = Spec(sft, naive.sft, "ce", terms("token_mean", ce_coef=1.0))
DPPO = Spec(dppo, naive.dppo, "policy", terms("token_mean"))

MIXES: dict[str, dict[str, Spec]] = {  # objective of each environment; equal ones are one objective
    "echo: cross-entropy beside the policy loss": dict.fromkeys("abc", GRPO),
    "distillation alone": dict.fromkeys("abc", OPD),
    "cross-entropy alone": dict.fromkeys("abc", SFT),
    "three kinds": {"a": GSPO, "b": OPD, "c": SFT},
    "two policy losses and a distillation": {"a": GRPO, "b": GSPO, "c": OPD},
    "self-distillation beside two policy losses": {"a": GRPO, "b": GSPO, "c": SDFT},
    "self-distillation alone": dict.fromkeys("abc", SDFT),
    "self-distillation beside distillation from the reference": {"a": SDFT, "b": OPD_FROM_REFERENCE, "c": GRPO},
    "aggregates": {"a": GRPO_OF_GROUPS, "b": GRPO_FIXED, "c": DPPO},
}


def mix_of(specs: Mapping[str, Spec]) -> LossMix:
    distinct = _distinct(specs.values())
    labels = ["+".join(env for env, s in specs.items() if s is spec) for spec in distinct]
    objectives = [
        Objective(spec.function, spec.terms, max_length=MAX_LENGTH, label=label, reference_teaches=spec.reference_teaches)
        for spec, label in zip(distinct, labels, strict=True)
    ]
    return LossMix(objectives, {env: next(n for n, one in enumerate(distinct) if one is spec) for env, spec in specs.items()})


def _distinct(specs: Any) -> list[Spec]:
    found: list[Spec] = []
    for spec in specs:
        if not any(spec is other for other in found):
            found.append(spec)
    return found


def mixed_samples(mix: LossMix, groups: int = 6, seed: int = 0, envs: str = "abc") -> list[TrainingSample]:
    """Groups of the environments in turn, with those streams that the mix reads; some samples have none."""
    rng = np.random.default_rng(seed + 100)
    samples = []
    for number, sample in enumerate(make_samples(groups=groups, seed=seed)):
        n, mask = len(sample.token_ids), sample.loss_mask
        streams: dict[str, Any] = {
            "policy_weights": rng.choice([0.0, 0.5, 1.0], n),
            "ce_weights": np.where(np.arange(n) > 0, rng.choice([0.0, 0.0, 0.7, 1.0], n), 0),
            "ref_kl_weights": rng.choice([0.0, 1.0, 2.0], n),
        }
        chosen = {name: value.astype(np.float32) for name, value in streams.items() if name in mix.streams and number % 4}
        env = envs[sample.group % len(envs)]
        if "teacher_logprobs" in mix.objectives[mix.by_env.get(env, 0)].streams:
            chosen["teacher_logprobs"] = np.where(mask, -3 + rng.normal(size=n), np.nan).astype(np.float32)
        # one advantage a rollout, as outcomes give
        advantages = np.where(mask, np.float32(rng.normal()), np.float32(0)) if sample.member != 1 else np.where(mask, np.float32(0.4), 0)
        samples.append(replace(sample, env=env, advantages=advantages.astype(np.float32), **chosen))
    return samples


def taught(sample: TrainingSample) -> TrainingSample:
    """The sample as a teacher that plays gives it: no policy sampled its tokens, and cross-entropy reads them."""
    nothing = np.zeros_like(sample.advantages)
    return replace(
        sample,
        loss_mask=np.zeros_like(sample.loss_mask),
        inference_logprobs=nothing,
        advantages=nothing,
        temperature=np.ones_like(sample.temperature),
        versions=np.full_like(sample.versions, -1),
        policy_weights=None,
        ce_weights=sample.loss_mask.astype(np.float32),
    )


def naive_total(
    samples: Sequence[TrainingSample],
    specs: Mapping[str, Spec],
    logp: Mapping[Place, Tensor],
    old: Mapping[Place, float],
    ref: Mapping[Place, float],
    entropy: Mapping[Place, Tensor],
) -> Tensor:
    """The loss of a whole batch, token by token, each kind divided by its own count."""

    def weight(s: TrainingSample, stream: str, t: int, default: float) -> float:
        values = getattr(s, stream)
        return default if values is None else float(values[t])

    own_counts = {"policy": [0, set(), set()], "ce": [0, set(), set()], "ref_kl": [0, set(), set()]}
    kl_count: list[Any] = [0, set(), set()]
    in_group: dict[int, int] = {}
    num_ce = 0
    own: dict[tuple[int, int], list[Place]] = {}
    compared: dict[tuple[int, int], list[Place]] = {}
    for i, s in enumerate(samples):
        spec = specs[s.env]
        for t in range(len(s.token_ids)):
            if spec.terms.ce_coef and weight(s, "ce_weights", t, 0.0):
                num_ce += 1
            if not s.loss_mask[t]:
                continue
            if weight(s, "ref_kl_weights" if spec.kind == "ref_kl" else "policy_weights", t, 1.0):
                count = own_counts[spec.kind]
                count[0] += 1
                count[1].add((s.group, s.member))
                count[2].add(s.group)
                in_group[s.group] = in_group.get(s.group, 0) + 1
                own.setdefault((s.group, s.member), []).append((i, t))
            if spec.terms.kl.beta and weight(s, "ref_kl_weights", t, 1.0):
                kl_count[0] += 1
                kl_count[1].add((s.group, s.member))
                kl_count[2].add(s.group)
                compared.setdefault((s.group, s.member), []).append((i, t))

    def divided(spec: Spec, losses: list, group: int, count: list[Any]) -> Tensor:
        """One rollout's share: by loops again, from the definitions of the aggregates."""
        tokens, sequences, groups = count[0], len(count[1]), len(count[2])
        total = sum(losses)
        name = spec.terms.aggregate
        if name == "token_mean":
            return total / tokens
        if name == "seq_mean":
            return total / len(losses) / sequences
        if name == "fixed_length":
            return total / (sequences * MAX_LENGTH)
        assert name == "group_token_mean"
        return total / in_group[group] / groups

    total = torch.zeros((), dtype=torch.float64)
    for (group, _), places in own.items():
        s = samples[places[0][0]]
        spec = specs[s.env]
        teacher = [float(samples[i].teacher_logprobs[t]) if samples[i].teacher_logprobs is not None else ref[i, t] for i, t in places]
        rollout = NaiveRollout(
            logp=[logp[p] for p in places],
            old=[old[p] for p in places],
            inf=[float(samples[i].inference_logprobs[t]) for i, t in places],
            ref=teacher,
            adv=[float(samples[i].advantages[t]) for i, t in places],
            entropy=[entropy[p] for p in places],
        )
        stream = "ref_kl_weights" if spec.kind == "ref_kl" else "policy_weights"
        weights = [weight(samples[i], stream, t, 1.0) for i, t in places]
        losses = [w * x for w, x in zip(weights, spec.loss_of(rollout), strict=True)]
        losses = [x - spec.terms.entropy_coef * h for x, h in zip(losses, rollout.entropy, strict=True)]
        total = total + divided(spec, losses, group, own_counts[spec.kind])
    for (group, _), places in compared.items():
        spec = specs[samples[places[0][0]].env]
        kls = [spec.terms.kl.beta * weight(samples[i], "ref_kl_weights", t, 1.0) * naive.kl("k2", logp[i, t], ref[i, t]) for i, t in places]
        total = total + divided(spec, kls, group, kl_count)
    for i, s in enumerate(samples):
        for t in range(len(s.token_ids)):
            if (w := weight(s, "ce_weights", t, 0.0)) and specs[s.env].terms.ce_coef:
                total = total - specs[s.env].terms.ce_coef * w * logp[i, t] / num_ce
    return total
