"""The environment variables of a process: inherited ones, those of the plan, and the GPUs that it sees. Pure.

They are computed on the host where the process starts: the plan numbers the GPUs of a host from 0, and only the host knows which
devices these are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rlx.config.schema import CommandConfig
from rlx.plan.process_spec import ProcessSpec

DEVICES = "CUDA_VISIBLE_DEVICES"
OF_A_GROUP = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Variables by which torch recognizes a member of a process group. A job script or a cluster may set them for its own use."""
OTHERS = ("TORCHELASTIC_", "SUBMITIT_")  # prefixes of variables that torchrun and submitit set for their own processes


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process of a run may inherit: all except those that would make it a member of another process group."""
    return {name: value for name, value in environment.items() if name not in OF_A_GROUP and not name.startswith(OTHERS)}


def hub_variables(cfg: CommandConfig) -> dict[str, str]:
    """The variables by which the hub's libraries find the cluster's cache (`slurm.hf_home`) and, in a job, ask no hub (`slurm.offline`)."""
    if cfg.launcher.name != "slurm":
        return {}
    home, offline = cfg.slurm.hf_home, cfg.slurm.offline
    home = home and os.path.expanduser(home)
    # The libraries look at the other two first, which the user's own environment may have.
    caches = {"HF_HOME": home, "HF_HUB_CACHE": f"{home}/hub", "HF_DATASETS_CACHE": f"{home}/datasets"} if home else {}
    return caches | ({"HF_HUB_OFFLINE": "1"} if offline else {})


def environment_of(spec: ProcessSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process of the plan on this host. `environment`: the host's own variables.

    If the host's CUDA_VISIBLE_DEVICES is set, GPU i of the plan is the i-th device in it. Raises ValueError if there is none.
    """
    return inherited(environment) | spec.env | {DEVICES: ",".join(devices(spec, environment.get(DEVICES)))}


def devices(spec: ProcessSpec, visible: str | None) -> list[str]:
    """The host's names of the process's GPUs. `visible`: the host's CUDA_VISIBLE_DEVICES; `None` if it is not set."""
    if visible is None:
        return [str(gpu) for gpu in spec.gpus]
    names = [part.strip() for part in visible.split(",") if part.strip()]
    if spec.gpus and max(spec.gpus) >= len(names):
        raise ValueError(
            f"the plan gives {spec.name} GPU {max(spec.gpus)} (counted from 0), and {DEVICES}={visible} names {len(names)}; "
            "name more devices, or choose a smaller hardware="
        )
    return [names[gpu] for gpu in spec.gpus]
