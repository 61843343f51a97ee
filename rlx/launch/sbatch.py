"""The sbatch script of a job: its options, what it does before rlx runs, and the command. Pure, but for the copy of the environment."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor

from rlx.config.errors import ConfigError
from rlx.config.schema import CommandConfig
from rlx.launch.container import RoleContainer, beside, caches_of, home_variables, mounts_of, on_all_hosts
from rlx.launch.starters import NOT_FOR_STEPS
from rlx.plan.environment import DEVICES, OF_A_GROUP, hub_variables
from rlx.runs.provenance import folders_of, snapshot_environment

BEGINNING = ["trap '' USR2 # the notice would kill the job before Python handles it", "set -e"]
"""First lines of the script, before `slurm.setup`."""

IMPORTS = "{} -c 'import rlx.launch.slurm'"  # fails here, where the reason is reported, and not in the job


class _Executor(SlurmExecutor):
    """submitit's SlurmExecutor without its own check for a cluster, so that it can write the script anywhere. rlx checks earlier."""

    @classmethod
    def affinity(cls) -> int:
        return 1


OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
"""Variables with which people choose a cluster and how to talk to it."""
OF_THIS_SHELL = ("RLX_RUN_TOKEN", "RLX_HOST", "RLX_SUPERVISOR_PID", DEVICES)
WAYS = ("SBATCH_MEM_PER_NODE", "SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU", "SBATCH_GPUS_PER_NODE")
"""Other ways to ask for the memory and the GPUs that the script asks for."""


@contextlib.contextmanager
def own_job_forgotten(options: Mapping[str, Any]) -> Iterator[None]:
    """Submit a job with these `sbatch_options` in this block, with the variables that it may inherit.

    The new job inherits no GPUs of this host, and nothing of a run or job in which it is submitted: `sbatch` passes all variables on, and
    `srun` would take them for its options. With SLURM_GPUS_PER_NODE of an interactive job, each step would see so many GPUs. A variable
    like SBATCH_PARTITION would win over the script, so it stays only where the script says nothing: a site's default account counts.
    """
    shell = {*OF_THIS_SHELL, *WAYS, *(f"SBATCH_{option.upper()}" for option in (*options, *options["additional_parameters"]))}
    names = [name for name in os.environ if name in shell or (name.startswith("SLURM_") and name not in OF_THE_CLUSTER)]
    taken = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(taken)


def check_directory(directory: Path) -> None:
    """Raise ConfigError if a run or sweep cannot be submitted from `directory`."""
    if os.pathsep in str(directory):
        raise ConfigError(
            f"PYTHONPATH cannot name {directory}, where the job's copy of the code would be: it has a {os.pathsep}\n"
            "  fix: give another run.name= or run.dir="
        )


def sbatch_options(cfg: CommandConfig, name: str, base: Path | None = None, code: Path | None = None) -> dict[str, Any]:
    """The submitit parameters of a job for this configuration. `code`: the code snapshot.

    `base`: the run's or sweep's directory, which a container has mounted; None: the working directory.
    """
    slurm, hardware = cfg.slurm, cfg.hardware
    further = {name.replace("-", "_"): value for name, value in slurm.options.items()}
    whole = slurm.cpus_per_node is None and not {"mem_per_cpu", "mem_per_gpu"} & set(further)  # --exclusive alone may not give all memory
    memory = f"{round(slurm.memory_gb * 1024)}M" if slurm.memory_gb is not None else "0" if whole else None
    options: dict[str, Any] = {
        "job_name": name,
        "nodes": hardware.nodes,
        "ntasks_per_node": 1,
        "time": slurm.time_minutes,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "cpus_per_task": slurm.cpus_per_node,
        "exclusive": True if slurm.cpus_per_node is None else None,
        "mem": memory,
        "gres": f"{slurm.gres}:{hardware.gpus_per_node}" if hardware.device == "cuda" else None,
        "setup": [
            f"cd {shlex.quote(os.getcwd())}",
            *_exports(cfg, code),
            *slurm.setup,
            *_again(slurm.setup, code),
            _in_container(cfg, base or Path.cwd(), code) if slurm.container else IMPORTS.format(shlex.quote(sys.executable)),
        ],
        "stderr_to_stdout": True,
        "use_srun": False,  # the supervisor runs in the batch script and starts the steps itself
        "array_parallelism": cfg.launcher.array_parallelism or 100_000,
        # --signal=B: only the batch script gets the signal, and that is the supervisor
        "additional_parameters": {"requeue": True, "signal": f"B:USR2@{slurm.signal_seconds}", **further},
    }
    left_out = {name for name, value in further.items() if value is None}
    options["additional_parameters"] = {k: v for k, v in options["additional_parameters"].items() if k not in left_out}
    return {name: value for name, value in options.items() if value is not None and name not in left_out}


def _exports(cfg: CommandConfig, code: Path | None) -> list[str]:
    path = {name: os.environ[name] for name in ("PYTHONPATH", "PYTHONSAFEPATH") if os.environ.get(name)}
    given = snapshot_environment(code) if code else path
    return [f"export {name}={shlex.quote(value)}" for name, value in (given | hub_variables(cfg) | home_variables(cfg)).items()]


def _again(setup: Sequence[str], code: Path | None) -> list[str]:
    """Lines after those of `slurm.setup` that put the code's copy first again: a line or module may have set PYTHONPATH.

    Without them, a job that waited or was requeued would run the checkout as it is then.
    """
    if not setup or code is None:
        return []
    folders, here = shlex.quote(os.pathsep.join(folders_of(code))), shlex.quote(os.getcwd())
    path = f'export PYTHONPATH={folders}"${{PYTHONPATH:+:$PYTHONPATH}}":{here}'
    return [f'case "${{PYTHONPATH-}}" in {folders}*) ;; *) {path} ;; esac', "export PYTHONSAFEPATH=1"]


def _in_container(cfg: CommandConfig, base: Path, code: Path | None) -> str:
    container = RoleContainer.of(cfg, mounts_of(cfg, base, code))
    assert container is not None
    made = ["mkdir", "-p", *(str(folder) for folder in dict.fromkeys(caches_of(cfg)))]
    dropped = (*NOT_FOR_STEPS, *OF_A_GROUP)
    return f"{on_all_hosts(made, cfg.hardware.nodes, dropped)}\n{beside(container, dropped)}"


def python_of(cfg: CommandConfig) -> str:
    """How the batch script starts Python, after the setup of `sbatch_options`."""
    container = cfg.slurm.container
    return f"rlx_supervise {shlex.quote(container.python)}" if container else f"exec {shlex.quote(sys.executable)}"


def make_executor(cfg: CommandConfig, name: str, folder: Path, code: Path | None = None) -> _Executor:
    """The executor that submits runs as one job or array. `folder`: for submitit's files, in the folder of the run or sweep."""
    options = sbatch_options(cfg, name, folder.parent, code)
    executor = _Executor(folder, python=python_of(cfg))
    given = {key: value for key, value in options.items() if key != "mem"}
    executor.update_parameters(**{**given, "setup": [*BEGINNING, *options["setup"]]})
    # Set directly: submitit would read `mem` as a number of GB, and would set a wckey that the cluster may not have.
    executor.parameters |= {"mem": options.get("mem"), "wckey": None}
    return executor


def sbatch_script(cfg: CommandConfig, name: str, folder: Path, runs: Sequence[Path], code: Path | None = None) -> str:
    """The sbatch script for one run or for an array, with the runs' directories. `code`: the code snapshot that they run."""
    executor = make_executor(cfg, name, folder, code)
    if len(runs) > 1:
        executor.parameters["map_count"] = len(runs)
    return executor._make_submission_file_text(executor._submitit_command_str, uid="")
