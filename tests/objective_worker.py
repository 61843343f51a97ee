"""One rank of the test that no objective depends on the number of processes: gradients and metrics of every objective.

`in_ranks.py` starts it as `objective_worker.py FOLDER`. FOLDER holds the model; rank 0 writes `results_<ranks>.pt` there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mixed_examples import MIXES, mix_of, mixed_samples
from test_train_step import LOSSES
from trainer_examples import make_samples, step_batch

from rlx.config.schema import KlTerms, LossTerms
from rlx.data.packing import pack
from rlx.losses.aipo import opd
from rlx.losses.base import Objective
from rlx.models.load import load_policy
from rlx.parallel.mesh import Mesh, join
from rlx.train.reference import Reference
from rlx.train.step import PolicyTrainer

CPU = torch.device("cpu")
# Each objective alone, and some with all additions: reference, recomputed ratios over several optimizer steps, correction.
PLAIN: dict[str, dict[str, Any]] = {name: {} for name in (*LOSSES, "opd")}
EVERYTHING = {
    "proximal": "recompute",
    "correction": "seq_tis",
    "dual_clip": 3.0,
    "entropy_coef": 0.01,
    "kl": KlTerms(beta=0.1, target_kl=0.01),
}
CASES = PLAIN | {f"{name}_with_everything": EVERYTHING for name in ("grpo", "gspo", "rloo", "dppo")}


def train(folder: Path, mesh: Mesh) -> dict[str, Any]:
    """By case: the gradients of one optimizer step, and the metrics of two iterations over a batch of two mini-batches."""
    samples = make_samples(groups=5)
    (mini_batch,) = pack(step_batch(2, [samples]), rank=mesh.data_rank, ranks=mesh.num_data_ranks, tokens=120).mini_batches
    batch = pack(step_batch(2, [samples[:9], samples[9:]]), rank=mesh.data_rank, ranks=mesh.num_data_ranks, tokens=120)
    results = {}
    model = load_policy(str(folder / "model"), mesh, dtype="float32")
    frozen = Reference(load_policy(str(folder / "teacher"), mesh, dtype="float32"))
    initial = [p.detach().clone() for p in model.parameters()]
    for case, terms in CASES.items():
        function, aggregate = (opd, "token_mean") if case == "opd" else LOSSES[case.removesuffix("_with_everything")]
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), initial, strict=True):
                parameter.copy_(value)
        objective = Objective(function, LossTerms(aggregate=aggregate, **terms), max_length=16)
        trainer = PolicyTrainer(model, objective, torch.optim.SGD(model.parameters(), lr=0.1), max_norm=0.5, mesh=mesh, reference=frozen)
        trainer.accumulate_gradients(mini_batch, step=2)
        gradients = {name: _whole(p.grad).clone() for name, p in model.named_parameters()}
        trainer.optimizer.zero_grad()
        values = trainer.train_batch(batch, iterations=2)
        results[case] = gradients, {k: v for k, v in values.items() if not k.startswith("time/")}
    for case, specs in MIXES.items():
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), initial, strict=True):
                parameter.copy_(value)
        mix = mix_of(specs)
        samples = mixed_samples(mix)
        keys = {"rank": mesh.data_rank, "ranks": mesh.num_data_ranks, "tokens": 120, "loss_of": mix.loss_of}
        trainer = PolicyTrainer(model, mix, torch.optim.SGD(model.parameters(), lr=0.1), max_norm=0.5, mesh=mesh, reference=frozen)
        trainer.accumulate_gradients(pack(step_batch(2, [samples]), **keys).mini_batches[0], step=2)
        gradients = {name: _whole(p.grad).clone() for name, p in model.named_parameters()}
        trainer.optimizer.zero_grad()
        values = trainer.train_batch(pack(step_batch(2, [samples[:9], samples[9:]]), **keys))
        results[case] = gradients, {k: v for k, v in values.items() if not k.startswith("time/")}
    frozen.sync_interval, frozen.alpha = 1, 0.25
    assert frozen.after_step(0, model)
    results["the reference"] = {name: _whole(p).clone() for name, p in frozen.model.named_parameters()}, {}
    return results


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    mesh = join(CPU, rank=rank, world_size=world_size, timeout=300, store=dist.FileStore(os.environ["STORE"], world_size))
    folder = Path(sys.argv[1])
    results = train(folder, mesh)
    if rank == 0:
        torch.save(results, folder / f"results_{world_size}.pt")
    mesh.close()


if __name__ == "__main__":
    main()
