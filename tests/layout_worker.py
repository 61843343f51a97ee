"""One of four ranks of `test_checkpoint_layouts.py`. Usage: layout_worker.py RANK FOLDER ADAPTERS LAYOUT…

FOLDER holds the `model`, and the checkpoint `one` of a single process. ADAPTERS: their rank; 0 trains the whole model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_worker import full, make_trainer
from trainer_examples import make_samples, step_batch, train_minibatch

from rlx.data.packing import pack
from rlx.parallel.mesh import Mesh, divide, join
from rlx.train.checkpoint import Saver, TrainerProgress, load
from rlx.train.step import PolicyTrainer
from rlx.weights.shapes import digest_of

RANKS = 4
LAYOUTS: dict[str, dict[str, int]] = {
    "fsdp": {},
    "hsdp": {"copies": 2},
    "cp": {"context": 2},
    "tp": {"tensor": 2},
    "ep": {"expert": 2},
    "ep_of_all": {"expert": 4},
    "cp_tp": {"context": 2, "tensor": 2},
    "cp_ep": {"context": 2, "expert": 2},
    "tp_ep": {"tensor": 2, "expert": 2},
    "hsdp_ep": {"copies": 2, "expert": 2},
}


def state(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Parameters and the optimizer's state, each as a whole. Every rank calls this."""
    found = {}
    for name, parameter in trainer.model.named_parameters():
        found[name] = full(parameter.detach())
        found |= {f"{name} {key}": full(value) for key, value in trainer.optimizer.state.get(parameter, {}).items() if value.dim()}
    return found


def save(trainer: PolicyTrainer, folder: Path, name: str, seed: int, mesh: Mesh) -> None:
    """Train one step on samples of `seed`, write the checkpoint `name`, and beside it the whole state."""
    batch = pack(step_batch(0, [make_samples(seed=seed)]), rank=mesh.data_rank, ranks=mesh.num_data_ranks, tokens=60)
    train_minibatch(trainer, batch.mini_batches[0], step=0)
    saver = Saver(trainer, digest_of, in_background=False)
    saver.save(folder / name, TrainerProgress(1, trainer.updates)).files()
    saver.close()
    whole = state(trainer)
    if mesh.first:
        torch.save(whole, folder / f"{name}.pt")


def differences(trainer: PolicyTrainer, folder: Path, name: str) -> list[str]:
    """Load the checkpoint `name`. The tensors that are not those of the layout that wrote it, bit for bit."""
    load(folder / name, trainer)
    found, expected = state(trainer), torch.load(folder / f"{name}.pt")
    return sorted(found.keys() ^ expected.keys()) + [key for key in expected if key in found and not torch.equal(found[key], expected[key])]


def main() -> None:
    rank, folder, adapters, layouts = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    torch.set_num_threads(1)
    mesh = join(torch.device("cpu"), rank=rank, world_size=RANKS, timeout=300, store=dist.FileStore(str(folder / "store"), RANKS))
    trainers: dict[str, PolicyTrainer] = {}
    for seed, name in enumerate(layouts, 1):
        divided = divide(mesh, timeout=300, **LAYOUTS[name]) if LAYOUTS[name] else mesh
        trainers[name] = make_trainer(str(folder / "model"), mesh=divided, rank=adapters)
        save(trainers[name], folder, name, seed, divided)
    mesh.barrier()
    wrong: dict[str, Any] = {}
    for name, trainer in trainers.items():
        for source in ("one", *layouts):
            if found := differences(trainer, folder, source):
                wrong[f"{source} in {name}"] = found
    if mesh.first:
        (folder / "wrong.json").write_text(json.dumps(wrong))
    mesh.close()


if __name__ == "__main__":
    main()
