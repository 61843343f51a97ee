"""The rules for where and how a run executes: model, servers, hardware, run directory, loggers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlx.config.elsewhere import in_a_pod
from rlx.config.gpus import visible_gpus
from rlx.config.rules import OWN_LOSS, Show, rule
from rlx.config.schema import Config, TrainingRoot
from rlx.config.schema_model import CPU_WIDTHS
from rlx.config.signatures import is_installed

# trainer


@rule("trainer.ac.freq", "trainer.ac.mode", "trainer.ac_offloading")
def checkpointed_layers(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    asked = {"trainer.ac_offloading": cfg.trainer.ac_offloading, "trainer.ac.mode": cfg.trainer.ac.mode != "full"}
    for name in [key for key, on in asked.items() if on and not cfg.trainer.ac.freq]:
        yield f"{of(name)} is about checkpointed layers, but {of('trainer.ac.freq')} means none. Set trainer.ac.freq=1, or leave it out."


# model


def is_path(name: str) -> bool:
    """Whether a model's name can only be a folder."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


@rule("model.name", "model.warm_start")
def model_folder(cfg: Config, of: Show) -> Iterator[str]:
    name = cfg.model.name
    if not is_path(name):
        return
    if cfg.model.warm_start is not None:
        yield (
            f"rlx would make the model itself, and these weights would not be used: {of('model.name')} with model.warm_start.\n"
            "Use model=tiny_trained for the tiny model from a folder, or another model's option."
        )
        return
    folder = Path(name).expanduser()
    if not folder.is_dir():
        yield f"the model's folder does not exist: {of('model.name')}; the current directory is {Path.cwd()}. Correct the path."
    elif (folder / "adapter_config.json").is_file():
        yield (
            f"the folder holds adapters, not a model: {of('model.name')}.\n"
            "Merge them into their model first (docs/lora.md), or name that model."
        )
    elif not (folder / "config.json").is_file():
        yield f"the model's folder has no config.json: {of('model.name')}. It must be a Hugging Face model folder."


@rule("model.name", "model.warm_start")
def name_of_a_model_that_rlx_makes(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.model.warm_start is not None and "/" in cfg.model.name:
        yield (
            f"{of('model.name')} would only be a label: the chosen model has a warm start, so rlx makes it itself.\n"
            "Choose a model that is loaded, such as model=qwen3_0_6b, or a file of your own with the sizes of that model."
        )


@rule("seq_len", "model.context_length")
def model_context(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.seq_len > cfg.model.context_length:
        yield (
            f"training samples are longer than the model's context: {of('seq_len')} > {of('model.context_length')}.\n"
            f"Use seq_len={cfg.model.context_length} or less, or another model."
        )


@rule("model.num_attention_heads", "model.num_key_value_heads")
def head_groups(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.model.num_attention_heads % cfg.model.num_key_value_heads:
        yield f"key and value heads must divide the query heads: {of('model.num_attention_heads')}, {of('model.num_key_value_heads')}."


@rule("model.attention", "hardware.device")
def varlen_attention(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.model.attention == "varlen" and cfg.hardware.device == "cpu":
        yield f"FlashAttention needs a GPU: {of('model.attention')} with {of('hardware.device')}. Use model.attention=auto."


@rule("model.liger", "hardware.device")
def liger_layers(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.model.liger is True and cfg.hardware.device == "cpu":
        yield f"Liger's layer kernels need a GPU: {of('model.liger')} with {of('hardware.device')}. Use model.liger=auto."


@rule("model.logprob_backend", "model.dtype", "hardware.device", "sampling.temperature", "envs", OWN_LOSS)
def logprob_backend(cfg: Config, of: Show) -> Iterator[str]:
    name, cpu, remedy = cfg.model.logprob_backend, cfg.hardware.device == "cpu", "Use model.logprob_backend=auto."
    if name == "triton" and cpu:
        yield f"Triton needs a GPU: {of('model.logprob_backend')} with {of('hardware.device')}. {remedy}"
    if name == "liger" and cfg.model.dtype != "float32":
        yield f"Liger's op rounds its results to {of('model.dtype')}, so it needs float32: {of('model.logprob_backend')}. {remedy}"
    own = {key: env.sampling.temperature for key, env in cfg.envs.items() if env.sampling.temperature is not None}
    if name == "liger" and len({own.get(key, cfg.sampling.temperature) for key in cfg.envs}) > 1:
        keys = ", ".join(of(f"envs.{key}.sampling.temperature") for key in own)
        yield f"Liger's op supports one temperature: {of('model.logprob_backend')} with {of('sampling.temperature')} and {keys}. {remedy}"


# servers


@rule("inference.max_model_len", "seq_len")
def engine_context(cfg: Config, of: Show) -> Iterator[str]:
    length = cfg.inference.max_model_len
    if length is not None and length < cfg.seq_len:
        yield (
            f"the engine's context is shorter than a training sample: {of('inference.max_model_len')} < {of('seq_len')}.\n"
            "Raise inference.max_model_len, or set it to null, which means seq_len."
        )


@rule("inference.max_model_len", "model.context_length")
def model_context_of_engine(cfg: Config, of: Show) -> Iterator[str]:
    length = cfg.inference.max_model_len
    if length is not None and length > cfg.model.context_length:
        yield (
            f"the engine's context is longer than the model's: {of('inference.max_model_len')} > {of('model.context_length')}.\n"
            "Lower inference.max_model_len, or set it to null, which means seq_len."
        )


@rule("inference.base_url")
def server_urls(cfg: Config, of: Show) -> Iterator[str]:
    for url in cfg.inference.base_url:
        if not url.startswith(("http://", "https://")):
            yield f"`inference.base_url` must hold addresses like http://host:port: {of('inference.base_url')}."


# hardware


@rule("hardware", "inference.base_url", "model.num_attention_heads", "model.num_key_value_heads")
def parallel_heads(cfg: Config, of: Show) -> Iterator[str]:
    size, heads, kv = cfg.hardware.tensor_parallel, cfg.model.num_attention_heads, cfg.model.num_key_value_heads
    if not cfg.num_servers:
        return
    if heads % size:
        yield (
            f"tensor parallelism must divide the query heads: {of('model.num_attention_heads')} is not a multiple of "
            f"{of('hardware.tensor_parallel')}.\nUse {_divisors(heads)}."
        )
    elif kv % size and size % kv:
        yield (
            f"tensor parallelism must divide the key and value heads or be a multiple of them: {of('model.num_key_value_heads')}, "
            f"{of('hardware.tensor_parallel')}. Choose another hardware.tensor_parallel."
        )


@rule("hardware", "inference.base_url", "model.head_dim", "model.warm_start")
def heads_on_a_cpu(cfg: Config, of: Show) -> Iterator[str]:
    # Without `model.head_dim` the server finds out, before it loads the model: many widths do not follow from the other keys.
    made = cfg.model.warm_start
    width = made.head_dim if made is not None else cfg.model.head_dim
    if cfg.hardware.device == "cpu" and cfg.num_servers and width is not None and width not in CPU_WIDTHS:
        yield (
            f"vLLM computes no attention with heads {width} wide on a CPU: "
            f"{of('model.head_dim' if made is None else 'model.warm_start.head_dim')}.\n"
            f"It computes widths of {', '.join(map(str, CPU_WIDTHS))}. Use one of them, another model, or a GPU."
        )


def _divisors(number: int) -> str:
    return "hardware.tensor_parallel=" + ", ".join(str(n) for n in range(1, min(number, 4096) + 1) if number % n == 0)


@rule("hardware", "inference.base_url")
def gpus_of_layout(cfg: Config, of: Show) -> Iterator[str]:
    h = cfg.hardware
    if h.device != "cuda":
        return
    servers = cfg.servers_placed > 0
    if servers and h.tensor_parallel > h.gpus_per_node:
        yield f"a server must fit on one host: {of('hardware.tensor_parallel')} > {of('hardware.gpus_per_node')}. Lower the first."
    elif servers and h.gpus_per_node % h.tensor_parallel:
        yield (
            f"tensor parallelism must divide the GPUs of a host: {of('hardware.gpus_per_node')} is not a multiple of "
            f"{of('hardware.tensor_parallel')}.\nUse {_divisors(h.gpus_per_node)}."
        )
    elif cfg.num_gpus > h.nodes * h.gpus_per_node:
        how = "the larger number counts, because they share GPUs" if h.shared else "the numbers add up"
        trainer = "at least 1" if h.trainer_processes is None else of("hardware.trainer_processes")
        yield (
            f"the layout needs {cfg.num_gpus} GPUs but has {h.nodes * h.gpus_per_node}. Needed for inference: "
            f"{of('hardware.inference_replicas')} x {of('hardware.tensor_parallel')}; for the trainer: {trainer} ({how}). "
            f"Available: {of('hardware.nodes')} x {of('hardware.gpus_per_node')}.\nUse fewer servers or trainer processes, or more hosts."
        )


@rule("hardware", "inference.gpu_memory_utilization", "inference.base_url")
def shared_memory(cfg: Config, of: Show) -> Iterator[str]:
    both = cfg.num_servers and cfg.own_ranks  # start
    if both and cfg.hardware.device == "cuda" and cfg.hardware.shared and cfg.inference.gpu_memory_utilization > 0.7:
        yield (
            f"the engine leaves too little memory for the trainer on their shared GPU: {of('inference.gpu_memory_utilization')} with "
            f"{of('hardware.shared')}.\nUse inference.gpu_memory_utilization=0.4 or so, at most 0.7."
        )


@rule("hardware", "launcher", "inference.base_url", "dry_run")
def gpus_present(cfg: Config, of: Show) -> Iterator[str]:
    h = cfg.hardware
    if cfg.dry_run or cfg.launcher.name != "local" or in_a_pod():  # a plan may be for another machine
        return
    if h.nodes > 1:
        yield (
            f"launcher=local starts processes on this host only: {of('hardware.nodes')}. Use launcher=slurm,\nstart "
            "each host by hand (`rlx pod`) or each role (`rlx trainer`; docs/cluster.md), or dry_run=true to plan."
        )
        return
    visible = visible_gpus() if h.device == "cuda" else 0
    if cfg.num_gpus > visible:
        has = "no GPU is" if visible == 0 else f"only {visible} {'is' if visible == 1 else 'are'}"
        yield (
            f"{of('hardware.name')} needs {cfg.num_gpus} GPU{'s' * (cfg.num_gpus > 1)}, but {has} visible here.\n"
            "Use hardware=auto, which fits the GPUs here, hardware=cpu, or dry_run=true to plan for another machine."
        )


# the run


@rule("run.name", "run.dir")
def printable_names(cfg: Any, of: Show) -> Iterator[str]:
    """Scripts are written with them, and they are shown."""
    for key, value in (("run.name", cfg.run.name), ("run.dir", cfg.run.dir)):
        if value is not None and not str(value).isprintable():
            yield f"a line break or another character that steers a terminal is no part of a name: {of(key)}. Choose another."


@rule("scheduler", "optim")
def learning_rates(cfg: TrainingRoot, of: Show) -> Iterator[str]:
    schedule, peak = cfg.scheduler, cfg.optim.get("lr")
    if schedule.type == "constant":
        for name, idle in (("decay_steps", schedule.decay_steps is None), ("min_lr", schedule.min_lr == 0)):
            if not idle and of.typed(f"scheduler.{name}"):  # a run's own file may have it, and must go on
                yield (
                    f"a constant learning rate does not decay, so {of(f'scheduler.{name}')} has no effect with {of('scheduler.type')}.\n"
                    "Set scheduler.type=cosine or linear, or leave it out."
                )
    elif isinstance(peak, int | float) and schedule.min_lr > peak and (of.typed("scheduler.min_lr") or of.typed("optim.lr")):
        yield (
            f"the learning rate would rise at the end: {of('scheduler.min_lr')} > {of('optim.lr')}. "
            "Set scheduler.min_lr to a tenth of optim.lr, or to 0."
        )


@rule("resume", "clean", "run", "dry_run")
def resuming(cfg: Config, of: Show) -> Iterator[str]:
    if cfg.resume is None:
        return
    if cfg.clean:
        yield f"a run cannot be both deleted and resumed: {of('resume')}, {of('clean')}.\nRemove one of the two."
    if (cfg.resume == "latest" or cfg.resume.isdecimal()) and cfg.run.name is None and cfg.run.dir is None:
        yield f"{of('resume')} does not say which run to resume.\nName it: run.name=NAME or run.dir=PATH; or fork a run: resume=PATH."


@rule("logger", "dry_run")
def loggers(cfg: Config, of: Show) -> Iterator[str]:
    for name in ("wandb", "tensorboard"):
        if getattr(cfg.logger, name) is not None and not cfg.dry_run and not is_installed(name):
            yield f"logger={name} needs the package {name}, which is not installed. Install it: pip install 'rlx[{name}]'."
