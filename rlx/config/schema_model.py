"""The configuration keys of a run's name, its model and adapters, its servers and its hardware. `schema.py` has the others."""

# ruff: noqa: RUF009  (key and section return dataclass fields)
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rlx.config.keys import MISSING, key

CPU_WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of heads that vLLM's attention computes on a CPU. With others it starts, and ends at its first request."""


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
    tool_calls: str = key(
        "hermes",
        'how the model writes a call: `hermes`, `<tool_call>{"name": …, "arguments": …}</tool_call>`, or `pythonic`, `[name(x="…")]`, a '
        "quarter as long (each character is a token)",
        choices=("hermes", "pythonic"),
    )
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
    num_experts: int | None = key(None, "experts of a layer; a multiple of `trainer.ep`. null: the model has none", low=1)
    num_experts_per_tok: int | None = key(None, "experts that compute a token, for the memory estimate of the plan; null: 8", low=1)
    intermediate_size: int | None = key(
        None,
        "width of a feed-forward layer, or of each expert's, for the memory estimate of the plan; null: what `num_parameters` leaves",
        low=1,
    )
    supports_tp: bool = key(
        True, "transformers' plan of the model's family divides attention by heads, as `trainer.tp` needs; false: OLMoE, GPT-2, GPT-OSS"
    )
    head_dim: int | None = key(
        None,
        "width of a head, for the memory estimate of the plan, and because vLLM on a CPU does not compute every width; "
        "null: hidden_size / num_attention_heads",
        low=1,
    )
    vocab_size: int = key(MISSING, "size of the vocabulary, for the memory estimate of the plan", low=2)
    renderer: str = key(
        "auto",
        "what writes and reads conversations: a family of the `renderers` package (`qwen3`, `llama-3`, …), `default`: the chat template, "
        "or `auto`: the family of the exact hub name, if the package knows it and `model.chat_template` is not set",
    )
    chat_template: str | None = key(
        None,
        "chat template (Jinja) to use instead of the tokenizer's own: a file, or the name of one that rlx brings (`chatml_tools`); "
        "null: its own",
    )
    chat_template_kwargs: dict[str, Any] = key(
        {},
        "arguments of the chat template, or of the renderer in its place: {enable_thinking: false}; an error if it does not read one",
    )
    tool_call_parser: str = key(
        "auto",
        "how tool calls are read from completions, if the chat template writes conversations; vLLM's names. "
        "`auto`: the one that reads the calls which the template writes; `none`: calls stay text",
        choices=("auto", "none", "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"),
    )
    reasoning_parser: str = key(
        "auto",
        "how reasoning is told from the rest of a completion, if the chat template writes conversations: `qwen3` (`<think>` begins it), "
        "`deepseek_r1` (it needs no beginning), `none`, or `auto`: `qwen3` if the template knows reasoning",
        choices=("auto", "none", "qwen3", "deepseek_r1"),
    )
    template_drops_thinking: bool = key(
        False, "the chat template drops the reasoning of earlier turns, so later prompts do not extend earlier ones"
    )
    attention: str = key(
        "auto",
        "`sdpa` (packed, shared prompts computed once), `varlen` (packed, FlashAttention, CUDA), `rows` (a padded row per sample) or "
        "`auto`: `sdpa`, but on CUDA in 16 bits `varlen`, with long samples by cuDNN from Hopper on",
        choices=("auto", "sdpa", "varlen", "rows"),
    )
    logprob_backend: str = key(
        "auto",
        "op for head, log-probability and entropy: `torch`, `triton` (CUDA), `liger` (float32, one temperature, plain head) or `auto`",
        choices=("auto", "torch", "triton", "liger"),
    )
    liger: bool | str = key(
        "auto",
        "Liger's layer kernels (norms, rotary positions, feed-forward, but that not in models with experts): `true`, `false` or `auto` (on "
        "CUDA, if Liger supports the model)",
        choices=("auto", "true", "false"),
    )
    trust_remote_code: bool = key(False, "run the model's own code from the Hugging Face hub")
    warm_start: WarmStartConfig | None = key(None, "make the model by supervised training on the environments' examples; null: load it")

    @property
    def prepared(self) -> bool:
        """Whether the prepare role makes the initial model's folder."""
        return self.warm_start is not None


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA): the model is frozen, and small matrices beside its linear layers are trained and published instead."""

    rank: int | None = key(None, "rank r of the adapters; null or 0: train all parameters of the model", low=0, high=512)
    alpha: float = key(32.0, "adapters are multiplied by alpha / rank", above=0)
    dropout: float = key(0.0, "share of an adapter's inputs that are set to 0 in training; an engine has none", low=0, high=1)
    target_modules: list[str] = key(
        ["all-linear"],
        "which linear layers get adapters, by the last parts of their names (`q_proj`, `self_attn.q_proj`); `all-linear`: all but the head",
    )
    rslora: bool = key(False, "multiply by alpha / √rank instead (arXiv 2312.03732), for high ranks")

    @property
    def enabled(self) -> bool:
        """Whether adapters are trained instead of the model."""
        return bool(self.rank)

    @property
    def scaling(self) -> float:
        """The factor of the adapters' product."""
        assert self.rank, "there are no adapters"
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


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
    kv_cache_gb: float | None = key(
        None,
        "memory of the KV cache on CPU, in GiB; null: twice what `max_num_seqs` sequences of full length take, but at most 1 GiB "
        "unless one sequence takes more",
        above=0,
    )
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
    hung_timeout: float = key(
        60.0,
        "seconds without a heartbeat, or without a step of an engine process that requests wait for, after which a server that the run "
        "started and that has served is killed, and started again like one that died (`max_restarts`)",
        above=0,
    )
    request_timeout: float = key(600.0, "seconds for one request; time in which no server answers does not count", above=0)
    vllm: dict[str, Any] = key(
        {}, "further options of the server's command line, by vLLM's own names: `{max_num_batched_tokens: 4096}` (docs/servers.md)"
    )


@dataclass
class UpdateConfig:
    timeout: float = key(
        600.0,
        "seconds for one update of all servers, and for a transfer from memory without progress; then the servers that have the version "
        "go on without the others (docs/servers.md)",
        above=0,
    )
    verify_every: int = key(
        16,
        "a full compare of what is served with the published files every so many updates; also after the first, after each restart, and "
        "always where it takes under 5 % of a step",
        low=1,
    )


@dataclass
class WeightBroadcastConfig(UpdateConfig):
    type: str = key(
        "filesystem",
        "how weights reach the servers; `filesystem`: safetensors in `weights/step_N`; without files, by vLLM's transfer engines: `nccl` "
        "between GPUs, `ipc` on one shared GPU (docs/servers.md)",
        choices=("filesystem", "nccl", "ipc"),
    )
    keep_last: int = key(
        2, "how many of the newest versions of the weights stay on disk, besides those of checkpoints; at least max_async_level + 2", low=1
    )
    folder: str | None = key(
        None,
        "a folder in memory, such as `/dev/shm`: versions that only the servers need are written there, for a `run.dir` on a slow disk. On "
        "one host; they are gone when the run ends (docs/servers.md). null: in `weights/`, like all others",
    )


@dataclass
class HardwareConfig:
    name: str = key(MISSING, "name of the layout; `auto` records its choice here")
    device: str = key(MISSING, "`cpu` or `cuda`", choices=("cpu", "cuda"))
    nodes: int = key(1, "number of hosts; more than one needs launcher=slurm, or `rlx pod` or role commands on each by hand", low=1)
    gpus_per_node: int = key(0, "GPUs per host", low=0)
    gpu_memory_gb: float | None = key(
        None, "memory of a GPU in GiB: the plan says whether the run fits; null: that of this machine's GPUs, if the run is here", above=0
    )
    inference_replicas: int = key(1, "number of independent vLLM servers", low=1)
    tensor_parallel: int = key(1, "GPUs per vLLM server", low=1)
    trainer_processes: int | None = key(
        None,
        "trainer processes; on CUDA each has one GPU, and more than fit on one host take whole hosts; null: on CUDA one for each GPU "
        "that inference leaves free, on whole hosts if some are free; on CPU one for each host that inference leaves free",
        low=1,
    )
    colocate: bool = key(False, "inference and trainer share one GPU")
    cpu_threads: int = key(1, "threads of each role that computes on CPU; results are equal bit for bit only with equal counts", low=1)
