"""The configuration keys for starting and watching a run. The rest of the tree is in `rlx.config.schema`."""

# ruff: noqa: RUF009  (key and section return dataclass fields)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlx.config.keys import MISSING, key


@dataclass
class LauncherConfig:
    name: str = key(
        "local",
        "`local`: on this machine; `slurm`: as a job on a cluster; both through submitit",
        choices=("local", "slurm"),
    )
    grace: float = key(5.0, "seconds between SIGTERM and SIGKILL when a run is stopped", low=0)
    preempt_grace: float = key(60.0, "seconds after the notice of a preemption to finish or abandon the step and write a checkpoint", low=0)
    check_envs: bool = key(
        True,
        "load every environment once before anything starts or is submitted, also in a dry run; false: for a login node that cannot load "
        "them although the nodes of the job can",
    )
    heartbeat_timeout: float = key(900.0, "seconds without a heartbeat after which a role counts as hung", above=0)
    stall_timeout: float | None = key(
        300.0,
        "seconds without any progress after which the console and `logs/attempt_N/stall_*.txt` say what is waited for, with stacks; "
        "the run goes on; null: never",
        above=0,
    )
    log_tail_lines: int = key(20, "how many log lines of a failed role to show", low=0)
    array_parallelism: int | None = key(
        None, "how many runs of a sweep run at once; null: on SLURM all, on this machine as many as the GPUs allow, or one on CPU", low=1
    )
    max_requeues: int = key(
        20,
        "SLURM, `rlx pod`: how often in a row a run starts again (preemption, time limit, node failure) without a new step",
        low=0,
    )
    wait: bool = key(False, "SLURM: wait until the job ends and exit with the run's code; false: return once it is submitted")


@dataclass
class ContainerConfig:
    """The container in which the processes of a SLURM job run, the supervisor too. The nodes need no Python of their own then."""

    runtime: str = key(
        MISSING,
        "`pyxis`: options of srun, which runs enroot; `apptainer`, `singularity`: the command of that name on the nodes",
        choices=("pyxis", "apptainer", "singularity"),
    )
    image: str = key(MISSING, "the image, as the runtime names it: /images/rlx.sqsh, /images/rlx.sif, docker://registry#team/rlx:1")
    python: str = key(MISSING, "the Python with rlx's packages in the image, an absolute path: /opt/venv/bin/python")
    mounts: list[str] = key(
        [],
        "more folders, SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro. Mounted in any case, under their own names: the run's or sweep's "
        "directory with its copy of the code, the working directory, the absolute paths in the configuration, and the caches; "
        "but no system folders (/usr, /etc, /opt and the like), which are the image's",
    )
    workdir: str | None = key(None, "working directory inside; null: the one in which the command was given")
    home: bool = key(False, "mount the home directory too")
    options: list[str] = key([], "more options of the runtime, as they are: [--container-writable] for pyxis, [--writable-tmpfs]")


@dataclass
class SlurmConfig:
    """What rlx must know about a cluster to submit jobs there. None leaves a choice to the cluster. One file per cluster: `slurm=NAME`."""

    partition: str | None = key(None, "one or several partitions: `gpu` or `gpu,preemptible`")
    account: str | None = key(None, "account to charge")
    qos: str | None = key(None, "quality of service")
    constraint: str | None = key(None, "features that nodes must have")
    gres: str = key("gpu", "name of the GPU resource, as in --gres=gpu:8; with a type: `gpu:h100`")
    gpus_per_node: int | None = key(
        None, "GPUs per node, by which hardware=auto chooses; a layout with more GPUs per host is an error; 0: nodes without GPUs", low=0
    )
    layout: str | None = key(None, "the layout that hardware=auto chooses on this cluster; null: the largest that fits gpus_per_node")
    cpus_per_node: int | None = key(None, "processors requested per node; null: whole nodes (--exclusive)", low=1)
    memory_gb: float | None = key(
        None, "memory requested per node, in GiB; null: all of a whole node's; the cluster's default if cpus_per_node is set", above=0
    )
    time_minutes: int = key(1440, "time limit of the job, in minutes; the job requeues itself before the limit and resumes", low=1)
    signal_seconds: int = key(120, "how many seconds before the time limit or a preemption the job gets a signal", low=10)
    setup: list[str] = key([], "shell lines to run before the job's command, for modules and variables; the first that fails ends the job")
    prefix: list[str] = key([], "words before the command of every process but the supervisor: [numactl, --localalloc]")
    container: ContainerConfig | None = key(
        None,
        "the container in which all processes of a job run; null: none",
    )
    hf_home: str | None = key(
        None, "the nodes' cache of models and data sets, on a shared file system (HF_HOME), also for `rlx fetch`; null: that of the shell"
    )
    offline: bool = key(
        False, "the nodes have no internet: nothing is submitted unless the cache has it all (`rlx fetch`), and jobs ask no hub"
    )
    options: dict[str, Any] = key(
        {}, "further sbatch options, by their long names: {reservation: mine, exclude: node7}; null takes a line out: {mem: null}"
    )


@dataclass
class WandbConfig:
    project: str = key("rlx", "W&B project")
    entity: str | None = key(None, "W&B entity")
    mode: str = key("online", "`online` or `offline`", choices=("online", "offline"))
    group: str | None = key(None, "W&B group, such as the name of a sweep whose runs belong together")
    tags: list[str] = key([], "W&B tags")
    samples: int = key(8, "rollouts logged as a table every `interval` steps; 0 logs none", low=0)
    interval: int = key(10, "steps between tables of samples, and between sets of histograms", low=1)


@dataclass
class TensorboardConfig:
    samples: int = key(4, "rollouts logged as text every `interval` steps; 0 logs none", low=0)
    interval: int = key(10, "steps between texts of samples, and between sets of histograms", low=1)


@dataclass
class MlflowConfig:
    uri: str | None = key(None, "MLflow's tracking server or database; null: $MLFLOW_TRACKING_URI, else MLflow's own default")
    experiment: str = key("rlx", "MLflow experiment")
    samples: int = key(8, "rollouts logged as a table every `interval` steps; 0 logs none", low=0)
    interval: int = key(10, "steps between tables of samples", low=1)


@dataclass
class TrackioConfig:
    project: str = key("rlx", "Trackio project")
    space: str | None = key(None, "Hugging Face Space that shows it, `owner/name`; null: on this machine, for `trackio show`")
    samples: int = key(8, "rollouts logged as a table every `interval` steps; 0 logs none", low=0)
    interval: int = key(10, "steps between tables of samples", low=1)


@dataclass
class PrometheusConfig:
    port: int = key(0, "port of the run's newest metrics; 0: any free one. `endpoints/metrics.json` has the address and the key", low=0)
    host: str = key("127.0.0.1", "address that it listens on, of the host of the role that tracks")


@dataclass
class LoggerConfig:
    wandb: WandbConfig | None = key(None, "Weights & Biases; null is off")
    tensorboard: TensorboardConfig | None = key(None, "TensorBoard; null is off")
    mlflow: MlflowConfig | None = key(None, "MLflow; null is off")
    trackio: TrackioConfig | None = key(None, "Trackio; null is off")
    prometheus: PrometheusConfig | None = key(None, "an endpoint for Prometheus; null is off")


@dataclass
class ProfileConfig:
    """torch's profiler in the trainer. Its traces are in the run directory's `profile/`, for https://ui.perfetto.dev."""

    steps: list[int] = key([], "the steps to record, as `profile.steps=[10,12]`: operators and kernels of each rank; they take longer")
