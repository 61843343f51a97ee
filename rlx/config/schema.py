"""The typed configuration tree: every key, its type, its default and what it means.

Plain dataclasses whose only behaviour is derived properties. Imports no torch, hydra or omegaconf, so that every room can import it.
`conf/` holds the values, `checks/` the rules between keys; `load.py` composes. `schema_rollout.py` holds the keys of
rollouts, `schema_launch.py` those for starting and watching a run. `docs/configuration.md` is generated from all three.

`loss`, `advantage` and `optim` are open `_target_` nodes: their keys are the keyword arguments of the target, plus the shared keys
in `LossTerms` and `OptimTerms`.
"""

# ruff: noqa: RUF009  (key and section return dataclass fields)
from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from rlx.config.keys import MISSING, key, section
from rlx.config.objectives import kl_of, losses_of
from rlx.config.ranks import ranks_left
from rlx.config.rows import default_row
from rlx.config.schema_launch import LauncherConfig, LoggerConfig, SlurmConfig, TensorboardConfig, WandbConfig
from rlx.config.schema_rollout import (
    BufferConfig,
    DifficultyFilter,
    EnvConfig,
    EnvSampling,
    EvalConfig,
    EvalEnvConfig,
    EvalSampling,
    OrchestratorConfig,
    RewardConfig,
    SamplingConfig,
    TrainedEnvConfig,
)
from rlx.config.schema_teacher import TeacherConfig

__all__ = [
    "MISSING",
    "BufferConfig",
    "DifficultyFilter",
    "EnvConfig",
    "EnvSampling",
    "EvalConfig",
    "EvalEnvConfig",
    "EvalSampling",
    "LauncherConfig",
    "LoggerConfig",
    "OrchestratorConfig",
    "RewardConfig",
    "SamplingConfig",
    "SlurmConfig",
    "TeacherConfig",
    "TensorboardConfig",
    "TrainedEnvConfig",
    "WandbConfig",
]


@dataclass
class RunConfig:
    name: str | None = key(None, "name of the run; default `<env>-<model>-<loss>-<short id>`")
    dir: str | None = key(None, "the run directory; default `outputs/<name>`")


@dataclass
class WarmStartConfig:
    """How rlx makes a model itself. The model is cached under a hash of this section and the environments' examples."""

    steps: int = key(250, "optimizer steps of supervised training for each environment of the mix", low=1)
    batch_size: int = key(64, "examples per step", low=1)
    lr: float = key(3e-3, "peak learning rate", above=0)
    num_examples: int = key(4096, "examples taken from the environments, in proportion to their weights", low=1)
    teacher_error: float = key(0.5, "probability that the teacher gives a wrong answer: a copy of the question", low=0, high=1)
    seed: int = key(0, "seed of initial weights, order and teacher; separate from the run's seed, so that all runs start from one model")
    hidden_size: int = key(128, "model width", low=1)
    intermediate_size: int = key(384, "width of the feed-forward layers", low=1)
    num_hidden_layers: int = key(4, "number of layers", low=1)
    num_attention_heads: int = key(4, "query heads", low=1)
    num_key_value_heads: int = key(2, "key and value heads", low=1)
    head_dim: int = key(32, "width of a head", low=1)


@dataclass
class ModelConfig:
    name: str = key(MISSING, "Hugging Face name or a model folder; with `warm_start`, a label for the model that rlx makes")
    dtype: str = key("bfloat16", "precision in which trainer and inference compute", choices=("bfloat16", "float32"))
    context_length: int = key(MISSING, "longest sequence the model can attend to, in tokens", low=2)
    num_parameters: float = key(MISSING, "number of parameters, for the memory estimate of the plan", above=0)
    hidden_size: int = key(MISSING, "model width, for the memory estimate of the plan", low=1)
    num_layers: int = key(MISSING, "number of layers, for the memory estimate of the plan", low=1)
    num_attention_heads: int = key(MISSING, "query heads; a multiple of `hardware.tensor_parallel`", low=1)
    num_key_value_heads: int = key(MISSING, "key and value heads", low=1)
    head_dim: int | None = key(None, "width of a head, for the memory estimate of the plan; null: hidden_size / num_attention_heads", low=1)
    vocab_size: int = key(MISSING, "size of the vocabulary, for the memory estimate of the plan", low=2)
    renderer: str = key(
        "auto",
        "what writes and reads conversations: a family of the `renderers` package (`qwen3`, `llama-3`, …), `default`: the chat template, "
        "or `auto`: the family of the exact hub name, if the package knows it and `model.chat_template` is not set",
    )
    chat_template: str | None = key(None, "file with the chat template (Jinja) to use instead of the tokenizer's own; null: its own")
    chat_template_kwargs: dict[str, Any] = key(
        {},
        "arguments of the chat template, or of the renderer in its place: {enable_thinking: false}; one that it does not read is refused",
    )
    tool_call_parser: str = key(
        "auto",
        "how tool calls are read from answers, if the chat template writes conversations; vLLM's names. "
        "`auto`: the one that reads the calls which the template writes; `none`: calls stay text",
        choices=("auto", "none", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"),
    )
    reasoning_parser: str = key(
        "auto",
        "how reasoning is told from the answer, if the chat template writes conversations: `qwen3` (`<think>` begins it), "
        "`deepseek_r1` (it needs no beginning), `none`, or `auto`: `qwen3` if the template knows reasoning",
        choices=("auto", "none", "qwen3", "deepseek_r1"),
    )
    strips_thinking: bool = key(
        False, "the chat template drops the reasoning of earlier turns, so later prompts do not extend earlier ones"
    )
    attention: str = key(
        "auto",
        "`auto`, `sdpa` (packed, shared prompts computed once), `varlen` (packed, FlashAttention, CUDA), `rows` (a padded row per sample)",
        choices=("auto", "sdpa", "varlen", "rows"),
    )
    logprob_backend: str = key(
        "auto",
        "op for head, log-probability and entropy: `torch`, `triton` (CUDA), `liger` (float32, one temperature, plain head) or `auto`",
        choices=("auto", "torch", "triton", "liger"),
    )
    liger: bool | str = key(
        "auto",
        "Liger's layer kernels (norms, rotary positions, feed-forward): `true`, `false` or `auto` (on CUDA, if Liger supports the model)",
        choices=("auto", "true", "false"),
    )
    trust_remote_code: bool = key(False, "run the model's own code from the Hugging Face hub")
    warm_start: WarmStartConfig | None = key(None, "make the model by supervised training on the environments' examples; null: load it")


@dataclass
class AcConfig:
    freq: int = key(0, "activation checkpointing of every freq-th layer; 0 is off", low=0)


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
    optimization_dtype: str = key("float32", "dtype of the master parameters and optimizer state", choices=("float32", "bfloat16"))
    reduce_dtype: str = key("float32", "dtype of gradient reduction", choices=("float32", "bfloat16"))
    ac: AcConfig = section(AcConfig)
    fsdp_cpu_offload: bool = key(False, "keep sharded parameters and optimizer state in host memory")
    compile: bool = key(False, "torch.compile each layer (GPU)")
    batch_timeout: float = key(1800.0, "seconds that the trainer waits for a batch before it gives up", above=0)


@dataclass
class SchedulerConfig:
    type: str = key("constant", "learning-rate schedule: `constant`, `linear` or `cosine`", choices=("constant", "linear", "cosine"))
    warmup_steps: int = key(0, "optimizer steps of linear warm-up", low=0)
    decay_steps: int | None = key(None, "optimizer steps of decay at the end; null: all steps after warm-up", low=1)
    min_lr: float = key(0.0, "learning rate at the end of the decay", low=0)


@dataclass
class InferenceConfig:
    base_url: list[str] = key([], "addresses of servers that already run (`http://host:port`); empty: the run starts its own")
    host: str | None = key(
        None,
        "address to listen on; null: 127.0.0.1, or 0.0.0.0 (every address) if `hardware.nodes` is above 1; clients need the API key anyway",
    )
    port: int = key(0, "port of replica 0; further replicas take the next ports; 0: any free port", low=0, high=65535)
    api_key: str | None = key(
        None,
        "key that clients must send; null: a random one, kept in the run's `endpoints/`. Secret: it is kept in the run's `secrets.yaml`, "
        "which only its owner can read, and never shown, sent or saved elsewhere",
        secret=True,
    )
    max_model_len: int | None = key(None, "context length of the engine, in tokens; null: `seq_len`", low=2)
    max_num_seqs: int = key(256, "maximum number of sequences decoded together", low=1)
    gpu_memory_utilization: float = key(0.9, "share of the GPU's memory for the engine", above=0, high=1)
    kv_cache_gb: float = key(1.0, "memory of the key-value cache on CPU, in GiB", above=0)
    enforce_eager: bool | None = key(None, "run without CUDA graphs; null: eager on CPU, graphs on GPU")
    startup_timeout: float = key(
        600.0,
        "seconds for a server to start; making or downloading its model does not count. Also how long the run waits for a lone server that "
        "has left to answer again",
        above=0,
    )
    max_restarts: int = key(
        3,
        "how often each server that the run started is started again if it dies after it has served, in one attempt; it serves again once "
        "it has the run's version. 0: its death ends the run",
        low=0,
    )
    request_timeout: float = key(600.0, "seconds for one request; time in which no server answers does not count", above=0)
    vllm: dict[str, Any] = key({}, "further engine arguments, by vLLM's own names")


@dataclass
class WeightBroadcastConfig:
    type: str = key("filesystem", "how weights reach the servers; `filesystem`: safetensors in `weights/step_N`", choices=("filesystem",))
    keep_last: int = key(2, "versions of the weights kept on disk, besides the final one", low=1)
    timeout: float = key(600.0, "seconds for one update of all servers", above=0)
    drain_tokens: int = key(
        16,
        "an update waits for the requests in flight if each has at most this many tokens left; otherwise, and with 0, "
        "they continue under the new version with recomputed keys and values",
        low=0,
    )


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
class HardwareConfig:
    name: str = key(MISSING, "name of the layout; `auto` records its choice here")
    device: str = key(MISSING, "`cpu` or `cuda`", choices=("cpu", "cuda"))
    nodes: int = key(1, "number of hosts; more than one needs launcher=slurm", low=1)
    gpus_per_node: int = key(0, "GPUs per host", low=0)
    inference_replicas: int = key(1, "number of independent vLLM servers", low=1)
    tensor_parallel: int = key(1, "GPUs per vLLM server", low=1)
    trainer_processes: int | None = key(
        None,
        "trainer processes; on CUDA each has one GPU, and more than fit on one host take whole hosts; null: on CUDA one for each GPU "
        "that inference leaves free, on whole hosts if some are free; on CPU one for each host that inference leaves free",
        low=1,
    )
    shared: bool = key(False, "inference and trainer share one GPU")
    cpu_threads: int = key(1, "threads of each role that computes on CPU; results are equal bit for bit only with equal counts", low=1)


@dataclass
class KlTerms:
    beta: float = key(0.0, "weight of the KL term against the reference model (section `ref`); 0 is off and needs no such model", low=0)
    estimator: str = key(
        "k2", "estimator of a token's KL: `k1`, `k2` or `k3`; GRPO's paper has k3, k2 has the correct gradient", choices=("k1", "k2", "k3")
    )
    target_kl: float | None = key(None, "adjust beta so that the KL, in nats per token, reaches this; null: beta stays constant", above=0)
    gain: float = key(0.1, "K of that controller: one optimizer step changes beta by at most the fraction K/5", above=0)


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
        "weight of cross-entropy on the tokens that carry a weight for it (what environments answer, a teacher's tokens): "
        "their mean over the whole batch; 0 is off",
        low=0,
    )
    mask_overlong: bool = key(False, "rollouts that a length limit cut off contribute nothing")


@dataclass
class RefConfig:
    """The reference model. The trainer loads it when `loss.kl.beta` is above 0 or `ref.name` is set."""

    name: str | None = key(None, "Hugging Face name or folder of a teacher with the policy's vocabulary; null: the initial policy")
    sync_interval: int | None = key(None, "steps between updates of the reference from the policy; null: never", low=1)
    alpha: float = key(0.6, "weight of the policy in such an update: ref ← alpha·policy + (1 - alpha)·ref", above=0, high=1)


@dataclass
class OptimTerms:
    """Keys that every optimizer shares, in addition to the optimizer's own under `optim`."""

    max_norm: float | None = key(1.0, "largest global norm of the gradient, by clipping; null is off", above=0)


@dataclass
class Config:
    seed: int = key(0, "seed of sampling, order and initialisation")
    max_steps: int = key(MISSING, "number of training steps", low=1)
    max_async_level: int = key(1, "how many policy versions old a token may be when it is trained on; 0 is on-policy", low=0)
    seq_len: int = key(MISSING, "longest training sample (prompt plus completion), in tokens", low=2)
    dry_run: bool = key(False, "compose, check, plan and print; start nothing")
    clean: bool = key(False, "first delete an existing run directory of this name")
    resume: str | None = key(
        None, "resume from a checkpoint: `latest` or a step of this run; or fork another run, given by its path, which stays unchanged"
    )
    replay: str | None = key(None, "train on the recorded batches of another run, given by its directory; no inference, no environments")
    run: RunConfig = section(RunConfig)
    model: ModelConfig = section(ModelConfig)
    loss: dict[str, Any] = key({}, "the objective: `_target_`, its own arguments, and the keys of every loss", terms=LossTerms)
    advantage: dict[str, Any] = key({}, "the advantage: `_target_` and its arguments")
    ref: RefConfig = section(RefConfig)
    teacher: TeacherConfig = section(TeacherConfig)
    reward: RewardConfig = section(RewardConfig)
    envs: dict[str, TrainedEnvConfig] = key({}, "the environments of the mix, by name")
    sampling: SamplingConfig = section(SamplingConfig)
    eval: EvalConfig = section(EvalConfig)
    orchestrator: OrchestratorConfig = section(OrchestratorConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    optim: dict[str, Any] = key({}, "the optimizer: `_target_`, its own arguments, and the keys of every optimizer", terms=OptimTerms)
    scheduler: SchedulerConfig = section(SchedulerConfig)
    inference: InferenceConfig = section(InferenceConfig)
    weight_broadcast: WeightBroadcastConfig = section(WeightBroadcastConfig)
    ckpt: CkptConfig = section(CkptConfig)
    hardware: HardwareConfig = section(HardwareConfig)
    launcher: LauncherConfig = section(LauncherConfig)
    slurm: SlurmConfig = section(SlurmConfig)
    logger: LoggerConfig = section(LoggerConfig)

    @property
    def num_groups(self) -> int:
        """Prompts per training step."""
        return max(1, round(self.orchestrator.batch_size / self.mean_group_size))

    def group_size(self, env: str) -> int:
        """Rollouts per prompt of an environment."""
        return self.envs[env].rollouts_per_example or self.orchestrator.rollouts_per_example

    @property
    def mean_group_size(self) -> float:
        """Rollouts per prompt, mean over the mix."""
        total = sum(env.weight for env in self.envs.values())
        if total <= 0:
            return self.orchestrator.rollouts_per_example
        return sum(env.weight * self.group_size(name) for name, env in self.envs.items()) / total

    @property
    def concurrency(self) -> int:
        """The most rollouts in flight; at the start, if that follows the engines."""
        servers = len(self.inference.base_url) or self.hardware.inference_replicas
        return self.orchestrator.max_concurrent or servers * self.inference.max_num_seqs

    @property
    def max_model_len(self) -> int:
        """Context of the inference engine, in tokens."""
        return self.inference.max_model_len or self.seq_len

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one packed row."""
        return self.trainer.micro_batch_tokens or default_row(self)

    @property
    def uses_reference(self) -> bool:
        """Whether the trainer loads a reference model."""
        return self.ref.name is not None or any(kl_of(node).get("beta") for node in losses_of(self).values())

    @property
    def num_updates(self) -> int:
        """Optimizer steps per training step."""
        return self.trainer.num_minibatches * self.trainer.num_iterations

    @property
    def num_gpus(self) -> int:
        """GPUs that the layout needs, over all hosts; 0 on CPU."""
        if self.hardware.device == "cpu":
            return 0
        inference = 0 if self.inference.base_url else self.hardware.inference_replicas * self.hardware.tensor_parallel
        return max(inference, self.trainer_ranks) if self.hardware.shared else inference + self.trainer_ranks

    @property
    def trainer_ranks(self) -> int:
        """Trainer processes: `hardware.trainer_processes`, or what the layout leaves places for."""
        hardware = self.hardware
        if hardware.trainer_processes is not None:
            return hardware.trainer_processes
        return ranks_left(
            cuda=hardware.device == "cuda",
            nodes=hardware.nodes,
            gpus_per_node=hardware.gpus_per_node,
            replicas=0 if self.inference.base_url else hardware.inference_replicas,
            tensor_parallel=hardware.tensor_parallel,
            shared=hardware.shared,
        )


def split_terms(node: dict[str, Any], terms: type) -> tuple[Any, dict[str, Any]]:
    """Split an open node into its shared keys, as an instance of `terms`, and the rest with `_target_`.

    Raises TypeError when a shared key without a default is missing.
    """
    sections: dict[str, Any] = {f.name: f.default_factory for f in fields(terms) if is_dataclass(f.default_factory)}
    shared = {f.name for f in fields(terms)}
    own = {k: sections[k](**v) if k in sections else v for k, v in node.items() if k in shared}
    return terms(**own), {k: v for k, v in node.items() if k not in shared}
