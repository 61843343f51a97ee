"""The processes of the commands that train: `rlx train`, `rlx sft`."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.config.schema import Config, PlayRoot, SftRoot, TrainingRoot
from rlx.plan.place import place
from rlx.plan.specs import Specs
from rlx.types import ProcessSpec


def plan_training(cfg: TrainingRoot, specs: Specs) -> Iterator[ProcessSpec]:
    """The processes in start order. Raises ConfigError if the layout needs more GPUs than the hosts have."""
    inference, trainers = place(cfg)
    replays = isinstance(cfg, Config) and cfg.replay is not None
    if cfg.model.warm_start and not replays:
        # It finishes before any other process computes, so it may use a GPU that others use later.
        yield specs.one("prepare", trainers[0][0], trainers[0][1][:1])
    if isinstance(cfg, PlayRoot) and not replays:  # the rollouts of a replay are already on disk
        yield from specs.servers(cfg, inference)
    rendezvous = {"rendezvous": 0} if cfg.trainer_ranks > 1 else None
    if isinstance(cfg, SftRoot) and cfg.plays:
        yield specs.one("evaluator", trainers[0][0])
    if cfg.has_orchestrator:
        yield specs.one("orchestrator", trainers[0][0])  # on the host of the trainer, which reads its batches
    if len(trainers) == 1 and (cfg.trainer_ranks == 1 or cfg.launcher.name == "local"):
        yield specs.one("trainer", *trainers[0], ranks=cfg.trainer_ranks, ports=rendezvous)
        return
    ranks_per_host = cfg.trainer_ranks // len(trainers)
    # No torchrun here: it would need a port before its host is known, and would stop its ranks on SLURM's SIGTERM.
    for rank in range(cfg.trainer_ranks):
        node, gpus = trainers[rank // ranks_per_host]
        mine = gpus[rank % ranks_per_host :][:1]
        world = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(cfg.trainer_ranks)}
        yield specs.one("trainer", node, mine, replica=rank, ports=rendezvous if rank == 0 else None, env=world)
