"""Trains one recorded batch under two objectives, at the same parameters, and notes what each does with every token. Changes no weights.

    recorded batch of step n ─┬► objective of the run ─► ∂L/∂log π of each token, gradient of the parameters
    policy version n ─────────┴► another objective   ─► the same, at equal log-probabilities

The gradient of a loss is Σ_t (∂L/∂log π_t) ∇log π_t, plus that of an entropy bonus. So the *weight* of a token, −∂L/∂log π_t, says all that
an objective does with it: positive makes the token more likely, 0 leaves it out (clipped, dropped, no advantage). Weights here are
multiplied by the number of trainable tokens of the mini-batch. REINFORCE with `token_mean` then gives each token its advantage.

Weights come from autograd through the trainer's own step, so any objective can be compared, with its corrections, terms and aggregation.
One process, any device that fits the model twice and its gradient twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlx.arrays import Float, Int
from rlx.config.schema import Config
from rlx.data.packing import pack
from rlx.data.source import read_recorded
from rlx.losses.diagnostics import Stats, completed
from rlx.losses.mix import LossMix
from rlx.losses.tokens import TokenBatch
from rlx.models.lora import adapted
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.train.build import build
from rlx.train.checkpoint import load
from rlx.train.optim import clip_gradients
from rlx.train.step import PolicyTrainer
from rlx.types import LossCounts, StepBatch, TrainingSample

log = logging.getLogger("rlx.replay")

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Where the policy of a step comes from: `Begin(model="/run/weights/step_12", step=12)`."""

    model: str  # a folder or a hub name
    step: int  # the version that `model` or `checkpoint` holds
    checkpoint: Path | None = None  # folder of a trainer's state to load over `model`
    reference: str | None = None  # folder or hub name of version 0, for a reference that is the initial policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one objective does with the batch: T tokens of all samples, M mini-batches."""

    weights: Array  # [T] float64; NaN where no loss reads the token
    gradient_norms: list[float]  # [M] before clipping
    metrics: list[dict[str, float]]  # [M] the trainer's metrics: loss/…, policy/…, mismatch/…
    num_tokens: list[int]  # [M] by which weights are multiplied: trainable tokens; without any, those of cross-entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both objectives on one batch. The arrays are over all tokens of all samples, prompts included, in the batch's order."""

    step: int
    samples: list[TrainingSample]  # those of all mini-batches
    mini_batch: Int  # [T] number of each token's mini-batch
    sample: Int  # [T] number of its sample in `samples`
    position: Int  # [T] in the sample
    logp: Float  # [T] under policy version `step`; NaN where no loss reads the token
    recorded: Side  # the run's objective
    other: Side
    cosines: list[float]  # [M] between the two gradients of a mini-batch; NaN if one is 0


def in_one_process(cfg: Config, device: str) -> Config:
    """The configuration for this process: float32, no sharding, no kernels that another device needs."""
    model = replace(
        cfg.model,
        dtype="float32",
        attention="auto" if cfg.model.attention == "varlen" else cfg.model.attention,
        logprob_backend="torch" if device == "cpu" else "auto",
        liger=False,
    )
    trainer = replace(cfg.trainer, optimization_dtype="float32", reduce_dtype="float32", compile=False)
    trainer = replace(trainer, fsdp_cpu_offload=False, optim_cpu_offload=False, dp_replicate=1, cp=1, tp=1, ep=1)
    return replace(cfg, model=model, trainer=trainer, hardware=replace(cfg.hardware, device=device))


def set_up_torch(device: str, threads: int) -> None:
    """Make this process compute as a trainer of that device does. On a CPU the results are then the same bit for bit, each time."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    if device == "cpu":
        torch.use_deterministic_algorithms(True)
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  a debugging aid that costs time


def compare(
    recorded: Config,
    other: Config,
    paths: RunPaths,
    begin: Begin,
    step: int,
    *,
    device: str = "cpu",
    beta: float | None = None,
    say: Callable[[str], None] = log.info,
) -> Comparison:
    """Compare the objective of `recorded`, the run's configuration, with that of `other` on the batch of `step`.

    Steps from `begin.step` to `step` are trained again first, with the run's configuration. `beta`: the weight of the KL term that the
    run had at this step, if it adapts. Raises ValueError for a damaged batch or a batch that an objective cannot train.
    """
    mesh = one_process(device)

    def make(cfg: Config) -> PolicyTrainer:
        cfg = in_one_process(cfg, device)
        if cfg.uses_reference and cfg.ref.name is None and begin.reference is not None:
            cfg = replace(cfg, ref=replace(cfg.ref, name=begin.reference))  # `build` would take the model of version `begin.step`
        return build(cfg, begin.model, mesh, lambda _: nullcontext())

    batch = read_recorded(paths.recorded_of(step), step)
    trainer = make(recorded)
    cfg = in_one_process(recorded, device)
    if begin.checkpoint is not None:
        if trainer.reference is not None and recorded.ref.name is None:
            trainer.reference.teacher = False  # it is the initial policy, and may have followed the policy
        load(begin.checkpoint, trainer)
    for earlier in range(begin.step, step):
        say(f"training step {earlier} again")
        before = read_recorded(paths.recorded_of(earlier), earlier)
        how: dict[str, Any] = {"tokens": cfg.micro_batch_tokens, "loss_of": trainer.losses.loss_of, "padded": trainer.padded}
        packed = pack(before, rank=0, ranks=1, **how)
        trainer.train_batch(packed, iterations=cfg.trainer.num_iterations)
        if trainer.reference is not None:
            trainer.reference.after_step(earlier, trainer.model)
    second = make(other)
    if begin.step < step or begin.checkpoint is not None:
        second.model.load_state_dict(trainer.model.state_dict())
        if second.reference is not None and trainer.reference is not None and other.ref == recorded.ref:
            second.reference.model.load_state_dict(trainer.reference.model.state_dict())
    if beta is not None and trainer.losses.adapts:  # then there is one objective; of several, `beta` would be that of the first alone
        for one in (trainer, second):
            for objective in one.losses.objectives:
                if objective.terms.kl == trainer.losses.objectives[0].terms.kl:  # others have another term, with the weight of their keys
                    objective.controller.beta = beta
    for side in (trainer, second):
        for layer in adapted(side.model).values():
            layer.dropout = 0.0  # each side would draw its own masks
    trainer.optimizer.state.clear()
    say(f"step {step} under both objectives")
    first, last = (Measured(one, batch, cfg.micro_batch_tokens) for one in (trainer, second))
    # Mini-batch by mini-batch: only two gradients are in memory, however many mini-batches there are.
    cosines = [cosine(a, b) for a, b in zip(first.gradients(), last.gradients(), strict=True)]
    return _together(batch, first, last, cosines)


@dataclass
class Probe:
    """Stands in for a trainer's losses: passes them on, and keeps each token's ∂L/∂log π of every micro-batch."""

    losses: LossMix
    weights: list[Tensor] = field(default_factory=list)
    logp: list[Tensor] = field(default_factory=list)

    def __call__(self, tokens: TokenBatch, counts: LossCounts) -> tuple[Tensor, Stats]:
        loss, stats = self.losses(tokens, counts)
        slope = None
        if loss.requires_grad:
            (slope,) = torch.autograd.grad(loss, tokens.logp, retain_graph=True, allow_unused=True)
        slope = torch.zeros_like(tokens.logp) if slope is None else slope
        self.weights.append(-slope.detach().double().cpu())
        self.logp.append(tokens.logp.detach().cpu())
        return loss, stats

    def __getattr__(self, name: str) -> Any:
        return getattr(self.losses, name)


class Measured:
    """One objective on a batch. `side` and `logp` are whole when `gradients` has ended."""

    def __init__(self, trainer: PolicyTrainer, batch: StepBatch, tokens: int) -> None:
        """`tokens`: of one row."""
        self.trainer, self.step = trainer, batch.step
        how: dict[str, Any] = {"tokens": tokens, "loss_of": trainer.losses.loss_of, "padded": trainer.padded}
        self.packed = pack(batch, rank=0, ranks=1, **how)
        # The same batch with each token's number in place of its version is packed alike, and so tells where each token went.
        self.numbers = pack(_numbered(batch), rank=0, ranks=1, **how)
        total = sum(len(sample.token_ids) for samples in batch.mini_batches for sample in samples)
        counts = [mini_batch.num_trained_tokens for mini_batch in self.packed.mini_batches]
        self.side = Side(weights=np.full(total, np.nan), gradient_norms=[], metrics=[], num_tokens=counts)
        self.logp = np.full(total, np.nan, dtype=np.float32)  # [T]

    def gradients(self) -> Iterator[list[Tensor]]:
        """The gradient in each mini-batch, on the host. It is not kept here."""
        trainer, losses = self.trainer, self.trainer.losses
        for mini_batch, numbered in zip(self.packed.mini_batches, self.numbers.mini_batches, strict=True):
            probe = Probe(losses)
            trainer.losses = probe  # type: ignore[assignment]
            try:
                stats = trainer.accumulate_gradients(mini_batch, step=self.step if self.packed.sampled else None)
            finally:
                trainer.losses = losses
            for row, weight, found in zip(numbered.micro_batches, probe.weights, probe.logp, strict=True):
                where = row.versions[row.scored]
                self.side.weights[where], self.logp[where] = weight.numpy() * mini_batch.num_trained_tokens, found.numpy()
            self.side.gradient_norms.append(clip_gradients(trainer.parameters, None, f"step {self.step}", trainer.mesh))
            self.side.metrics.append(completed(_floats(stats.sums), _floats(stats.maxima)))
            slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainer.parameters]
            trainer.optimizer.zero_grad(set_to_none=True)
            on_host = [slope.detach().cpu() for slope in slopes]
            del slopes  # else they stay on the device while the other objective's gradient is computed
            yield on_host


def _numbered(batch: StepBatch) -> StepBatch:
    begin, parts = 0, []
    for samples in batch.mini_batches:
        part = []
        for sample in samples:
            part.append(replace(sample, versions=np.arange(begin, begin + len(sample.token_ids), dtype=np.int32)))
            begin += len(sample.token_ids)
        parts.append(tuple(part))
    return replace(batch, mini_batches=tuple(parts))


def _floats(values: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _together(batch: StepBatch, first: Measured, last: Measured, cosines: list[float]) -> Comparison:
    samples = [sample for part in batch.mini_batches for sample in part]
    lengths = [len(sample.token_ids) for sample in samples]
    part_of = [number for number, part in enumerate(batch.mini_batches) for _ in part]
    position = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]) if lengths else np.empty(0, dtype=np.int32)
    return Comparison(
        step=batch.step,
        samples=samples,
        mini_batch=np.repeat(np.array(part_of, dtype=np.int32), lengths),
        sample=np.repeat(np.arange(len(samples), dtype=np.int32), lengths),
        position=position,
        logp=first.logp,
        recorded=first.side,
        other=last.side,
        cosines=cosines,
    )


def cosine(one: list[Tensor], other: list[Tensor]) -> float:
    """The cosine of the angle between two gradients, in float64; NaN if one is 0."""
    products = np.zeros(3)
    for a, b in zip(one, other, strict=True):
        a, b = a.double(), b.double()
        products += [float((a * b).sum()), float((a * a).sum()), float((b * b).sum())]
    return float(products[0] / np.sqrt(products[1] * products[2])) if products[1] and products[2] else float("nan")


def texts(model: str, ids: Array, *, trust_remote_code: bool = False) -> dict[int, str]:
    """The text of each token id by itself, from the model's tokenizer. Bytes of a character that a token splits show as `�`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    return {int(token): str(tokenizer.decode([int(token)])) for token in np.unique(ids)}
