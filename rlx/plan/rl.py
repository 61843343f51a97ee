"""Turns a configuration into the list of a run's processes, each with role, replica, host, GPUs, ports, environment and command.

Pure: the same configuration gives the same plan on any machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlx.config.schema import Config
from rlx.plan.place import place
from rlx.types import ProcessSpec

LOOPBACK = "127.0.0.1"


def make_plan(cfg: Config, run_dir: Path, python: str = sys.executable) -> list[ProcessSpec]:
    """The processes of a run, in start order. Hosts, and the GPUs of each host, are numbered from 0.

    Raises ConfigError if the layout needs more GPUs than the hosts have.
    """
    hardware = cfg.hardware
    inference, trainers = place(cfg)
    common = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": str(cfg.seed % 2**32),
        "OMP_NUM_THREADS": str(hardware.cpu_threads),
        "MKL_NUM_THREADS": str(hardware.cpu_threads),
        "TOKENIZERS_PARALLELISM": "false",
        **({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if hardware.device == "cuda" else {}),  # the order of nvidia-smi and SLURM
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
            env=common | (env or {}),
            argv=(python, *_torchrun(ranks), *module, *(("--replica", str(replica)) if service else ())),
            service=service,
        )

    plan = []
    if cfg.replay is not None:
        inference = []  # the rollouts are already on disk
    elif cfg.model.warm_start:
        # It finishes before any other process computes, so it may use a GPU that others use later.
        plan.append(spec("prepare", trainers[0][0], trainers[0][1][:1]))
    for replica, (node, gpus) in enumerate(inference):
        port = cfg.inference.port + replica if cfg.inference.port else 0
        plan.append(spec("inference", node, gpus, replica=replica, ports={"http": port}, service=True))
    rendezvous = {"rendezvous": 0} if cfg.trainer_ranks > 1 else None
    if cfg.replay is None:
        plan.append(spec("orchestrator", trainers[0][0]))  # on the host of the trainer, which reads its batches
    if len(trainers) == 1 and (cfg.trainer_ranks == 1 or cfg.launcher.name == "local"):
        plan.append(spec("trainer", *trainers[0], ranks=cfg.trainer_ranks, ports=rendezvous))
        return plan
    ranks_per_host = cfg.trainer_ranks // len(trainers)
    # No torchrun here: it would need a port before its host is known, and would stop its ranks on SLURM's SIGTERM.
    for rank in range(cfg.trainer_ranks):
        node, gpus = trainers[rank // ranks_per_host]
        mine = gpus[rank % ranks_per_host :][:1]
        world = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(cfg.trainer_ranks)}
        plan.append(spec("trainer", node, mine, replica=rank, ports=rendezvous if rank == 0 else None, env=world))
    return plan


def _torchrun(ranks: int) -> tuple[str, ...]:
    """The torchrun arguments that start several trainer processes on one host; its rendezvous binds a free port."""
    if ranks == 1:
        return ()
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint={LOOPBACK}:0", f"--local-addr={LOOPBACK}", "--max-restarts=0")
    return ("-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}", *rendezvous)
