"""Small models and batches for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3 import Qwen3Config

from rlx.config.schema import LossTerms
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.models.policy import PolicyModel
from rlx.train.step import PolicyTrainer
from rlx.types import MiniBatch, RankBatch, StepBatch, TrainingSample

VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,
}  # fmt: skip


def make_model(config_class: type = Qwen3Config, seed: int = 0, **keys: Any) -> Any:
    """A random float32 model of a few thousand parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hf = AutoModelForCausalLM.from_config(config_class(**{**SIZES, **keys}), dtype=torch.float32).eval()
        for name, weight in hf.named_parameters():
            if name.endswith("mlp.gate.weight") and not weight.any():  # Ernie's router in transformers 5.19: all experts would tie
                torch.nn.init.normal_(weight)
        return hf


def make_sample(
    group: int, member: int, ids: Sequence[int], trainable: Sequence[int], rng: np.random.Generator, **keys: Any
) -> TrainingSample:
    """A sample of these tokens, trainable at these positions, with random advantages, log-probabilities and versions."""
    mask = np.zeros(len(ids), dtype=bool)
    mask[list(trainable)] = True
    return TrainingSample(
        group=group,
        member=member,
        env="test",
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, -3 + rng.normal(size=len(ids)), 0).astype(np.float32),
        advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
        temperature=np.where(mask, np.float32(keys.get("temperature", 1.0)), np.float32(1)),
        versions=np.where(mask, rng.integers(0, 3, len(ids)), -1).astype(np.int32),
    )


def make_samples(groups: int = 4, members: int = 3, seed: int = 0, longest: int = 12) -> list[TrainingSample]:
    """Groups with a common prompt each; some rollouts have two samples, some samples have two trainable stretches, temperatures differ."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        prompt = rng.integers(3, VOCABULARY, rng.integers(4, 9)).tolist()
        for member in range(members):
            ids = prompt + rng.integers(3, VOCABULARY, rng.integers(1, longest)).tolist()
            trainable = list(range(len(prompt), len(ids)))
            if len(trainable) > 4:
                del trainable[2]  # the environment said this one
            samples.append(make_sample(group, member, ids, trainable, rng, temperature=[1.0, 0.7][group % 2]))
            if member == 1:
                more = rng.integers(3, VOCABULARY, 6).tolist()
                samples.append(make_sample(group, member, more, [3, 4, 5], rng))
    return samples


def step_batch(step: int, mini_batches: Sequence[Sequence[TrainingSample]]) -> StepBatch:
    return StepBatch(step=step, mini_batches=tuple(map(tuple, mini_batches)))


def make_trainer(hf: Any, function: Any = grpo, aggregate: str = "token_mean", **keys: Any) -> PolicyTrainer:
    """A trainer whose optimizer step is plain descent, so that the parameters show the gradient."""
    model = PolicyModel(hf, attention=keys.pop("attention", "auto"))
    shared = {f.name for f in fields(LossTerms)}
    terms = LossTerms(aggregate=aggregate, **{name: keys.pop(name) for name in list(keys) if name in shared})
    return PolicyTrainer(model, Objective(function, terms, max_length=16), torch.optim.SGD(model.parameters(), lr=0.1), **keys)


@dataclass(frozen=True)
class Samples:
    """Examples whose samples are ready, one each, in the place of `rlx.data.supervised.Conversations`."""

    name: str
    ready: Sequence[TrainingSample]

    def __len__(self) -> int:
        return len(self.ready)

    def samples(self, index: int, counts: Any) -> list[TrainingSample]:
        return [self.ready[index]]


def train_minibatch(trainer: PolicyTrainer, mini_batch: MiniBatch, step: int | None = None) -> dict[str, float]:
    """One optimizer step. `step` is the version that it trains; None: supervised data."""
    batch = RankBatch(step=step or 0, mini_batches=(mini_batch,), num_tokens=0, sampled=step is not None)
    return trainer.train_batch(batch)


def gradients(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """By parameter name; clears them."""
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.optimizer.zero_grad()
    return found
