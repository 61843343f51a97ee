"""The environment of a process: what it inherits, what the plan sets, and which of its host's GPUs it sees.

Made where the process is started, on the host where it starts: the plan names GPUs by their number on a host, and only there is it
known which devices those are. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlx.types import ProcessSpec

DEVICES = "CUDA_VISIBLE_DEVICES"
OF_A_GROUP = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""By these, torch takes a process for one of a group. A job script or a cluster may set them for its own use."""
OTHERS = ("TORCHELASTIC_", "SUBMITIT_")  # beginnings of variables that torchrun and submitit set for processes of theirs


class MissingGPU(ValueError):
    """The host shows fewer GPUs than the plan needs there."""


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What a process of a run may inherit: without the variables that would make it one of somebody else's group."""
    return {name: value for name, value in environment.items() if name not in OF_A_GROUP and not name.startswith(OTHERS)}


def environment_of(spec: ProcessSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process of the plan that starts on this host, whose own environment is given.

    Where the host's CUDA_VISIBLE_DEVICES names devices, GPU i of the plan is the i-th of them. Raises MissingGPU.
    """
    return inherited(environment) | spec.env | {DEVICES: ",".join(devices(spec, environment.get(DEVICES)))}


def devices(spec: ProcessSpec, visible: str | None) -> list[str]:
    """The process's GPUs by the host's names; `visible`: the value of the host's CUDA_VISIBLE_DEVICES, None where it is not set."""
    if visible is None:
        return [str(gpu) for gpu in spec.gpus]
    names = [part.strip() for part in visible.split(",") if part.strip()]
    if spec.gpus and max(spec.gpus) >= len(names):
        raise MissingGPU(
            f"the plan gives {spec.name} GPU {max(spec.gpus)} (counted from 0), and {DEVICES}={visible} names {len(names)}; "
            "name more devices, or choose a smaller hardware="
        )
    return [names[gpu] for gpu in spec.gpus]
