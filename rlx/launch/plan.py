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


def make_plan(cfg: Config, run_dir: Path, visible_gpus: Sequence[str] | None = None, python: str = sys.executable) -> list[ProcessSpec]:
    """The processes of a run, in the order in which they are started.

    `visible_gpus` is what `CUDA_VISIBLE_DEVICES` of the launcher named; GPU i of a host is its i-th entry, or device i when it is None.
    Raises ConfigError when the layout needs more GPUs than the hosts have.
    """
    hardware = cfg.hardware
    inference, trainer = place(cfg)
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
        service: bool = False,
    ) -> ProcessSpec:
        module = ("-m", f"rlx.roles.{role}", "--run-dir", str(run_dir))
        return ProcessSpec(
            role=role,
            replica=replica,
            node=node,
            gpus=gpus,
            ports=ports or {},
            env=common | {"CUDA_VISIBLE_DEVICES": ",".join(_device(gpu, visible_gpus) for gpu in gpus)},
            argv=(python, *_torchrun(ranks), *module, *(("--replica", str(replica)) if service else ())),
            service=service,
        )

    plan = []
    if cfg.model.warm_start:
        # It is done before anything else computes, so it may have a GPU that the others use later.
        plan.append(spec("prepare", *trainer[:1], trainer[1][:1]))
    for replica, (node, gpus) in enumerate(inference):
        port = cfg.inference.port + replica if cfg.inference.port else 0
        plan.append(spec("inference", node, gpus, replica=replica, ports={"http": port}, service=True))
    plan.append(spec("orchestrator"))
    plan.append(spec("trainer", *trainer, ranks=hardware.trainer_ranks, ports={"rendezvous": 0} if hardware.trainer_ranks > 1 else None))
    return plan


def place(cfg: Config) -> tuple[list[tuple[int, tuple[int, ...]]], tuple[int, tuple[int, ...]]]:
    """Hosts and GPUs `(node, gpus)` of every inference replica, and of the trainer: inference first, the trainer behind it.

    Raises ConfigError when they do not fit.
    """
    hardware = cfg.hardware
    replicas = 0 if cfg.inference.base_url else hardware.inference_replicas
    if hardware.device == "cpu":
        return [(0, ())] * replicas, (0, ())
    node, free = 0, 0  # the next free GPU
    inference = []
    for _ in range(replicas):
        if free + hardware.tensor_parallel > hardware.gpus_per_node:
            node, free = node + 1, 0
        inference.append((node, tuple(range(free, free + hardware.tensor_parallel))))
        free += hardware.tensor_parallel
    if hardware.shared:
        node, free = 0, 0
    elif free + hardware.trainer_ranks > hardware.gpus_per_node:
        node, free = node + 1, 0
    trainer = (node, tuple(range(free, free + hardware.trainer_ranks)))
    needs = max([gpus[-1] + 1 for _, gpus in inference if gpus] + [hardware.trainer_ranks])
    if node >= hardware.nodes or needs > hardware.gpus_per_node:
        raise ConfigError(
            f"hardware={hardware.name}: {replicas} inference replicas × tensor_parallel={hardware.tensor_parallel} and "
            f"trainer_ranks={hardware.trainer_ranks} do not fit on {hardware.nodes} × {hardware.gpus_per_node} GPUs "
            "(hardware.nodes × hardware.gpus_per_node), a replica and the trainer each on one host.\n"
            "  fix: lower hardware.inference_replicas, hardware.tensor_parallel or hardware.trainer_ranks, or choose another hardware="
        )
    return inference, trainer


def require_one_host(plan: Sequence[ProcessSpec]) -> None:
    """Raise ConfigError when the plan needs more than this machine."""
    hosts = max(spec.node for spec in plan) + 1
    if hosts > 1:
        raise ConfigError(
            f"the plan takes {hosts} hosts, but launcher=local starts everything on this machine.\n"
            "  fix: lower hardware.inference_replicas, hardware.tensor_parallel or hardware.trainer_ranks"
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
