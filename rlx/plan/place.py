"""Assigns a host and GPUs to each inference replica and trainer rank. Pure: hosts and GPUs are just numbers here."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.config.errors import ConfigError
from rlx.config.schema import PlayRoot, TrainingRoot
from rlx.types import ProcessSpec

Place = tuple[int, tuple[int, ...]]  # index of a host, and indices of GPUs on it


def place_servers(cfg: PlayRoot) -> list[Place]:
    """Places of the inference replicas of a command that trains nothing: hosts and GPUs in their order.

    Raises ConfigError if the layout does not fit.
    """
    hardware = cfg.hardware
    if hardware.device == "cpu":
        return [(replica % hardware.nodes, ()) for replica in range(cfg.num_servers)]
    by_host = hardware.gpus_per_node // hardware.tensor_parallel
    if cfg.num_servers > by_host * hardware.nodes:
        raise ConfigError(
            f"hardware={hardware.name}: {cfg.num_servers} inference replicas × tensor_parallel={hardware.tensor_parallel} do not fit on "
            f"{hardware.nodes} × {hardware.gpus_per_node} GPUs (hardware.nodes × hardware.gpus_per_node), a replica on one host.\n"
            "  fix: lower hardware.inference_replicas or hardware.tensor_parallel, or choose another hardware="
        )
    places = []
    for replica in range(cfg.num_servers):
        first = replica % by_host * hardware.tensor_parallel
        places.append((replica // by_host, tuple(range(first, first + hardware.tensor_parallel))))
    return places


def place(cfg: TrainingRoot) -> tuple[list[Place], list[Place]]:
    """`(places of the inference replicas, places of the trainer, one per host)`. GPUs go to inference first, then to the trainer.

    On CPU with several hosts, the trainer gets the hosts that inference leaves. Raises ConfigError if the layout does not fit.
    """
    hardware = cfg.hardware
    replicas = cfg.num_servers
    if hardware.device == "cpu":
        return _place_on_cpu(cfg, replicas)
    node, free = 0, 0  # the next free GPU
    inference = []
    for _ in range(replicas):
        if free + hardware.tensor_parallel > hardware.gpus_per_node:
            node, free = node + 1, 0
        inference.append((node, tuple(range(free, free + hardware.tensor_parallel))))
        free += hardware.tensor_parallel
    if hardware.shared:
        node, free = 0, 0
    elif free + cfg.trainer_ranks > hardware.gpus_per_node and free > 0:
        node, free = node + 1, 0
    hosts, left = divmod(cfg.trainer_ranks, hardware.gpus_per_node) if cfg.trainer_ranks > hardware.gpus_per_node else (1, 0)
    share = cfg.trainer_ranks // hosts
    trainers = [(node + i, tuple(range(free, free + share))) for i in range(hosts)]
    needs = max([gpus[-1] + 1 for _, gpus in inference if gpus] + [share])
    if trainers[-1][0] >= hardware.nodes or needs > hardware.gpus_per_node or left:
        raise ConfigError(
            f"hardware={hardware.name}: {replicas} inference replicas × tensor_parallel={hardware.tensor_parallel} and "
            f"trainer_processes={cfg.trainer_ranks} do not fit on {hardware.nodes} × {hardware.gpus_per_node} GPUs "
            "(hardware.nodes × hardware.gpus_per_node), a replica on one host, and the trainer on one host or on whole ones.\n"
            "  fix: lower hardware.inference_replicas, hardware.tensor_parallel or hardware.trainer_processes, or choose another hardware="
        )
    return inference, trainers


def _place_on_cpu(cfg: TrainingRoot, replicas: int) -> tuple[list[Place], list[Place]]:
    hardware = cfg.hardware
    if hardware.nodes == 1:
        return [(0, ())] * replicas, [(0, ())]
    first = min(replicas, hardware.nodes - 1)  # hosts of inference
    hosts = hardware.nodes - first
    if cfg.trainer_ranks % hosts:
        raise ConfigError(
            f"hardware={hardware.name}: of hardware.nodes={hardware.nodes}, inference has {first} and the trainer {hosts}, over which "
            f"hardware.trainer_processes={cfg.trainer_ranks} cannot be divided evenly.\n"
            f"  fix: hardware.trainer_processes={hosts}, or a multiple of it"
        )
    return [(replica % first, ()) for replica in range(replicas)], [(first + i, ()) for i in range(hosts)]


def require_one_host(plan: Sequence[ProcessSpec]) -> None:
    """Raise ConfigError if the plan needs more than one host."""
    hosts = max(spec.node for spec in plan) + 1
    if hosts > 1:
        raise ConfigError(
            f"the plan needs {hosts} hosts, but launcher=local starts everything on this machine.\n"
            "  fix: lower hardware.inference_replicas, hardware.tensor_parallel or hardware.trainer_processes"
        )
