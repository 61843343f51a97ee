"""The rules for machines: the layout of GPUs, the servers' context, how ranks divide the work, and how new weights reach the servers."""

from __future__ import annotations

from rlx.config.rules import Rule, table, target_name
from rlx.config.schema import CommandConfig, Config, EvaluatedRun, PlayRoot, TrainingRoot

LAYOUT: list[Rule[CommandConfig]] = [
    Rule(
        "hardware.tensor_parallel hardware.gpus_per_node",
        lambda c: c.hardware.device == "cuda" and c.servers_placed and c.hardware.gpus_per_node % c.hardware.tensor_parallel,
        "the GPUs of a server must divide those of a host",
        "another hardware.tensor_parallel",
    ),
    Rule(
        "hardware.inference_replicas hardware.tensor_parallel hardware.trainer_processes hardware.nodes hardware.gpus_per_node",
        lambda c: c.hardware.device == "cuda" and c.num_gpus > c.hardware.nodes * c.hardware.gpus_per_node,
        "the layout needs {s.num_gpus} GPUs and has fewer",
        "fewer servers or trainer processes, or more hosts",
    ),
]
table(CommandConfig, LAYOUT)

SERVERS: list[Rule[PlayRoot]] = [
    Rule(
        "inference.max_model_len seq_len",
        lambda c: c.max_model_len < c.seq_len,
        "the engine's context is shorter than a sample",
        "inference.max_model_len=null, which means seq_len",
    ),
    Rule(
        "inference.max_model_len model.context_length",
        lambda c: c.inference.max_model_len and c.inference.max_model_len > c.model.context_length,
        "the engine's context is longer than the model's",
        "inference.max_model_len=null, which means seq_len",
    ),
    Rule(
        "model.num_attention_heads model.num_key_value_heads hardware.tensor_parallel",
        lambda c: c.num_servers and not _divides_heads(c),
        "tensor parallelism must divide the query heads, and divide the key and value heads or be a multiple of them",
        "another hardware.tensor_parallel",
    ),
]
table(PlayRoot, SERVERS)


def _divides_heads(cfg: PlayRoot) -> bool:
    size, keys = cfg.hardware.tensor_parallel, cfg.model.num_key_value_heads
    return cfg.model.num_attention_heads % size == 0 and (keys % size == 0 or size % keys == 0)


SHARED_GPU: list[Rule[EvaluatedRun]] = [
    Rule(
        "inference.gpu_memory_utilization hardware.shared",
        lambda c: c.num_gpus and c.num_servers and c.own_ranks and c.hardware.shared and c.inference.gpu_memory_utilization > 0.7,
        "the engine leaves too little of their shared GPU for the trainer",
        "inference.gpu_memory_utilization=0.4 or so, at most 0.7",
    ),
]
table(EvaluatedRun, SHARED_GPU)

RANKS: list[Rule[TrainingRoot]] = [
    Rule(
        "trainer.dp_replicate trainer.tp trainer.cp trainer.ep hardware.trainer_processes",
        lambda c: c.measured != "inference" and any(c.trainer_ranks % size for size in _groups(c)),
        "{s.trainer_ranks} trainer processes cannot be divided into equal groups: dp_replicate copies, cp · tp ranks a row, ep of experts, "
        "and tp and ep within a copy",
        "sizes whose products divide the number of processes",
    ),
    Rule(
        "model.num_attention_heads trainer.cp trainer.tp",
        lambda c: c.model.num_attention_heads % c.trainer.ranks_of_a_row,
        "the ranks of a row (cp · tp) divide the query heads",
        "another trainer.cp or trainer.tp",
    ),
    Rule(
        "model.num_key_value_heads trainer.tp",
        lambda c: c.model.num_key_value_heads % c.trainer.tp,
        "tensor parallelism divides the key and value heads",
        "another trainer.tp, or trainer.cp, which repeats them",
    ),
    Rule(
        "trainer.tp model.divides_heads",
        lambda c: c.trainer.tp > 1 and not c.model.divides_heads,
        "transformers has no plan that divides the attention of this family by heads",
        "trainer.tp=1; trainer.cp for long sequences",
    ),
    Rule(
        "trainer.ep model.num_experts",
        lambda c: c.trainer.ep > 1 and (c.model.num_experts is None or c.model.num_experts % c.trainer.ep),
        "expert parallelism divides the experts of a layer",
        "a trainer.ep that divides model.num_experts; 1 for a model without experts",
    ),
    Rule(
        "trainer.cp trainer.tp trainer.ep trainer.compile",
        lambda c: c.trainer.ranks_of_a_row * c.trainer.ep > 1 and c.trainer.compile,
        "layers that exchange tokens with other ranks are not compiled",
        "trainer.compile=false",
    ),
    Rule(
        "trainer.cp trainer.tp model.attention",
        lambda c: c.trainer.ranks_of_a_row > 1 and c.model.attention == "rows",
        "packed rows are cut into pieces, but this computes every sequence whole",
        "model.attention=auto",
    ),
    Rule(
        "optim._target_ trainer.fsdp_cpu_offload",
        lambda c: target_name(c.optim) == "Muon" and c.trainer.fsdp_cpu_offload,
        "Muon makes its steps from whole matrices on the GPU, but the shards would lie in host memory",
        "trainer.fsdp_cpu_offload=false, or optim=adamw",
    ),
    Rule(
        "trainer.fsdp_cpu_offload trainer.optim_cpu_offload",
        lambda c: (c.trainer.fsdp_cpu_offload or c.trainer.optim_cpu_offload) and c.hardware.device == "cpu",
        "on a CPU everything lies in host memory already",
        "leave them out",
    ),
    Rule(
        "trainer.fsdp_cpu_offload trainer.optim_cpu_offload",
        lambda c: c.trainer.fsdp_cpu_offload and c.trainer.optim_cpu_offload,
        "the first keeps the optimizer's state in host memory, too",
        "one of them",
    ),
    Rule(
        "model.attention model.liger model.logprob_backend hardware.device",
        lambda c: (
            c.hardware.device == "cpu" and (c.model.attention == "varlen" or c.model.liger is True or c.model.logprob_backend == "triton")
        ),
        "FlashAttention (varlen), Liger's layers and Triton need a GPU",
        "auto for each",
    ),
    Rule(
        "model.logprob_backend model.dtype",
        lambda c: c.model.logprob_backend == "liger" and c.model.dtype != "float32",
        "Liger's op rounds its results to this dtype",
        "model.logprob_backend=auto",
    ),
]
table(TrainingRoot, RANKS)


def _groups(cfg: TrainingRoot) -> list[int]:
    trainer = cfg.trainer
    return [trainer.ranks_of_a_row, trainer.dp_replicate * trainer.tp, trainer.dp_replicate * trainer.ep]


WEIGHTS: list[Rule[Config]] = [
    Rule(
        "model.logprob_backend sampling.temperature",
        lambda c: (
            c.model.logprob_backend == "liger" and len({e.sampling.temperature or c.sampling.temperature for e in c.envs.values()}) > 1
        ),
        "Liger's op has one temperature, and the environments have several",
        "model.logprob_backend=auto",
    ),
    Rule(
        "weight_broadcast.type lora.rank inference.base_url hardware.device",
        lambda c: c.transfer and (c.lora.on or c.inference.base_url or c.hardware.device == "cpu"),
        "adapters, servers that the run did not start and CPUs take weights from files only",
        "weight_broadcast.type=filesystem",
    ),
    Rule(
        "weight_broadcast.type hardware.shared hardware.nodes",
        lambda c: c.transfer and (c.transfer == "ipc") != (c.hardware.shared and c.hardware.nodes == 1),
        "ipc is for trainer and servers on the same GPUs of one host, nccl for different GPUs",
        "the other one, or weight_broadcast.type=filesystem",
    ),
    Rule(
        "weight_broadcast.folder hardware.nodes inference.base_url",
        lambda c: c.memory_folder and (c.hardware.nodes > 1 or c.inference.base_url),
        "servers elsewhere cannot read what is in the memory of this host",
        "weight_broadcast.folder=null",
    ),
    Rule(
        "weight_broadcast.folder",
        lambda c: c.memory_folder and (not c.memory_folder.is_absolute() or (_is_here(c) and not c.memory_folder.is_dir())),
        "a folder in memory is named by its absolute path, and exists",
        "weight_broadcast.folder=/dev/shm, or null",
    ),
]
table(Config, WEIGHTS)


def _is_here(cfg: Config) -> bool:
    return cfg.launcher.name == "local" and not cfg.dry_run
