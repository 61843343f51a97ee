"""Supervised training of the tiny model on demonstrations, with the trainer's own packing, forward, objective and optimizer step.

It runs in one process, in float32. If the demonstrations come from a teacher that errs with probability p, the model answers correctly
with a probability below 1 - p. Reinforcement learning can improve on that start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from rlx.config.schema import LossTerms, SchedulerConfig, WarmStartConfig
from rlx.data.packing import pack
from rlx.data.supervised import Samples, SupervisedSource
from rlx.losses.base import Objective
from rlx.losses.sft import sft
from rlx.models.policy import PolicyModel
from rlx.models.tiny import build_model
from rlx.train.step import PolicyTrainer
from rlx.types import TrainingSample

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

WARMUP_STEPS = 20
BETAS = (0.9, 0.95)
MAX_NORM = 1.0
ROW_TOKENS = 4096  # per packed row; one row holds a step of default size

Report = Callable[[int, float], None]
"""Called after every optimizer step with the steps done and the step's loss in nats per answer token."""


def warm_start(config: WarmStartConfig, demonstrations: Sequence[TrainingSample], context_length: int, report: Report) -> Qwen3ForCausalLM:
    """Make the tiny model: weights from `config.seed`, then `config.steps` steps with linear warm-up and cosine decay to 0.

    The same arguments give the same weights on the same machine at the same number of threads.
    Raises ValueError if a demonstration is longer than `context_length`.
    """
    longest = max(len(sample.token_ids) for sample in demonstrations)
    if longest > context_length:
        raise ValueError(f"a demonstration has {longest} tokens, but model.context_length={context_length}; raise it or drop that one")
    model = build_model(config, context_length)
    policy = PolicyModel(model).to("cuda" if torch.cuda.is_available() else "cpu")
    trainer = PolicyTrainer(
        policy,
        Objective(sft, LossTerms(aggregate="token_mean")),
        torch.optim.AdamW(model.parameters(), lr=config.lr, betas=BETAS, weight_decay=0.0, fused=True),
        schedule=SchedulerConfig(type="cosine", warmup_steps=min(WARMUP_STEPS, config.steps)),
        total_updates=config.steps,
        max_norm=MAX_NORM,
    )
    examples = Samples("demonstrations", demonstrations)
    source = SupervisedSource([(examples, 1.0)], batch_size=config.batch_size, seed=config.seed)
    for step in range(config.steps):
        (mini_batch,) = pack(source.receive(step), rank=0, ranks=1, tokens=max(ROW_TOKENS, longest)).mini_batches
        metrics = trainer.train_minibatch(mini_batch)
        report(step + 1, metrics["loss/policy"])
    model.set_attn_implementation("sdpa")  # the packed attention works only on the trainer's rows
    policy.cpu()
    return model
