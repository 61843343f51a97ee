"""The part of the configuration tree that says where a run is started and how it is watched. See `rlx.config.schema`."""

# ruff: noqa: RUF009  (key and section return dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlx.config.keys import key


@dataclass
class LauncherConfig:
    name: str = key("local", "`local`: on this machine; `slurm`: a job of a cluster; both through submitit", choices=("local", "slurm"))
    grace: float = key(5.0, "seconds between SIGTERM and SIGKILL when the run is stopped", low=0)
    preempt_grace: float = key(60.0, "seconds from the notice of a preemption to finish or give up the step and write a checkpoint", low=0)
    heartbeat_timeout: float = key(900.0, "a role that says nothing for this many seconds is taken for hung", above=0)
    last_lines: int = key(20, "log lines of the failed role that are shown", low=0)
    array_parallelism: int | None = key(
        None, "runs of a sweep at the same time; null: on SLURM all, on this machine as many as have GPUs, or one on CPU", low=1
    )
    max_requeues: int = key(
        20, "SLURM: how often a job goes back into the queue after a preemption, a time limit or a node's failure", low=0
    )
    code_changes: str = key(
        "refuse",
        "SLURM: `refuse` or `warn` when the code is not what it was at submission once the job starts or comes back; `snapshot`: it runs a "
        "copy of the code that is made when it is submitted",
        choices=("refuse", "warn", "snapshot"),
    )
    wait: bool = key(False, "SLURM: stay in front of the job until it ends, with the run's exit code; else return once it is submitted")


@dataclass
class SlurmConfig:
    """What must be known of a cluster to submit there; null is left to the cluster. One file for each cluster, chosen by `slurm=NAME`."""

    partition: str | None = key(None, "partition or partitions: `gpu` or `gpu,preemptible`")
    account: str | None = key(None, "account to charge")
    qos: str | None = key(None, "quality of service")
    constraint: str | None = key(None, "features that nodes must have")
    gres: str = key("gpu", "name of the GPU resource, as in --gres=gpu:8; with a type: `gpu:h100`")
    gpus_per_node: int | None = key(None, "GPUs a node has; a layout with more of them on a host is refused", low=1)
    cpus_per_node: int | None = key(None, "processors taken of each node; null: whole nodes (--exclusive)", low=1)
    memory_gb: float | None = key(None, "memory taken of each node, GiB; null: all of it", above=0)
    time_minutes: int = key(1440, "time limit of the job; it requeues itself before that and goes on", low=1)
    signal_seconds: int = key(120, "how long before the time limit, or a preemption, the job is told", low=10)
    setup: list[str] = key([], "shell lines before the job's command: modules, variables")
    container: list[str] = key([], "what stands before every role's command: [apptainer, exec, --nv, image.sif]")
    options: dict[str, Any] = key({}, "further options of sbatch by their long names: {reservation: mine, exclude: node7}")


@dataclass
class WandbConfig:
    project: str = key("rlx", "W&B project")
    entity: str | None = key(None, "W&B entity")
    mode: str = key("online", "`online` or `offline`", choices=("online", "offline"))
    samples: int = key(8, "rollouts logged as a table every `interval` steps; 0 is none", low=0)
    interval: int = key(10, "steps between two tables of samples, and between two sets of histograms", low=1)


@dataclass
class TensorboardConfig:
    samples: int = key(4, "rollouts logged as text every `interval` steps; 0 is none", low=0)
    interval: int = key(10, "steps between two texts of samples, and between two sets of histograms", low=1)


@dataclass
class LoggerConfig:
    wandb: WandbConfig | None = key(None, "Weights & Biases; null is off")
    tensorboard: TensorboardConfig | None = key(None, "TensorBoard; null is off")
