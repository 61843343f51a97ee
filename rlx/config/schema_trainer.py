"""The configuration keys of training: rows, precision, memory, how ranks divide the work, checkpoints, reference, loss, optimizer.

`schema.py` has the others.
"""

# ruff: noqa: RUF009  (key and section return dataclass fields)
from __future__ import annotations

from dataclasses import dataclass

from rlx.config.keys import MISSING, key, section


@dataclass
class AcConfig:
    freq: int = key(0, "activation checkpointing of every freq-th layer; 0 is off", low=0)
    mode: str = key(
        "full",
        "`full` recomputes the whole layer in backward; `selective` keeps the results of matrix products and of attention, and recomputes "
        "only what is cheap between them",
        choices=("full", "selective"),
    )


@dataclass
class TrainerConfig:
    micro_batch_tokens: int | None = key(
        None,
        "tokens of one packed row; null: as many as fit into 2 GiB of activations (8 GiB on CUDA, 4 GiB on a shared card), "
        "but no more than an optimizer step has and no fewer than `seq_len`",
        low=1,
    )
    num_minibatches: int = key(1, "minibatches of a batch, one optimizer step each", low=1)
    num_iterations: int = key(1, "passes of the optimizer over every batch", low=1)
    optimization_dtype: str = key(
        "float32",
        "dtype of the master parameters and optimizer state. `bfloat16` rounds away an update below about 1/500 of a weight, so it takes "
        "learning rates of 1e-4 and more",
        choices=("float32", "bfloat16"),
    )
    reduce_dtype: str = key("float32", "dtype of gradient reduction", choices=("float32", "bfloat16"))
    ac: AcConfig = section(AcConfig)
    ac_offloading: bool = key(False, "keep in host memory what checkpointed layers (`ac`) store for backward")
    fsdp_cpu_offload: bool = key(False, "keep sharded parameters and optimizer state in host memory; only on CUDA")
    optim_cpu_offload: bool = key(
        False,
        "keep the optimizer's state alone in host memory, and bring it to the GPU part by part for each update; only on CUDA, and not with "
        "`fsdp_cpu_offload`",
    )
    reshard_after_forward: bool | str = key(
        "auto",
        "free each layer's gathered parameters after its forward and gather them again for backward; `false`: more memory, meant to be "
        "faster with several GPUs (not run there). `auto`: `false` for a single process on a CPU",
        choices=("auto", "true", "false"),
    )
    dp_replicate: int = key(
        1,
        "copies of the model (HSDP): each is sharded over trainer processes / dp_replicate, neighbours in rank. Shards are then gathered "
        "within a copy, and only gradients cross copies",
        low=1,
    )
    cp: int = key(
        1,
        "context parallelism (Ulysses), for long sequences: this many neighbours in rank compute each packed row together, a piece of its "
        "tokens each. Divides the trainer processes and `model.num_attention_heads`",
        low=1,
    )
    tp: int = key(
        1,
        "tensor parallelism: this many neighbours in rank divide the matrices of attention and feed-forward layers, and the tokens of each "
        "row; for models whose gathered layers do not fit. Divides the heads and key heads; with `cp`, their product divides the ranks",
        low=1,
    )
    ep: int = key(
        1,
        "expert parallelism: this many neighbours in rank divide the experts of each layer, and exchange tokens; for mixture-of-experts "
        "models. Divides the trainer processes and `model.num_experts`",
        low=1,
    )
    compile: bool = key(False, "torch.compile each layer (GPU)")
    batch_timeout: float = key(1800.0, "seconds that the trainer waits for a batch before it gives up", above=0)

    max_concurrent_runs: int | None = key(
        None,
        "make this a shared trainer (docs/lora.md): it trains the adapters (`lora`) of up to this many runs together. Each is started "
        "with `trainer.shared_trainer_dir`; null: the trainer of this run alone",
        low=1,
    )
    shared_trainer_dir: str | None = key(
        None, "directory of a shared trainer that trains this run's adapter; null: this run has a trainer of its own"
    )
    batch_wait: float = key(
        0.0, "of a shared trainer: seconds that the first complete batch waits for those of the other runs, to be trained with them", low=0
    )
    idle_timeout: float | None = key(None, "of a shared trainer: seconds without a run after which it ends; null: never", above=0)

    @property
    def ranks_of_a_row(self) -> int:
        """Trainer processes that compute each packed row together."""
        return self.cp * self.tp


@dataclass
class SchedulerConfig:
    type: str = key("constant", "learning-rate schedule: `constant`, `linear` or `cosine`", choices=("constant", "linear", "cosine"))
    warmup_steps: int = key(0, "optimizer steps of linear warm-up", low=0)
    decay_steps: int | None = key(None, "optimizer steps of decay at the end; null: all steps after warm-up", low=1)
    min_lr: float = key(0.0, "learning rate at the end of the decay", low=0)


@dataclass
class CkptConfig:
    interval: int | None = key(50, "steps between checkpoints; one more is written at the end; null: only on preemption", low=1)
    save_async: bool = key(
        False, "write in the background: the trainer only waits for a copy of its state, which takes the same memory again"
    )
    keep_last: int | None = key(2, "how many of the newest checkpoints to keep; null: all", low=1)
    keep_interval: int | None = key(None, "also keep, for ever, checkpoints whose step is a multiple of this", low=1)
    keep_best: str | None = key(
        None, "also keep the checkpoint that is best by this metric of an evaluation, such as `eval/math/avg@1`; higher is better"
    )


@dataclass
class RefConfig:
    """The reference model. The trainer loads it when `loss.kl.beta` is above 0 or `ref.name` is set."""

    name: str | None = key(None, "Hugging Face name or folder of a teacher with the policy's vocabulary; null: the initial policy")
    sync_interval: int | None = key(None, "steps between updates of the reference from the policy; null: never", low=1)
    alpha: float = key(0.6, "weight of the policy in such an update: ref ← alpha·policy + (1 - alpha)·ref", above=0, high=1)


@dataclass
class KlTerms:
    beta: float = key(0.0, "weight of the KL term against the reference model (section `ref`); 0 is off and needs no such model", low=0)
    estimator: str = key(
        "k2", "estimator of a token's KL: `k1`, `k2` or `k3`; GRPO's paper has k3, k2 has the correct gradient", choices=("k1", "k2", "k3")
    )
    target_kl: float | None = key(None, "adjust beta so that the KL, in nats per token, reaches this; null: beta stays constant", above=0)
    gain: float = key(0.1, "K of that controller: one optimizer step changes beta by at most the fraction K/5", above=0, high=4)


@dataclass
class LossTerms:
    """Keys that every objective shares, in addition to the objective's own under `loss`."""

    aggregate: str = key(
        MISSING,
        "`token_mean`, `seq_mean`, `seq_sum`, `fixed_length` or `group_token_mean` (the mean per prompt of the DAPO and CISPO papers)",
        choices=("token_mean", "seq_mean", "seq_sum", "fixed_length", "group_token_mean"),
    )
    max_length: int | None = key(None, "L_max of `fixed_length`; null: `sampling.max_tokens`", low=1)
    proximal: str = key(
        "inference",
        "π_old of the ratios: `inference` takes the engine's log-probabilities, `recompute` the trainer's own at the start of the step",
        choices=("inference", "recompute"),
    )
    correction: str = key(
        "none",
        "with `proximal: recompute`, by exp(old − inference): `tis` weighs tokens, `mis` drops some; `seq_tis`, `seq_mis`: per rollout",
        choices=("none", "tis", "mis", "seq_tis", "seq_mis"),
    )
    correction_cap: float = key(2.0, "C: `tis` caps weights at C, `mis` drops tokens whose weight is outside [1/C, C]", low=1)
    dual_clip: float | None = key(None, "c: where A < 0, a loss of the form -ratio·A is capped at -c·A; null is off", above=1)
    kl: KlTerms = section(KlTerms)
    entropy_coef: float = key(0.0, "weight of the entropy bonus: c of the term -c·H_t")
    ce_coef: float = key(
        0.0,
        "weight of cross-entropy on the tokens that carry a weight for it (what environments write, a teacher's tokens): "
        "their mean over the whole batch; 0 is off",
        low=0,
    )
    mask_overlong: bool = key(False, "rollouts that a length limit cut off contribute nothing")


@dataclass
class OptimTerms:
    """Keys that every optimizer shares, in addition to the optimizer's own under `optim`."""

    max_norm: float | None = key(1.0, "largest global norm of the gradient, by clipping; null is off", above=0)
