"""Assigns a host and GPUs to each inference server and each trainer rank. Pure: hosts and GPUs are just numbers here."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.config.errors import ConfigError
from rlx.config.schema import CommandConfig, TrainingRoot
from rlx.config.trainer_ranks import Place, places_of_servers
from rlx.plan.process_spec import ProcessSpec


def place_servers(cfg: CommandConfig, number: int) -> list[Place]:
    """Places of so many servers: hosts and GPUs in their order. The rules of `hardware` say that they fit."""
    hardware = cfg.hardware
    if hardware.device == "cpu":
        return [(server % hardware.nodes, ()) for server in range(number)]
    return places_of_servers(number, hardware.tensor_parallel, hardware.gpus_per_node)


def place(cfg: TrainingRoot) -> tuple[list[Place], list[Place]]:
    """`(places of the servers, places of the trainer, one per host)`. GPUs go to inference first, then to the trainer.

    On CPU with several hosts, the trainer gets the hosts that inference leaves. Raises ConfigError if the layout does not fit.
    """
    hardware = cfg.hardware
    size = hardware.tensor_parallel
    if hardware.device == "cpu":
        return _place_on_cpu(cfg)
    inference = place_servers(cfg, cfg.reserved_servers)
    node, free = (inference[-1][0], inference[-1][1][-1] + 1) if inference else (0, 0)  # the next free GPU
    if hardware.colocate:
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
            f"hardware={hardware.name}: {cfg.reserved_servers} inference replicas × tensor_parallel={size} and "
            f"trainer_processes={cfg.trainer_ranks} do not fit on {hardware.nodes} × {hardware.gpus_per_node} GPUs "
            f"(hardware.nodes × hardware.gpus_per_node), a replica on one host, and the trainer on one host or on whole ones.\n"
            "  fix: lower one of hardware.inference_replicas, hardware.tensor_parallel, hardware.trainer_processes, or choose another "
            "hardware="
        )
    return inference, trainers


def _place_on_cpu(cfg: TrainingRoot) -> tuple[list[Place], list[Place]]:
    hardware, servers = cfg.hardware, cfg.reserved_servers
    if hardware.nodes == 1:
        return [(0, ())] * servers, [(0, ())]
    first = min(servers, hardware.nodes - 1)  # hosts of inference
    hosts = hardware.nodes - first
    if cfg.trainer_ranks % hosts:
        raise ConfigError(
            f"hardware={hardware.name}: of hardware.nodes={hardware.nodes}, inference has {first} and the trainer {hosts}, over which "
            f"hardware.trainer_processes={cfg.trainer_ranks} cannot be divided evenly.\n"
            f"  fix: hardware.trainer_processes={hosts}, or a multiple of it"
        )
    return [(server % first, ()) for server in range(servers)], [(first + i, ()) for i in range(hosts)]


def require_one_host(plan: Sequence[ProcessSpec]) -> None:
    """Raise ConfigError if the plan needs more than one host."""
    hosts = max(spec.node for spec in plan) + 1
    if hosts > 1:
        raise ConfigError(
            f"the plan needs {hosts} hosts, but launcher=local starts everything on this machine.\n"
            "  fix: launcher=slurm; on one machine hardware.nodes=1, with as few hardware.inference_replicas, "
            "hardware.tensor_parallel and hardware.trainer_processes as fit; or dry_run=true to plan"
        )
