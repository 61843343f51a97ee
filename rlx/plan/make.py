"""Turns a configuration into the list of a run's processes, each with role, replica, host, GPUs, ports, environment and command.

    rlx train, rlx sft       prepare (a model that rlx makes) · inference × replicas · orchestrator · trainer × ranks
    rlx train, with bench_role=inference   prepare · inference × replicas · load generator
    rlx eval, synthesize     prepare · inference × replicas (unless servers or an endpoint already run) · the command's own role

Pure: the same configuration gives the same plan on any machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlx.config.schema import CommandConfig, Config, PlayRoot, SftRoot, TrainingRoot
from rlx.config.schema_eval import EvalRoot, PlayWithModel
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.config.trainer_ranks import Place
from rlx.plan.place import place, place_servers
from rlx.plan.process_spec import ProcessSpec

Start = Callable[..., ProcessSpec]  # `_process` with what the processes of a run have in common
SHARING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Threads that wait for each other leave their cores to other processes, where there are any. Otherwise they spin, which is faster."""


def make_plan(cfg: CommandConfig, run_dir: Path, python: str | None = None) -> list[ProcessSpec]:
    """The processes of a run, in start order. Hosts, and the GPUs of each host, are numbered from 0.

    `python`: the interpreter; None: this one, or that of the job's container.
    Raises ConfigError if the layout needs more GPUs than the hosts have.
    """
    container = cfg.slurm.container if cfg.launcher.name == "slurm" else None
    start = partial(_process, cfg, run_dir, python or (container.python if container else sys.executable))
    plan = list(_processes(cfg, start))
    if cfg.hardware.cpu_threads == 1:
        return plan
    beside = [spec for spec in plan if spec.role != "prepare"]  # which has finished before the others compute
    return plan if len(beside) == 1 else [replace(spec, env=spec.env | SHARING) if spec in beside else spec for spec in plan]


def _processes(cfg: CommandConfig, start: Start) -> Iterator[ProcessSpec]:
    match cfg:  # a new command adds its plan here
        case TrainingRoot():
            return _training(cfg, start)
        case EvalRoot():
            return _playing(cfg, start, "evaluator")
        case SynthesizeRoot():
            return _playing(cfg, start, "synthesizer") if cfg.play else iter([start("synthesizer")])
    raise TypeError(f"{type(cfg).__name__} has no plan")


def _playing(cfg: PlayRoot, start: Start, role: str) -> Iterator[ProcessSpec]:
    """The processes that play with a model. `role`: the one that plays; it runs on the first host."""
    places = place_servers(cfg, cfg.started_servers)
    if cfg.model.prepared and (not isinstance(cfg, PlayWithModel) or cfg.weights_dir is None):
        yield start("prepare", *((places[0][0], places[0][1][:1]) if places else (0, ())))
    yield from _servers(start, cfg, places)
    yield start(role)


def _training(cfg: TrainingRoot, start: Start) -> Iterator[ProcessSpec]:
    """The processes of a command that trains."""
    if isinstance(cfg, Config) and cfg.trainer.shared_trainer_dir is not None:  # the shared trainer makes the initial model and trains
        yield from _servers(start, cfg, place_servers(cfg, cfg.started_servers))
        yield start("orchestrator")
        return
    if isinstance(cfg, Config) and cfg.bench_target == "inference":
        yield from _playing(cfg, start, "load_generator")
        return
    inference, trainers = place(cfg)
    replays = isinstance(cfg, Config) and cfg.replay is not None
    if cfg.model.prepared and not replays:
        # It finishes before any other process computes, so it may use a GPU that others use later.
        yield start("prepare", trainers[0][0], trainers[0][1][:1])
    if isinstance(cfg, PlayRoot) and cfg.generates_rollouts:  # the rollouts of a replay are already on disk
        yield from _servers(start, cfg, inference)
    if isinstance(cfg, SftRoot) and cfg.generates_rollouts:
        yield start("evaluator", trainers[0][0])
    if isinstance(cfg, Config) and cfg.generates_rollouts:
        yield start("orchestrator", trainers[0][0])  # on the host of the trainer, which reads its batches
    module = "shared_trainer" if isinstance(cfg, Config) and cfg.is_shared_trainer else None
    if cfg.trainer_ranks == 1:
        yield start("trainer", *trainers[0], module=module)
        return
    ranks_per_host = cfg.trainer_ranks // len(trainers)
    for rank in range(cfg.trainer_ranks):
        node, gpus = trainers[rank // ranks_per_host]
        mine = gpus[rank % ranks_per_host :][:1]
        world = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(cfg.trainer_ranks)}
        ports = {"rendezvous": 0} if rank == 0 else None
        yield start("trainer", node, mine, replica=rank, ports=ports, env=world, module=module)


def _servers(start: Start, cfg: PlayRoot, places: Sequence[Place]) -> Iterator[ProcessSpec]:
    """The inference servers, and the processes that watch them."""
    for replica, (node, gpus) in enumerate(places):
        port = cfg.inference.port + replica if cfg.inference.port else 0
        yield start("inference", node, gpus, replica=replica, ports={"http": port}, service=True)


def _process(
    cfg: CommandConfig,
    run_dir: Path,
    python: str,
    role: str,
    node: int = 0,
    gpus: tuple[int, ...] = (),
    *,
    replica: int = 0,
    ports: dict[str, int] | None = None,
    env: dict[str, str] | None = None,
    service: bool = False,
    module: str | None = None,
) -> ProcessSpec:
    """A process of `rlx/roles/<role>.py` on a host, with GPUs of that host. `module`: another file in `rlx/roles/` for this role."""
    hardware = cfg.hardware
    common = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",  # whatever the locale of the host
        "PYTHONHASHSEED": str(cfg.seed % 2**32),
        "OMP_NUM_THREADS": str(hardware.cpu_threads),
        "MKL_NUM_THREADS": str(hardware.cpu_threads),
        "TOKENIZERS_PARALLELISM": "false",
        **({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if hardware.device == "cuda" else {}),  # the order of nvidia-smi and SLURM
    }
    command = ("-m", f"rlx.roles.{module or role}", "--run-dir", str(run_dir))
    return ProcessSpec(
        role=role,
        replica=replica,
        node=node,
        gpus=gpus,
        ports=ports or {},
        env=common | (env or {}),
        argv=(python, *command, *(("--replica", str(replica)) if service else ())),
        service=service,
    )
