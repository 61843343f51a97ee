"""Assigns a host and GPUs to each part of an inference server and each trainer rank. Pure: hosts and GPUs are just numbers here.

A server is one part, unless its engines are on several hosts (`hardware.data_parallel_local`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.config.errors import ConfigError
from rlx.config.schema import PlayRoot, TrainingRoot
from rlx.plan.record import ProcessSpec

Place = tuple[int, tuple[int, ...]]  # index of a host, and indices of GPUs on it


def place_servers(cfg: PlayRoot) -> list[Place]:
    """Places of the parts of all servers, server by server, of a command that trains nothing: hosts and GPUs in their order.

    Raises ConfigError if the layout does not fit.
    """
    hardware = cfg.hardware
    parts, size = cfg.num_servers * hardware.parts_of_server, hardware.gpus_of_part
    if hardware.device == "cpu":
        _check_apart(cfg, hardware.nodes)
        return [(part % hardware.nodes, ()) for part in range(parts)]
    by_host = hardware.gpus_per_node // size
    if parts > by_host * hardware.nodes:
        raise ConfigError(
            f"hardware={hardware.name}: {_servers(cfg)} do not fit on "
            f"{hardware.nodes} × {hardware.gpus_per_node} GPUs (hardware.nodes × hardware.gpus_per_node), {_together(cfg)}.\n"
            f"  fix: lower one of {_keys(cfg)}, or choose another hardware="
        )
    return [(part // by_host, tuple(range(part % by_host * size, (part % by_host + 1) * size))) for part in range(parts)]


def _servers(cfg: PlayRoot | TrainingRoot) -> str:
    """The numbers that make the servers' size."""
    hardware = cfg.hardware
    engines = f" × data_parallel={hardware.data_parallel}" if hardware.data_parallel > 1 else ""
    return f"{cfg.servers_placed} inference replicas{engines} × tensor_parallel={hardware.tensor_parallel}"


def _together(cfg: PlayRoot | TrainingRoot) -> str:
    """What must be on one host."""
    hardware = cfg.hardware
    return "a replica on one host" if hardware.parts_of_server == 1 else f"{hardware.engines_on_host} engines of a replica on one host"


def _keys(cfg: PlayRoot | TrainingRoot) -> str:
    """The keys that make the servers' size."""
    several = ["hardware.data_parallel"] if cfg.hardware.data_parallel > 1 else []
    return ", ".join(["hardware.inference_replicas", *several, "hardware.tensor_parallel"])


def place(cfg: TrainingRoot) -> tuple[list[Place], list[Place]]:
    """`(places of the servers' parts, places of the trainer, one per host)`. GPUs go to inference first, then to the trainer.

    On CPU with several hosts, the trainer gets the hosts that inference leaves. Raises ConfigError if the layout does not fit.
    """
    hardware = cfg.hardware
    parts, size = cfg.servers_placed * hardware.parts_of_server, hardware.gpus_of_part
    if hardware.device == "cpu":
        return _place_on_cpu(cfg, parts)
    node, free = 0, 0  # the next free GPU
    inference = []
    for _ in range(parts):
        if free + size > hardware.gpus_per_node:
            node, free = node + 1, 0
        inference.append((node, tuple(range(free, free + size))))
        free += size
    if hardware.shared:
        node, free = 0, 0
    elif free + cfg.trainer_ranks > hardware.gpus_per_node and free > 0:
        node, free = node + 1, 0
    hosts, left = divmod(cfg.trainer_ranks, hardware.gpus_per_node) if cfg.trainer_ranks > hardware.gpus_per_node else (1, 0)
    share = cfg.trainer_ranks // hosts
    trainers = [(node + i, tuple(range(free, free + share))) for i in range(hosts)]
    needs = max([gpus[-1] + 1 for _, gpus in inference if gpus] + [share])
    last = max(host for host, _ in (*inference, *trainers))
    if last >= hardware.nodes or needs > hardware.gpus_per_node or left:
        raise ConfigError(
            f"hardware={hardware.name}: {_servers(cfg)} and "
            f"trainer_processes={cfg.trainer_ranks} do not fit on {hardware.nodes} × {hardware.gpus_per_node} GPUs "
            f"(hardware.nodes × hardware.gpus_per_node), {_together(cfg)}, and the trainer on one host or on whole ones.\n"
            f"  fix: lower one of {_keys(cfg)}, hardware.trainer_processes, or choose another hardware="
        )
    return inference, trainers


def _place_on_cpu(cfg: TrainingRoot, parts: int) -> tuple[list[Place], list[Place]]:
    hardware = cfg.hardware
    if hardware.nodes == 1:
        return [(0, ())] * parts, [(0, ())]
    first = min(parts, hardware.nodes - 1)  # hosts of inference
    _check_apart(cfg, first)
    hosts = hardware.nodes - first
    if cfg.trainer_ranks % hosts:
        raise ConfigError(
            f"hardware={hardware.name}: of hardware.nodes={hardware.nodes}, inference has {first} and the trainer {hosts}, over which "
            f"hardware.trainer_processes={cfg.trainer_ranks} cannot be divided evenly.\n"
            f"  fix: hardware.trainer_processes={hosts}, or a multiple of it"
        )
    return [(part % first, ()) for part in range(parts)], [(first + i, ()) for i in range(hosts)]


def _check_apart(cfg: PlayRoot | TrainingRoot, hosts: int) -> None:
    """Raise ConfigError if a server's parts, which should be on different hosts, are more than the CPU hosts of inference."""
    hardware = cfg.hardware
    if cfg.num_servers and hardware.nodes > 1 and hardware.parts_of_server > hosts:
        more = hardware.parts_of_server - hosts
        raise ConfigError(
            f"hardware={hardware.name}: hardware.data_parallel={hardware.data_parallel} with hardware.data_parallel_local="
            f"{hardware.engines_on_host} puts a server on {hardware.parts_of_server} hosts, but of hardware.nodes={hardware.nodes} "
            f"inference has {hosts}.\n"
            f"  fix: hardware.nodes={hardware.nodes + more}, or hardware.data_parallel_local={hardware.data_parallel} on one host"
        )


def require_one_host(plan: Sequence[ProcessSpec]) -> None:
    """Raise ConfigError if the plan needs more than one host."""
    hosts = max(spec.node for spec in plan) + 1
    if hosts > 1:
        raise ConfigError(
            f"the plan needs {hosts} hosts, but launcher=local starts everything on this machine.\n"
            "  fix: launcher=slurm or launcher=kubernetes; on one machine hardware.nodes=1, with as few hardware.inference_replicas, "
            "hardware.tensor_parallel and hardware.trainer_processes as fit; or dry_run=true to plan"
        )
