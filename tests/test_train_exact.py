"""Parameters that a family keeps in float32 beside 16-bit ones, on two ranks as on one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from trainer_examples import make_model, make_samples, step_batch, train_minibatch
from transformers import AutoModelForCausalLM
from transformers.models.inkling import InklingTextConfig

from rlx.config.schema import LoraConfig, LossTerms
from rlx.data.packing import pack
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.models.load import load_policy
from rlx.models.shard import _placement_of_exact
from rlx.parallel.mesh import Mesh, join, one_process
from rlx.paths import RunPaths
from rlx.train.checkpoint import Saver, TrainerProgress, load
from rlx.train.muon import Muon, groups_of
from rlx.train.step import PolicyTrainer
from rlx.weights.publish import Publisher
from rlx.weights.shapes import digest_of

pytestmark = pytest.mark.slow

RANKS = 2
FAMILY = {
    "layer_types": ["hybrid", "hybrid_sliding"], "mlp_layer_types": ["dense", "dense"], "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16, "logits_mup_width_multiplier": 1.0,
}  # fmt: skip
CONVOLUTIONS = ("self_attn.k_sconv", "self_attn.v_sconv", "attn_sconv", "mlp_sconv")
KEPT = {f"model.layers.{layer}.{name}.conv1d.weight" for layer in range(2) for name in CONVOLUTIONS}
CASES: dict[str, dict[str, Any]] = {
    "mixed": {"load": {"dtype": "bfloat16"}},
    "reduced": {"load": {"dtype": "bfloat16", "reduce_dtype": "bfloat16"}},
    "parameters": {"load": {"dtype": "bfloat16", "optimization_dtype": "bfloat16"}},
    "copies": {"load": {"dtype": "bfloat16"}, "copies": 2},
    "kept_gathered": {"load": {"dtype": "bfloat16", "reshard_after_forward": False}},
    "adapters": {"load": {"dtype": "bfloat16", "lora": LoraConfig(rank=2, target_modules=["q_proj"])}},
}


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def step(folder: Path, mesh: Mesh, **keys: Any) -> tuple[PolicyTrainer, dict[str, Any]]:
    """One optimizer step of Muon: what the layers computed with, the scores before it, the gradients and the weights after it."""
    model = load_policy(str(folder / "model"), mesh, **keys)
    computed: dict[str, Tensor] = {}

    def look(layer: int, *_: Any) -> None:
        for name in KEPT:
            if name.startswith(f"model.layers.{layer}."):
                computed[name] = model.hf.get_parameter(name).detach().clone()

    for number, layer in enumerate(model.hf.model.layers):
        layer.self_attn.o_proj.register_forward_pre_hook(functools.partial(look, number))
    optimizer = Muon(groups_of(model.layers, model), lr=1e-2)
    trainer = PolicyTrainer(model, Objective(grpo, LossTerms(aggregate="token_mean")), optimizer, mesh=mesh, max_norm=1e9)
    batch = step_batch(0, [make_samples(groups=2)])
    (mini_batch,) = pack(batch, rank=mesh.data_rank, ranks=mesh.num_data_ranks, tokens=100, padded=True).mini_batches
    (everything,) = pack(batch, rank=0, ranks=1, tokens=1000, padded=True).mini_batches[0].micro_batches
    logp = trainer.score(everything)[0]
    trainer.reshard()
    initial = {name: whole(p) for name, p in model.hf.named_parameters()}
    dtypes = {name: p.dtype for name, p in model.hf.named_parameters()}
    gradients: dict[str, Tensor] = {}
    own = optimizer.step

    def stepped(*args: Any) -> Any:
        gradients.update({name: whole(p.grad) for name, p in model.hf.named_parameters() if p.grad is not None})
        return own(*args)

    optimizer.step = stepped  # type: ignore[method-assign]
    metrics = train_minibatch(trainer, mini_batch, step=0)
    optimizer.step = own  # type: ignore[method-assign]
    found = {"computed": computed, "initial": initial, "dtypes": dtypes, "logp": logp, "gradients": gradients, "metrics": metrics}
    return trainer, found | {"after": {name: whole(p) for name, p in model.hf.named_parameters()}}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    for case, keys in CASES.items():
        store = dist.FileStore(f"{folder}/{case}", RANKS)
        mesh = join(torch.device("cpu"), rank=rank, world_size=RANKS, timeout=120, store=store, copies=keys.get("copies", 1))
        trainer, found = step(Path(folder), mesh, **keys["load"])
        if case in ("mixed", "parameters"):
            paths = RunPaths(Path(folder) / f"run_{case}")
            Publisher.of(trainer.model, mesh, paths, source=f"{folder}/model", dtype=torch.bfloat16).ensure(1)
            Saver(trainer, digest_of).save(Path(folder) / f"checkpoint_{case}", TrainerProgress(step=1, updates=1)).files()
            mesh.barrier()
        torch.save(found, f"{folder}/{case}_{rank}.pt")
        mesh.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    hf = make_model(InklingTextConfig, **FAMILY)
    assert set(KEPT) <= dict(hf.named_parameters()).keys()
    hf.save_pretrained(folder / "model")
    run_ranks(work, (str(folder),), RANKS)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_what_a_family_keeps_in_float32_is_computed_and_trained_unrounded(case: str, folder: Path) -> None:
    one, other = (torch.load(folder / f"{case}_{rank}.pt", weights_only=False) for rank in range(RANKS))
    master = CASES[case]["load"].get("optimization_dtype", "float32" if case != "adapters" else "bfloat16")
    stored = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for name, value in stored.named_parameters():
        if name in KEPT:
            assert one["computed"][name].dtype == torch.float32
            assert torch.equal(one["computed"][name].view(value.shape), value), name
            assert not torch.equal(value, value.bfloat16().float()), "else this tests nothing"
        kept = name in KEPT or name.endswith(("lora_A", "lora_B"))
        assert one["dtypes"][name] == (torch.float32 if kept else getattr(torch, master)), name
    assert torch.equal(one["logp"], other["logp"])
    for name, value in one["after"].items():
        assert torch.equal(value, other["after"][name])
        assert torch.equal(value, one["initial"][name]) == (case == "adapters" and "lora_B" not in name), f"{name} is trained"
    if case == "adapters":
        assert not KEPT & one["gradients"].keys()


def test_two_ranks_score_as_one_process_without_fsdp(folder: Path) -> None:
    load = CASES["parameters"]["load"]
    two = torch.load(folder / "parameters_0.pt", weights_only=False)
    _, one = step(folder, one_process("cpu"), **load)
    assert torch.equal(one["logp"], two["logp"])
    for name, gradient in one["gradients"].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(two["gradients"][name].float(), gradient.float(), rtol=0.02, atol=0.02 * scale, msg=name)


def test_gradients_of_two_ranks_are_those_of_one(folder: Path) -> None:
    two = torch.load(folder / "mixed_0.pt", weights_only=False)
    mesh = join(torch.device("cpu"), rank=0, world_size=1, timeout=60)
    try:
        _, one = step(folder, mesh, **CASES["mixed"]["load"])
    finally:
        mesh.close()
    for name, gradient in one["gradients"].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(two["gradients"][name], gradient, rtol=0.02, atol=0.02 * scale, msg=name)
        assert name not in KEPT or not torch.equal(two["gradients"][name], two["gradients"][name].bfloat16().float())


def test_a_divided_one_is_refused() -> None:
    mesh = join(torch.device("cpu"), rank=0, world_size=1, timeout=60)
    try:
        assert mesh.fsdp is not None
        parts = [torch.nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh.fsdp, [Shard(0)])) for _ in range(2)]
        placed = _placement_of_exact(parts[:1], None, lambda parameter: "as others")
        assert placed(parts[1]) == "as others"
        with pytest.raises(ValueError, match=r"keeps a parameter \[2, 2\] in float32.*set both to 1, or model.dtype=float32"):
            placed(parts[0])
    finally:
        mesh.close()


@pytest.mark.parametrize("case", ["mixed", "parameters"])
def test_versions_and_checkpoints_have_them_unrounded(case: str, folder: Path) -> None:
    """A version for the servers, and a checkpoint that goes on with another number of ranks."""
    two = torch.load(folder / f"{case}_0.pt", weights_only=False)
    written = AutoModelForCausalLM.from_pretrained(RunPaths(folder / f"run_{case}").weights_of(1), dtype="auto")
    for name, value in written.named_parameters():
        assert value.dtype == (torch.float32 if name in KEPT else torch.bfloat16), name
        assert torch.equal(value, two["after"][name].to(value.dtype)), name
    mesh = join(torch.device("cpu"), rank=0, world_size=1, timeout=60)
    try:
        trainer, _ = step(folder, mesh, **CASES[case]["load"])
        load(folder / f"checkpoint_{case}", trainer)
        for name, value in trainer.model.hf.named_parameters():
            assert torch.equal(whole(value), two["after"][name]), name
    finally:
        mesh.close()
