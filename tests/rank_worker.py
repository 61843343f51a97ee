"""One rank of the tests of several trainer processes: loads models and trains each on a batch. Rank 0 saves the results.

`in_ranks.py` starts it as `rank_worker.py FOLDER…`. Each folder holds `settings.json` and the model. One start runs many cases, because
importing takes far longer than the cases.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_examples import make_samples, step_batch, train_minibatch
from transformers.models.llama.modeling_llama import LlamaMLP

from rlx.config.schema import AcConfig, KlTerms, LoraConfig, LossTerms
from rlx.data.packing import pack, pack_together
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.models.load import load_policy
from rlx.models.lora import peft_config
from rlx.models.policy import PolicyModel
from rlx.models.shard import compile_layers
from rlx.models.slots import Slot
from rlx.parallel.mesh import Mesh, divide, join, one_process
from rlx.paths import RunPaths
from rlx.train import step as steps
from rlx.train.flops import Flops
from rlx.train.muon import Muon, groups_of
from rlx.train.offload import CPUOffloadOptimizer
from rlx.train.reference import Reference
from rlx.train.step import PolicyTrainer
from rlx.weights.files import ModelFiles
from rlx.weights.publish import Publisher

ERROR = "error"  # files of the ranks that failed
TOGETHER = 300.0  # seconds within which all ranks refuse a case


class Collectives(TorchDispatchMode):
    """Counts the collectives that are called within it, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def train(folder: Path, mesh: Mesh, settings: dict) -> None:
    """Run two optimizer steps. Rank 0 writes the gradients of the first, all metrics and a policy version."""
    divided = {axis: math.gcd(size, mesh.world_size) for axis, size in settings.get("divided", {}).items()}
    for axis, other in (("tensor", "context"), ("tensor", "copies"), ("expert", "copies")):
        if mesh.world_size % (divided.get(axis, 1) * divided.get(other, 1)):
            divided.pop(axis)
    if max(divided.values(), default=1) > 1:
        mesh = divide(mesh, timeout=300, **divided)
    lora = LoraConfig(**settings["lora"]) if "lora" in settings else None
    ac = AcConfig(**settings.get("ac", {}))
    # Not torch's default backend, which takes minutes here; this one divides graphs between both passes as that does.
    backend = partial(compile_layers, backend="aot_eager_decomp_partition")
    with patch("rlx.models.load.compile_layers", backend):
        model = load_policy(str(folder / "model"), mesh, lora=lora, ac=ac, **settings["load"])
    make = Muon if settings.get("muon") else torch.optim.AdamW
    optimizer = make(groups_of(model.layers, model), lr=1e-2, fused=True)
    if settings.get("offload"):
        optimizer = CPUOffloadOptimizer(optimizer, mesh, bucket=1024)
    trainer = PolicyTrainer(model, Objective(grpo, LossTerms(aggregate="seq_mean", entropy_coef=0.01)), optimizer, max_norm=0.5, mesh=mesh)
    rank, world_size = mesh.rank, mesh.world_size
    samples = make_samples(groups=settings["groups"])
    batch = pack(step_batch(0, [samples, samples[::-1]]), **packing(mesh, model, settings))
    with Collectives() as collectives:
        trainer.accumulate_gradients(batch.mini_batches[0])
    counts = collectives.counts | {"rows": len(batch.mini_batches[0].micro_batches)}
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:  # frozen
            continue
        gradients[name] = whole_of(gradient).clone()
    optimizer.zero_grad()
    metrics = [train_minibatch(trainer, mini_batch, step=2) for mini_batch in batch.mini_batches]
    out = folder / f"out_{world_size}"
    paths = RunPaths(out)
    Publisher.of(model, mesh, paths, source=str(folder / "model"), dtype=torch.float32, lora=lora).ensure(1)
    if rank == 0:
        torch.save({"gradients": gradients, "metrics": metrics, "counts": counts}, out / "results.pt")
    if world_size > 1:
        everyone: list = [None] * world_size
        dist.all_gather_object(everyone, [{k: v for k, v in m.items() if not k.startswith("time/")} for m in metrics])
        assert all(others == everyone[0] for others in everyone), "metrics differ between ranks"


class Run:
    """A run of `train_together`, with its adapter in a slot of `whole`, or alone."""

    def __init__(self, slot: int, model: PolicyModel | Slot, whole: PolicyModel, mesh: Mesh) -> None:
        optimizer = Muon(groups_of(model.layers, model), lr=1e-2) if slot else torch.optim.AdamW(groups_of(model.layers, model), lr=1e-2)
        objective = Objective(grpo, LossTerms(aggregate="seq_mean", kl=KlTerms(beta=0.1)))
        self.trainer = PolicyTrainer(model, objective, optimizer, max_norm=0.5, mesh=mesh, reference=Reference(whole, adapters=False))
        self.samples = make_samples(groups=1 if slot else 5, seed=slot)
        self.first: dict[str, torch.Tensor] = {}  # the gradients of its first update, not clipped
        self.update, self.trainer.update = self.trainer.update, self.keep

    def keep(self, *arguments: Any, **keys: Any) -> dict[str, float]:
        if not self.first:
            self.first = {name: whole_of(p.grad).clone() for name, p in self.trainer.model.named_parameters() if p.grad is not None}
        return self.update(*arguments, **keys)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole_of(tensor).clone() for name, tensor in self.trainer.model.named_weights()}


SLOTS = {0: range(3), 2: range(1, 3)}  # which steps the run in a slot trains: the second joins later


def train_together(folder: Path, mesh: Mesh, settings: dict) -> None:
    """Two runs in slots of one model, of unequal size, for three steps of which the second run misses the first."""
    lora = LoraConfig(**settings["lora"])
    model = load_policy(str(folder / "model"), mesh, lora=lora, slots=3, ac=AcConfig(**settings.get("ac", {})), **settings["load"])
    runs = {}
    for slot in SLOTS:
        own = Slot(model, slot)
        own.begin(lora, seed=slot)
        runs[slot] = Run(slot, own, model, mesh)
    metrics = []
    for step in range(3):
        trainers = {slot: run.trainer for slot, run in runs.items() if step in SLOTS[slot]}
        batches = {slot: step_batch(step, [runs[slot].samples]) for slot in trainers}
        losses = {slot: each.losses.loss_of for slot, each in trainers.items()}
        packed = pack_together(batches, loss_of=losses, **packing(mesh, model, settings))
        metrics += steps.train(packed, trainers, dict.fromkeys(batches, 1)).values()
    out = folder / f"out_{mesh.world_size}"
    named = {f"{slot} {name}": tensor for slot, run in runs.items() for name, tensor in run.weights().items()}
    static = ModelFiles.of_adapters(peft_config(model.hf, lora, str(folder / "model")), folder / "model")
    Publisher(runs[2].trainer.model, mesh, RunPaths(out), static, torch.float32).ensure(1)
    if mesh.first:
        first = {slot: run.first for slot, run in runs.items()}
        torch.save({"gradients": named, "metrics": metrics, "first": first}, out / "results.pt")


def train_alone(folder: Path, slot: int) -> Run:
    """What `train_together` trains in a slot, with a model of its own, in one process."""
    mesh, settings = one_process("cpu"), json.loads((folder / "settings.json").read_text())
    ac = AcConfig(**settings.get("ac", {}))
    model = load_policy(str(folder / "model"), mesh, lora=LoraConfig(**settings["lora"]), seed=slot, ac=ac, **settings["load"])
    run = Run(slot, model, model, mesh)
    for step in SLOTS[slot]:
        run.trainer.train_batch(pack(step_batch(step, [run.samples]), **packing(mesh, model, settings)))
    return run


def whole_of(tensor: Any) -> torch.Tensor:
    """A tensor that may be sharded. Every rank calls this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def packing(mesh: Mesh, model: PolicyModel, settings: dict) -> dict[str, Any]:
    """How this rank packs. Ranks that counted another model's operations would not agree on rows."""
    cost = Flops.of(model.hf)
    if mesh.world_size > 1:
        everyone: list = [None] * mesh.world_size
        dist.all_gather_object(everyone, cost)
        assert set(everyone) == {cost}, everyone
    return {"rank": mesh.data_rank, "ranks": mesh.num_data_ranks, "tokens": settings["tokens"], "cost": cost.work}


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    mesh = join(torch.device("cpu"), rank=rank, world_size=world_size, timeout=300, store=dist.FileStore(os.environ["STORE"], world_size))
    for folder in map(Path, sys.argv[1:]):
        attempt(folder, mesh)
    mesh.close()


@contextmanager
def blocks_that_reduce() -> Iterator[None]:
    """Llama's feed-forward blocks subtract the mean of their inner units, which no rank with a part of them knows."""

    def forward(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner - inner.mean(-1, keepdim=True))

    with patch.object(LlamaMLP, "forward", forward):
        yield


@contextmanager
def experts_in_modules() -> Iterator[None]:
    """Llama's feed-forward blocks choose one of two linear layers for each token, and leave out one that no token chooses."""

    def forward(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        first = x[..., 0] > 0
        inner = x.new_zeros(*x.shape[:-1], self.intermediate_size)
        for own, expert in ((first, self.gate_proj), (~first, self.up_proj)):
            if own.any():
                inner[own] = self.act_fn(expert(x[own]))
        return self.down_proj(inner)

    with patch.object(LlamaMLP, "forward", forward):
        yield


def blocks_of(settings: dict) -> AbstractContextManager[None]:
    """Within this, feed-forward blocks are those that a case asks for."""
    return blocks_that_reduce() if settings.get("reduces") else experts_in_modules() if settings.get("modules") else nullcontext()


def attempt(folder: Path, mesh: Mesh) -> None:
    """Train one case. What every rank refuses fails that case alone; an error of some ranks ends all of them, and names the case."""
    out = folder / f"out_{mesh.world_size}"
    settings = json.loads((folder / "settings.json").read_text())
    try:
        with blocks_of(settings):
            (train_together if settings.get("together") else train)(folder, mesh, settings)
    except Exception as error:
        out.mkdir(exist_ok=True)
        own = out / f"{ERROR}_{mesh.rank}"
        own.with_suffix(".part").write_text("".join(traceback.format_exception(error)))
        own.with_suffix(".part").rename(own)
        end = time.monotonic() + TOGETHER
        while len(list(out.glob(f"{ERROR}_?"))) < mesh.world_size:
            if time.monotonic() > end:  # the others wait in a collective, or are past it
                raise RuntimeError(f"case {folder.name}: only some ranks failed") from error
            time.sleep(0.1)


if __name__ == "__main__":
    main()
