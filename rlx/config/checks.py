"""The rules between configuration keys, one function a rule. Types and single values are checked in `tree.py`;
rules on the objective are in `checks_objective.py`.

A rule reads the configuration, asks the machine at most for what a file or the driver says, and answers with the problem or None.
`@rule(keys…)` names the keys that it needs: it is not asked when one of them has a problem already.
Knows nothing of hydra or torch.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rlx.config import checks_objective  # noqa: F401  (its rules are registered)
from rlx.config.gpus import visible_gpus
from rlx.config.rules import RULES, Show, rule
from rlx.config.schema import Config
from rlx.config.signatures import module_of
from rlx.config.tree import Origins, Problem, show

OWNED_BY_RLX = {  # vLLM's names of what other keys set
    "model": "model.name",
    "tokenizer": "model.name",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "max_model_len": "inference.max_model_len",
    "max_num_seqs": "inference.max_num_seqs",
    "gpu_memory_utilization": "inference.gpu_memory_utilization",
    "enforce_eager": "inference.enforce_eager",
    "tensor_parallel_size": "hardware.tensor_parallel",
    "data_parallel_size": "hardware.inference_replicas",
    "host": "inference.host",
    "port": "inference.port",
    "api_key": "inference.api_key",
    "seed": "seed",
}


def check(cfg: Config, origins: Origins | None = None, wrong: tuple[str, ...] = ()) -> list[Problem]:
    """Every rule's problem. `wrong`: keys that have a problem already."""
    origins = origins or Origins()

    def show_key(key: str) -> str:
        value: object = cfg
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        return origins.show(key, value)

    problems = []
    for keys, function in RULES:
        if not any(_overlap(key, bad) for key in keys for bad in wrong):
            problems += [Problem(text, keys) for text in function(cfg, show_key)]
    return problems


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(b + ".") or b.startswith(a + ".")


# batch arithmetic


@rule("orchestrator.batch_size", "orchestrator.rollouts_per_example")
def whole_groups(cfg: Config, of: Show) -> Iterator[str]:
    size, group = cfg.orchestrator.batch_size, cfg.orchestrator.rollouts_per_example
    if size % group:
        below = size // group * group
        fixes = f"{below} or {below + group}" if below else f"{group}"
        yield (
            f"a batch must hold whole groups: {of('orchestrator.batch_size')} is not a multiple of "
            f"{of('orchestrator.rollouts_per_example')}.\nUse orchestrator.batch_size={fixes}."
        )


@rule("trainer.num_minibatches", "orchestrator.batch_size", "orchestrator.rollouts_per_example")
def minibatches(cfg: Config, of: Show) -> Iterator[str]:
    groups = cfg.orchestrator.batch_size // cfg.orchestrator.rollouts_per_example
    if 0 < groups < cfg.trainer.num_minibatches:
        yield (
            f"a batch of {groups} group{'s' * (groups > 1)} cannot be split into more minibatches: {of('trainer.num_minibatches')}, "
            f"{of('orchestrator.batch_size')}, {of('orchestrator.rollouts_per_example')}.\nUse trainer.num_minibatches={groups} or fewer."
        )


# lengths


@rule("inference.max_model_len", "seq_len")
def engine_context(cfg: Config, of: Show) -> Iterator[str]:
    length = cfg.inference.max_model_len
    if length is not None and length < cfg.seq_len:
        yield (
            f"the engine's context is shorter than a training sample: {of('inference.max_model_len')} < {of('seq_len')}.\n"
            "Raise inference.max_model_len, or leave it null: then it is seq_len."
        )


@rule("sampling.max_tokens", "seq_len")
def room_for_prompt(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.sampling.max_tokens >= cfg.seq_len:
        yield (
            f"a completion leaves no room for its prompt: {of('sampling.max_tokens')} >= {of('seq_len')}.\n"
            "seq_len counts prompt and completion. Lower sampling.max_tokens or raise seq_len."
        )


@rule("envs", "seq_len")
def room_for_prompt_of_env(cfg: Config, of: Show) -> Iterator[str]:
    for name, env in cfg.envs.items():
        if env.sampling.max_tokens is not None and env.sampling.max_tokens >= cfg.seq_len:
            yield (
                f"a completion leaves no room for its prompt: {of(f'envs.{name}.sampling.max_tokens')} >= {of('seq_len')}.\n"
                f"seq_len counts prompt and completion. Lower envs.{name}.sampling.max_tokens or raise seq_len."
            )


@rule("sampling.min_tokens", "sampling.max_tokens")
def fewest_tokens(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.sampling.min_tokens > cfg.sampling.max_tokens:
        yield f"a turn cannot have both: {of('sampling.min_tokens')} fewest and {of('sampling.max_tokens')} most new tokens."


@rule("seq_len", "model.context_length")
def model_context(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.seq_len > cfg.model.context_length:
        yield (
            f"the model cannot attend that far: {of('seq_len')} > {of('model.context_length')}.\n"
            f"Use seq_len={cfg.model.context_length} or less, or another model."
        )


@rule("inference.max_model_len", "model.context_length")
def model_context_of_engine(cfg: Config, of: Show) -> Iterator[str]:
    length = cfg.inference.max_model_len
    if length is not None and length > cfg.model.context_length:
        yield f"the model cannot attend that far: {of('inference.max_model_len')} > {of('model.context_length')}."


@rule("trainer.micro_batch_tokens", "seq_len")
def row_holds_sample(cfg: Config, of: Show) -> Iterator[str]:
    tokens = cfg.trainer.micro_batch_tokens
    if tokens is not None and tokens < cfg.seq_len:
        yield (
            f"the longest sample does not fit into a packed row: {of('trainer.micro_batch_tokens')} < {of('seq_len')}.\n"
            f"Use trainer.micro_batch_tokens={cfg.seq_len} or more; null chooses."
        )


# sampling


@rule("sampling.top_k")
def top_k(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.sampling.top_k == 0:
        yield f"`sampling.top_k` must be -1 (all tokens) or at least 1: {of('sampling.top_k')}."


@rule("model.strips_thinking", "model.name", "orchestrator.trajectory_strategy")
def thinking_templates(cfg: Config, of: Show) -> Iterator[str]:
    if not cfg.model.strips_thinking or cfg.orchestrator.trajectory_strategy != "interleaved":
        return
    from renderers.base import MODEL_RENDERER_MAP  # half a second: only where it is asked for

    if cfg.model.name not in MODEL_RENDERER_MAP:  # whom it knows it renders with all reasoning kept (rlx.envs.chat)
        yield (
            f"the chat template removes earlier reasoning, so turns do not extend each other: {of('model.strips_thinking')} with "
            f"{of('orchestrator.trajectory_strategy')}.\nThe package `renderers`, which could keep it, does not know {of('model.name')}. "
            "Use orchestrator.trajectory_strategy=branching."
        )


# model


@rule("model.name", "model.warm_start")
def model_folder(cfg: Config, of: Show) -> Iterator[str]:
    name = cfg.model.name
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if not is_path or cfg.model.warm_start is not None:
        return
    folder = Path(name).expanduser()
    if not folder.is_dir():
        yield f"the model's folder does not exist: {of('model.name')} (seen from {Path.cwd()})."
    elif not (folder / "config.json").is_file():
        yield f"the model's folder has no config.json: {of('model.name')}. It must be a Hugging Face model folder."


@rule("model.num_attention_heads", "model.num_key_value_heads")
def head_groups(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.model.num_attention_heads % cfg.model.num_key_value_heads:
        yield f"key heads must divide query heads: {of('model.num_attention_heads')}, {of('model.num_key_value_heads')}."


@rule("model.attention", "hardware.device")
def varlen_attention(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.model.attention == "varlen" and cfg.hardware.device == "cpu":
        yield f"FlashAttention needs a GPU: {of('model.attention')} with {of('hardware.device')}. Use model.attention=auto."


@rule("model.liger", "hardware.device")
def liger_layers(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.model.liger is True and cfg.hardware.device == "cpu":
        yield f"Liger's layer kernels need a GPU: {of('model.liger')} with {of('hardware.device')}. Use model.liger=auto."


@rule("model.logprob_backend", "model.dtype", "hardware.device", "sampling.temperature", "envs")
def logprob_backend(cfg: Config, of: Show) -> Iterator[str]:
    name, cpu, remedy = cfg.model.logprob_backend, cfg.hardware.device == "cpu", "Use model.logprob_backend=auto."
    if name == "triton" and cpu:
        yield f"Triton needs a GPU: {of('model.logprob_backend')} with {of('hardware.device')}. {remedy}"
    if name == "liger" and cfg.model.dtype != "float32":
        yield f"Liger's op rounds its results to {of('model.dtype')}: {of('model.logprob_backend')}. {remedy}"
    own = {key: env.sampling.temperature for key, env in cfg.envs.items() if env.sampling.temperature is not None}
    if name == "liger" and len({own.get(key, cfg.sampling.temperature) for key in cfg.envs}) > 1:
        keys = ", ".join(of(f"envs.{key}.sampling.temperature") for key in own)
        yield f"Liger's op knows one temperature: {of('model.logprob_backend')} with {of('sampling.temperature')} and {keys}. {remedy}"


# hardware


@rule("hardware.tensor_parallel", "model.num_attention_heads", "model.num_key_value_heads")
def parallel_heads(cfg: Config, of: Show) -> Iterator[str]:
    size, heads, kv = cfg.hardware.tensor_parallel, cfg.model.num_attention_heads, cfg.model.num_key_value_heads
    if heads % size:
        yield (
            f"tensor parallelism must divide the heads: {of('model.num_attention_heads')} is not a multiple of "
            f"{of('hardware.tensor_parallel')}.\nUse {_divisors(heads)}."
        )
    elif kv % size and size % kv:
        yield (
            f"tensor parallelism must divide the key and value heads or be a multiple of them: {of('model.num_key_value_heads')}, "
            f"{of('hardware.tensor_parallel')}."
        )


def _divisors(number: int) -> str:
    return "hardware.tensor_parallel=" + ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


@rule("hardware", "inference.base_url")
def gpus_of_layout(cfg: Config, of: Show) -> Iterator[str]:
    h = cfg.hardware
    if h.device != "cuda":
        return
    if h.tensor_parallel > h.gpus_per_node:
        yield f"a server must fit on one host: {of('hardware.tensor_parallel')} > {of('hardware.gpus_per_node')}."
    elif h.gpus_per_node % h.tensor_parallel:
        yield (
            f"tensor parallelism must divide the GPUs of a host: {of('hardware.gpus_per_node')} is not a multiple of "
            f"{of('hardware.tensor_parallel')}.\nUse {_divisors(h.gpus_per_node)}."
        )
    elif cfg.num_gpus > h.nodes * h.gpus_per_node:
        how = "the larger of both, as they share" if h.shared else "their sum"
        yield (
            f"the layout needs {cfg.num_gpus} GPUs and has {h.nodes * h.gpus_per_node}: {of('hardware.inference_replicas')} x "
            f"{of('hardware.tensor_parallel')} for inference, {of('hardware.trainer_ranks')} for the trainer ({how}); "
            f"{of('hardware.nodes')} x {of('hardware.gpus_per_node')}.\nUse fewer replicas or ranks, or more hosts."
        )


@rule("hardware", "inference.gpu_memory_utilization", "inference.base_url")
def shared_memory(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.hardware.device == "cuda" and cfg.hardware.shared and not cfg.inference.base_url and cfg.inference.gpu_memory_utilization > 0.7:
        yield (
            f"the engine leaves no memory for the trainer on the GPU they share: {of('inference.gpu_memory_utilization')} with "
            f"{of('hardware.shared')}.\nUse inference.gpu_memory_utilization=0.4 or so."
        )


@rule("hardware", "launcher", "inference.base_url", "dry_run")
def gpus_present(cfg: Config, of: Show) -> Iterator[str]:
    h = cfg.hardware
    if cfg.dry_run or cfg.launcher.name != "local":  # the plan may be for another machine
        return
    if h.nodes > 1:
        yield f"launcher=local starts processes on this host only: {of('hardware.nodes')}. Use launcher=slurm, or dry_run=true to plan."
        return
    visible = visible_gpus() if h.device == "cuda" else 0
    if cfg.num_gpus > visible:
        has = "no GPU is" if visible == 0 else f"only {visible} {'is' if visible == 1 else 'are'}"
        yield (
            f"{of('hardware.name')} needs {cfg.num_gpus} GPU{'s' * (cfg.num_gpus > 1)} and {has} visible here.\n"
            "Use hardware=auto, which takes what is there, hardware=cpu, or dry_run=true to plan for another machine."
        )


@rule("hardware", "launcher", "slurm", "dry_run")
def slurm_cluster(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.launcher.name != "slurm":
        return
    missing = [command for command in ("sbatch", "srun", "squeue", "scontrol") if shutil.which(command) is None]
    if missing and not cfg.dry_run:
        yield (
            f"launcher=slurm needs the commands of a SLURM cluster, and {', '.join(missing)} cannot be found here.\n"
            "Start it on a login node, or use dry_run=true to see what would be submitted."
        )
    if cfg.slurm.gpus_per_node is not None and cfg.hardware.device == "cuda" and cfg.hardware.gpus_per_node > cfg.slurm.gpus_per_node:
        yield (
            f"the layout wants more GPUs on a host than the cluster's nodes have: {of('hardware.gpus_per_node')} > "
            f"{of('slurm.gpus_per_node')}.\nChoose another hardware=, or another slurm=."
        )
    if cfg.launcher.preempt_grace + cfg.launcher.grace >= cfg.slurm.signal_seconds:
        yield (
            f"SLURM ends the job before it has left by itself: {of('launcher.preempt_grace')} + {of('launcher.grace')} seconds are not "
            f"less than {of('slurm.signal_seconds')}.\nRaise slurm.signal_seconds or lower launcher.preempt_grace."
        )
    if cfg.slurm.signal_seconds >= 60 * cfg.slurm.time_minutes:
        yield (
            f"the job would be told of its end before it starts: {of('slurm.signal_seconds')} seconds are not less than "
            f"{of('slurm.time_minutes')} minutes.\nRaise slurm.time_minutes or lower slurm.signal_seconds."
        )


# going on


@rule("resume", "clean", "run", "dry_run")
def resuming(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.resume is None:
        return
    if cfg.clean:
        yield f"a run cannot be deleted and go on: {of('resume')}, {of('clean')}.\nLeave one of the two out."
    if (cfg.resume == "latest" or cfg.resume.isdecimal()) and cfg.run.name is None and cfg.run.dir is None:
        yield f"{of('resume')} does not say which run goes on.\nName it: run.name=NAME or run.dir=PATH; or fork it: resume=PATH."


# what must be installed


@rule("envs", "env")
def environments(cfg: Config, of: Show) -> Iterator[str]:
    if not cfg.envs:
        yield "there is no environment. Choose one or more: env=reverse_text, env=[math,reverse_text], or env.id=MODULE for your own."
    elif sum(env.weight for env in cfg.envs.values()) <= 0:
        weights = ", ".join(of(f"envs.{name}.weight") for name in cfg.envs)
        yield f"no environment has a share of the mix: {weights}. Give at least one a weight above 0."
    for name, env in cfg.envs.items():
        module = module_of(env.id)
        if not module.isidentifier():
            yield f"{of(f'envs.{name}.id')} names no Python module. Write the name of an installed environment, or owner/name."
        elif not _is_installed(module):
            yield (
                f"the environment of {of(f'envs.{name}.id')} is not installed: there is no module {module}.\n"
                f"Install it into this Python ({sys.executable}), for example with pip install -e DIRECTORY."
            )


def _is_installed(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None


@rule("logger", "dry_run")
def loggers(cfg: Config, of: Show) -> Iterator[str]:
    for name in ("wandb", "tensorboard"):
        if getattr(cfg.logger, name) is not None and not cfg.dry_run and not _is_installed(name):
            yield f"logger={name} needs the package {name}, which is not installed. Install it: pip install 'rlx[{name}]'."


# open nodes and servers


@rule("loss", "advantage", "optim")
def targets_named(cfg: Config, of: Show) -> Iterator[str]:
    for name in ("loss", "advantage", "optim"):
        target = getattr(cfg, name).get("_target_")
        if not isinstance(target, str) or "." not in target:
            yield f"`{name}._target_` must be the dotted path of a function or class: {show(target)}. Choose a preset: {name}=NAME."


@rule("inference.vllm")
def engine_arguments(cfg: Config, of: Show) -> Iterator[str]:
    for name in cfg.inference.vllm:
        plain = name.replace("-", "_")
        if plain in OWNED_BY_RLX:
            yield f"{of(f'inference.vllm.{name}')} has a key of its own: set {OWNED_BY_RLX[plain]} instead."


@rule("inference.base_url")
def server_urls(cfg: Config, of: Show) -> Iterator[str]:
    for url in cfg.inference.base_url:
        if not url.startswith(("http://", "https://")):
            yield f"`inference.base_url` must hold addresses like http://host:port: {of('inference.base_url')}."
