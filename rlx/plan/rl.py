"""From a configuration to the list of processes: roles, replicas, hosts, GPUs, ports, environment and command of each.

Pure: the same configuration gives the same plan, on any machine; nothing is started, asked or written.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlx.config.schema import Config
from rlx.plan.place import place
from rlx.types import ProcessSpec

LOOPBACK = "127.0.0.1"


def make_plan(cfg: Config, run_dir: Path, python: str = sys.executable) -> list[ProcessSpec]:
    """The processes of a run, in the order in which they are started. Hosts, and the GPUs of each, are counted from 0.

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
        **({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if hardware.device == "cuda" else {}),  # as nvidia-smi and SLURM count them
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


def _torchrun(ranks: int) -> tuple[str, ...]:
    """The launcher of several trainer processes on one host; its rendezvous binds a free port."""
    if ranks == 1:
        return ()
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint={LOOPBACK}:0", f"--local-addr={LOOPBACK}", "--max-restarts=0")
    return ("-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}", *rendezvous)
