"""From a configuration to the list of processes: roles, replicas, hosts, GPUs, ports, environment and command of each.

Pure: the same configuration gives the same plan, on any machine; nothing is started, asked or written but `plan.yaml`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from rlx.config.errors import ConfigError
from rlx.config.schema import Config
from rlx.paths import write_text
from rlx.types import ProcessSpec

LOOPBACK = "127.0.0.1"
Place = tuple[int, tuple[int, ...]]  # a host of the allocation, and GPUs on it


def make_plan(cfg: Config, run_dir: Path, visible_gpus: Sequence[str] | None = None, python: str = sys.executable) -> list[ProcessSpec]:
    """The processes of a run, in the order in which they are started.

    `visible_gpus` is what `CUDA_VISIBLE_DEVICES` of the launcher named; GPU i of a host is its i-th entry, or device i when it is None.
    Raises ConfigError when the layout needs more GPUs than the hosts have.
    """
    hardware = cfg.hardware
    inference, trainers = place(cfg)
    common = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": str(cfg.seed % 2**32),
        "OMP_NUM_THREADS": str(hardware.cpu_threads),
        "MKL_NUM_THREADS": str(hardware.cpu_threads),
        "TOKENIZERS_PARALLELISM": "false",
    }

    def spec(
        role: str,
        node: int = 0,
        gpus: tuple[int, ...] = (),
        *,
        replica: int = 0,
        ports: dict | None = None,
        ranks: int = 1,
        env: dict[str, str] | None = None,
        service: bool = False,
    ) -> ProcessSpec:
        module = ("-m", f"rlx.roles.{role}", "--run-dir", str(run_dir))
        return ProcessSpec(
            role=role,
            replica=replica,
            node=node,
            gpus=gpus,
            ports=ports or {},
            env=common | {"CUDA_VISIBLE_DEVICES": ",".join(_device(gpu, visible_gpus) for gpu in gpus)} | (env or {}),
            argv=(python, *_torchrun(ranks), *module, *(("--replica", str(replica)) if service else ())),
            service=service,
        )

    plan = []
    if cfg.replay is not None:
        inference = []  # what they gave is on disk already
    elif cfg.model.warm_start:
        # It is done before anything else computes, so it may have a GPU that the others use later.
        plan.append(spec("prepare", trainers[0][0], trainers[0][1][:1]))
    for replica, (node, gpus) in enumerate(inference):
        port = cfg.inference.port + replica if cfg.inference.port else 0
        plan.append(spec("inference", node, gpus, replica=replica, ports={"http": port}, service=True))
    rendezvous = {"rendezvous": 0} if cfg.trainer_ranks > 1 else None
    if cfg.replay is None:
        plan.append(spec("orchestrator", trainers[0][0]))  # beside the trainer that reads its batches
    if len(trainers) == 1 and (cfg.trainer_ranks == 1 or cfg.launcher.name == "local"):
        plan.append(spec("trainer", *trainers[0], ranks=cfg.trainer_ranks, ports=rendezvous))
        return plan
    ranks_per_host = cfg.trainer_ranks // len(trainers)
    # torchrun would need a port before its host is known, and end its ranks on SLURM's SIGTERM; ranks find each other by themselves.
    for rank in range(cfg.trainer_ranks):
        node, gpus = trainers[rank // ranks_per_host]
        mine = gpus[rank % ranks_per_host :][:1]
        world = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(cfg.trainer_ranks)}
        plan.append(spec("trainer", node, mine, replica=rank, ports=rendezvous if rank == 0 else None, env=world))
    return plan


def place(cfg: Config) -> tuple[list[Place], list[Place]]:
    """Hosts and GPUs of every inference replica, and of the trainer's ranks by host: inference first, the trainer behind it.

    On CPU with several hosts, the trainer has those that inference leaves. Raises ConfigError when they do not fit.
    """
    hardware = cfg.hardware
    replicas = 0 if cfg.inference.base_url else hardware.inference_replicas
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


def _place_on_cpu(cfg: Config, replicas: int) -> tuple[list[Place], list[Place]]:
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
    """Raise ConfigError when the plan needs more than this machine."""
    hosts = max(spec.node for spec in plan) + 1
    if hosts > 1:
        raise ConfigError(
            f"the plan takes {hosts} hosts, but launcher=local starts everything on this machine.\n"
            "  fix: lower hardware.inference_replicas, hardware.tensor_parallel or hardware.trainer_processes"
        )


def _device(gpu: int, visible: Sequence[str] | None) -> str:
    if visible is None:
        return str(gpu)
    if gpu >= len(visible):
        raise ConfigError(
            f"the plan needs GPU {gpu} (counted from 0), but CUDA_VISIBLE_DEVICES={','.join(visible)} names {len(visible)}.\n"
            "  fix: name more devices, or choose a smaller hardware="
        )
    return visible[gpu]


def _torchrun(ranks: int) -> tuple[str, ...]:
    """The launcher of several trainer processes on one host; its rendezvous binds a free port."""
    if ranks == 1:
        return ()
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint={LOOPBACK}:0", f"--local-addr={LOOPBACK}", "--max-restarts=0")
    return ("-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}", *rendezvous)


def visible_gpus() -> list[str] | None:
    """What this process's `CUDA_VISIBLE_DEVICES` names; None when it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else [device for device in value.split(",") if device]


def plan_yaml(plan: Sequence[ProcessSpec]) -> str:
    """The text of `plan.yaml`."""
    records = [{**asdict(spec), "gpus": list(spec.gpus), "argv": list(spec.argv)} for spec in plan]
    return yaml.safe_dump(records, sort_keys=False, allow_unicode=True, width=200)


def write_plan(path: Path, plan: Sequence[ProcessSpec]) -> None:
    write_text(path, plan_yaml(plan))


def read_plan(path: Path) -> list[ProcessSpec]:
    return [
        ProcessSpec(**{**record, "gpus": tuple(record["gpus"]), "argv": tuple(record["argv"])})
        for record in yaml.safe_load(path.read_text())
    ]
