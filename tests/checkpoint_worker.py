"""One rank of the checkpoint tests. Usage: checkpoint_worker.py RANK RANKS STORE JOB…, each JOB a JSON object (see `Job`)."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainer_examples import make_samples, step_batch, train_minibatch

from rlx.config.schema import LoraConfig, LossTerms, SchedulerConfig
from rlx.data.packing import pack
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.models.load import load_policy
from rlx.parallel.mesh import Mesh, divide, join, one_process, seed_masks
from rlx.train.checkpoint import Saver, TrainerProgress, load
from rlx.train.muon import Muon, groups_of
from rlx.train.offload import CPUOffloadOptimizer
from rlx.train.step import PolicyTrainer
from rlx.weights.shapes import digest_of

UPDATES = 6


@dataclass(frozen=True, kw_only=True)
class Job:
    """Train steps `first` … `last`-1. `load`: checkpoint to load before. `save`: checkpoint to write after."""

    model: str
    out: str  # where rank 0 writes metrics and weights
    first: int
    last: int
    load: str | None = None
    save: str | None = None
    in_background: bool = False
    optimizer: str = "AdamW"
    rank: int = 0  # of adapters
    dropout: float = 0.0
    offload: bool = False  # the optimizer's state in host memory
    dtype: str = "float32"  # in which the model computes
    divided: dict[str, int] = field(default_factory=dict)  # sizes of the mesh's axes


def make_trainer(
    model: str,
    optimizer: str = "AdamW",
    mesh: Mesh | None = None,
    *,
    rank: int = 0,
    dropout: float = 0.0,
    read: bool = True,
    dtype: str = "float32",
) -> PolicyTrainer:
    lora = LoraConfig(rank=rank, dropout=dropout) if rank else None
    policy = load_policy(model, mesh or one_process("cpu"), dtype=dtype, lora=lora, read=read)
    return PolicyTrainer(
        policy,
        Objective(grpo, LossTerms(aggregate="token_mean"), max_length=16),
        (Muon if optimizer == "Muon" else getattr(torch.optim, optimizer))(groups_of(policy.layers, policy), lr=1e-2),
        schedule=SchedulerConfig(type="cosine", warmup_steps=2),
        total_updates=UPDATES,
        max_norm=1.0,
        mesh=mesh,
    )


def run(job: Job, mesh: Mesh) -> None:
    if job.divided:
        mesh = divide(mesh, timeout=300, **job.divided)
    seed_masks(0, mesh)
    trainer = make_trainer(job.model, job.optimizer, mesh, rank=job.rank, dropout=job.dropout, read=job.load is None, dtype=job.dtype)
    if job.offload:
        trainer.optimizer = CPUOffloadOptimizer(trainer.optimizer, mesh, bucket=2048)
    step = 0
    if job.load is not None:
        step = load(Path(job.load), trainer).step
    assert step == job.first, (step, job.first)
    records: list[dict[str, Any]] = []
    saver = Saver(trainer, digest_of, in_background=job.in_background)
    for step in range(job.first, job.last):
        batch = pack(step_batch(step, [make_samples(seed=step)]), rank=mesh.data_rank, ranks=mesh.num_data_ranks, tokens=60)
        values = train_minibatch(trainer, batch.mini_batches[0], step=step)
        records.append({name: value for name, value in values.items() if not name.startswith("time/")})
    weights = {name: full(tensor) for name, tensor in trainer.model.named_weights()}
    out = Path(job.out)
    if job.save is not None:
        saving = saver.save(Path(job.save), TrainerProgress(job.last, trainer.updates))
        saving.wait_copied()
        if job.in_background:  # changes from now on must not reach the disk
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.zero_()
        files = saving.files()
        if mesh.first:
            (out.with_suffix(".files.json")).write_text(json.dumps(files))
    saver.close()
    if mesh.first:
        torch.save({"records": records, "weights": weights}, out)


def full(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def main() -> None:
    rank, ranks, store, *jobs = sys.argv[1:]
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, int(ranks))
    mesh = join(torch.device("cpu"), rank=int(rank), world_size=int(ranks), timeout=300, store=meeting)
    for job in jobs:
        run(Job(**json.loads(job)), mesh)
        mesh.barrier()
    mesh.close()


if __name__ == "__main__":
    main()
