"""The rules for machines: the layout of GPUs, the servers' context, how ranks divide the work, and how new weights reach the servers."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

from rlx.config.row_budget import attention_widths
from rlx.config.rules import Describe, Rule, check_of, problem, table, target_name
from rlx.config.schema import CommandConfig, Config, EvaluatedRun, PlayRoot, TrainingRoot
from rlx.config.schema_model import CPU_WIDTHS
from rlx.config.validate import Problem

table(
    CommandConfig,
    [
        Rule(
            "hardware.tensor_parallel hardware.gpus_per_node",
            lambda c: c.hardware.device == "cuda" and c.reserved_servers and c.hardware.gpus_per_node % c.hardware.tensor_parallel,
            "the GPUs of a server must divide those of a host",
            "another hardware.tensor_parallel",
        ),
        Rule(
            "hardware.inference_replicas hardware.tensor_parallel hardware.trainer_processes hardware.nodes hardware.gpus_per_node",
            lambda c: c.hardware.device == "cuda" and c.num_gpus > c.hardware.nodes * c.hardware.gpus_per_node,
            "the layout needs {s.num_gpus} GPUs and has fewer",
            "fewer servers or trainer processes, or more hosts",
        ),
    ],
)

table(
    PlayRoot,
    [
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
            lambda c: c.started_servers and not _divides_heads(c),
            "tensor parallelism must divide the query heads, and divide the key and value heads or be a multiple of them",
            "another hardware.tensor_parallel",
        ),
        Rule(
            "model.head_dim hardware.device",
            lambda c: c.started_servers and c.hardware.device == "cpu" and _head_width(c) not in CPU_WIDTHS,
            "vLLM on a CPU does not compute attention for heads of this width, and ends at its first request",
            "a model whose heads have another width, or a GPU",
        ),
    ],
)


def _head_width(cfg: PlayRoot) -> int:
    return attention_widths(cfg.model)[0] // cfg.model.num_attention_heads


def _divides_heads(cfg: PlayRoot) -> bool:
    size, keys = cfg.hardware.tensor_parallel, cfg.model.num_key_value_heads
    return cfg.model.num_attention_heads % size == 0 and (keys % size == 0 or size % keys == 0)


table(
    EvaluatedRun,
    [
        Rule(
            "inference.gpu_memory_utilization hardware.colocate",
            lambda c: (
                c.num_gpus
                and c.started_servers
                and c.started_trainer_ranks
                and c.hardware.colocate
                and c.inference.gpu_memory_utilization > 0.7
            ),
            "the engine leaves too little of their shared GPU for the trainer",
            "inference.gpu_memory_utilization=0.4 or so, at most 0.7",
        ),
    ],
)

table(
    TrainingRoot,
    [
        Rule(
            "trainer.dp_replicate trainer.tp trainer.cp trainer.ep hardware.trainer_processes",
            lambda c: c.bench_target != "inference" and any(c.trainer_ranks % size for size in _groups(c)),
            "{s.trainer_ranks} trainer processes cannot be divided into equal groups: dp_replicate copies, cp · tp ranks a row, ep of "
            "experts, and tp and ep within a copy",
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
            "trainer.tp model.supports_tp",
            lambda c: c.trainer.tp > 1 and not c.model.supports_tp,
            "transformers has no plan that divides the attention of this family by heads",
            "trainer.tp=1; trainer.cp for long sequences",
        ),
        Rule(
            "ckpt.save_async hardware.device",
            lambda c: c.ckpt.save_async and c.hardware.device == "cuda",
            "writing checkpoints in the background was never seen to finish on a GPU",
            "ckpt.save_async=false",
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
                c.hardware.device == "cpu"
                and (c.model.attention == "varlen" or c.model.liger is True or c.model.logprob_backend == "triton")
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
    ],
)


def _groups(cfg: TrainingRoot) -> list[int]:
    trainer = cfg.trainer
    return [trainer.ranks_of_a_row, trainer.dp_replicate * trainer.tp, trainer.dp_replicate * trainer.ep]


table(
    Config,
    [
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
            lambda c: c.transfer and (c.lora.enabled or c.inference.base_url or c.hardware.device == "cpu"),
            "adapters, servers that the run did not start and CPUs take weights from files only",
            "weight_broadcast.type=filesystem",
        ),
        Rule(
            "weight_broadcast.type hardware.colocate hardware.nodes",
            lambda c: c.transfer and (c.transfer == "ipc") != (c.hardware.colocate and c.hardware.nodes == 1),
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
    ],
)


def _is_here(cfg: Config) -> bool:
    return cfg.launcher.name == "local" and not cfg.dry_run


NOT_FOR_SBATCH = {  # an option of sbatch that would break the run -> what sets it, or why it cannot be set
    "array": "a sweep (-m) is one array; launcher.array_parallelism limits it",
    "clusters": "submit on a login node of the other cluster",
    **dict.fromkeys(("error", "output", "open-mode"), "rlx shows the job's output as logs/attempt_N/job.log"),
    **dict.fromkeys(("export", "export-file"), "all processes need the variables of the shell that submits; slurm.setup sets others"),
    "gpus": "it counts the GPUs of the whole job; write gpus-per-node",
    "het-group": "all hosts of a run are alike: hardware.nodes",
    "input": "no process of a job reads its standard input",
    "no-kill": "a job whose host has failed must end, because that is how it comes back on other hosts",
    "no-requeue": "after the notice before its end a job goes back into the queue; launcher.max_requeues limits how often",
    "nodes": "hardware.nodes sets it",
    **dict.fromkeys(("ntasks", "ntasks-per-gpu", "ntasks-per-node"), "the supervisor is the job's one task"),
    **dict.fromkeys(("parsable", "quiet"), "rlx reads the job's id from sbatch's usual answer"),
    "signal": "slurm.signal_seconds sets it",
    "test-only": "dry_run=true submits nothing",
    "time": "slurm.time_minutes sets it",
    "wait": "launcher.wait=true waits for the run",
    "wrap": "rlx writes the script",
}
VARIABLES = {"array": "SBATCH_ARRAY_INX", "time": "SBATCH_TIMELIMIT"} | {
    name: f"SBATCH_{name.replace('-', '_').upper()}"
    for name in ("clusters", "error", "export", "gpus", "input", "no-kill", "no-requeue", "open-mode", "output", "signal", "wait")
}
"""Variables that sbatch reads as these options. They win over the script, and some sites set them for everybody."""
RUNTIMES = ("apptainer", "singularity", "enroot", "podman", "docker", "shifter")
MOUNT = re.compile(r"/[^:,]*(:/[^:,]*(:r[ow])?)?")
APART = {"--pid", "-p", "--containall", "-C"}  # options of Apptainer that give a container its own process ids


def _on_slurm(cfg: CommandConfig) -> bool:
    return cfg.launcher.name == "slurm"


SLURM: list[Rule[CommandConfig]] = [
    Rule(
        "launcher.name",
        lambda c: _on_slurm(c) and not c.dry_run and not all(map(shutil.which, ("sbatch", "srun", "squeue", "scontrol"))),
        "the commands of a SLURM cluster (sbatch, srun, squeue, scontrol) cannot be found here",
        "run the command on a login node, or dry_run=true to see what would be submitted",
    ),
    Rule(
        "hardware.gpus_per_node slurm.gpus_per_node",
        lambda c: _on_slurm(c) and c.num_gpus and c.slurm.gpus_per_node is not None and c.hardware.gpus_per_node > c.slurm.gpus_per_node,
        "the layout needs more GPUs per host than the cluster's nodes have",
        "another hardware=, or another slurm=",
    ),
    Rule(
        "launcher.preempt_grace launcher.grace slurm.signal_seconds",
        lambda c: _on_slurm(c) and c.launcher.preempt_grace + c.launcher.grace >= c.slurm.signal_seconds,
        "SLURM would kill the job before it can stop by itself",
        "a larger slurm.signal_seconds or a smaller launcher.preempt_grace",
    ),
    Rule(
        "slurm.signal_seconds slurm.time_minutes",
        lambda c: _on_slurm(c) and c.slurm.signal_seconds >= 60 * c.slurm.time_minutes,
        "the signal before the time limit would come before the job starts",
        "a larger slurm.time_minutes or a smaller slurm.signal_seconds",
    ),
    Rule(
        "slurm.container.python slurm.container.mounts",
        lambda c: (
            _on_slurm(c)
            and c.slurm.container
            and not (c.slurm.container.python.startswith("/") and all(map(MOUNT.fullmatch, c.slurm.container.mounts)))
        ),
        "the Python in the container is an absolute path, and a mount is /SOURCE, /SOURCE:/TARGET or /SOURCE:/TARGET:ro",
        "correct them",
    ),
    Rule(
        "slurm.container.options",
        lambda c: _on_slurm(c) and c.slurm.container and APART.intersection(c.slurm.container.options),
        "the job's script could not signal the supervisor, which would have process ids of its own",
        "leave out --pid and --containall",
    ),
    Rule(
        "slurm.prefix slurm.container.image",
        lambda c: _on_slurm(c) and c.slurm.container and any(word.rpartition("/")[2] in RUNTIMES for word in c.slurm.prefix),
        "one container in another",
        "leave one",
    ),
]
table(CommandConfig, SLURM)


@check_of(CommandConfig)
def options_of_sbatch(cfg: CommandConfig, of: Describe) -> Iterator[Problem]:
    if not _on_slurm(cfg):
        return
    for name, value in cfg.slurm.options.items():
        known = name.replace("_", "-")
        # sbatch takes the beginning of a long name, too.
        bad = next((each for each in sorted(NOT_FOR_SBATCH) if each.startswith(known)), None)
        if len(known) == 1 or name.startswith("-"):
            yield problem("options of sbatch are given by their long names, without dashes", [f"slurm.options.{name}"], "sbatch --help", of)
        elif known.startswith("container"):
            yield problem("the job's script would run in a container, without SLURM", [f"slurm.options.{name}"], "slurm.container", of)
        elif bad and (bad != "export" or not _exports_all(value)):
            yield problem(f"sbatch's {bad} would break the run", [f"slurm.options.{name}"], f"leave it out: {NOT_FOR_SBATCH[bad]}", of)
    for name, variable in VARIABLES.items():
        value = os.environ.get(variable)
        if value is not None and (name != "export" or not _exports_all(value)):
            yield Problem(f"sbatch's {name} would break the run: the variable {variable}={value}.\n  fix: unset it: {NOT_FOR_SBATCH[name]}")


def _exports_all(value: object) -> bool:
    """Whether a value of `export` leaves all variables to the job: `ALL`, or `ALL,NAME=VALUE`."""
    return str(value).partition(",")[0] == "ALL"
