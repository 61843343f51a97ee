"""Two trainer processes against one, where each rank has one row: the dtypes of sums, parameters of one rank alone, a compiled layer.

`test_train_ranks.py` has everything that needs no rows made for a rank. Processes are forked, because importing takes longer than the test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import run_ranks
from rank_worker import experts_in_modules
from torch import Tensor
from trainer_examples import VOCABULARY, make_model, make_sample, step_batch
from transformers.models.llama import LlamaConfig

from rlx.config.schema import LossTerms
from rlx.data.packing import pack
from rlx.losses.base import Objective
from rlx.losses.grpo import grpo
from rlx.models.load import load_policy
from rlx.models.shard import compile_layers
from rlx.parallel.mesh import Mesh, join
from rlx.train.step import PolicyTrainer
from rlx.types import TrainingSample

pytestmark = pytest.mark.slow

RANKS = 2
BFLOAT16 = {"dtype": "bfloat16", "optimization_dtype": "bfloat16"}
CASES: dict[str, dict[str, Any]] = {
    "float32": {"load": {"dtype": "float32"}},
    "reduced": {"load": {"dtype": "float32", "reduce_dtype": "bfloat16"}},
    "parameters": {"load": BFLOAT16},
    "parameters_and_reduced": {"load": BFLOAT16 | {"reduce_dtype": "bfloat16"}},
    "copies_reduced": {"load": {"dtype": "float32", "reduce_dtype": "bfloat16"}, "copies": 2},
    "compiled": {"load": {"dtype": "float32", "compile": True}},  # with the family's own block, which torch can trace
}
HALF = (VOCABULARY + 3) // 2  # tokens below have one expert, the others another
ROUNDING = 2.0**-7  # of the gradients that are summed: each is rounded, and so is the sum, by at most 2^-8 of its size


def make_halves() -> list[TrainingSample]:
    """Two rollouts of equal length; the tokens of the first are below `HALF`, those of the second are not."""
    rng = np.random.default_rng(0)
    bounds = ((3, HALF), (HALF, VOCABULARY))
    return [make_sample(group, 0, rng.integers(*both, 14).tolist(), range(4, 14), rng) for group, both in enumerate(bounds)]


def make_divided_model() -> Any:
    """A layer whose feed-forward block (`experts_in_modules`) sends tokens below `HALF` to one matrix and the others to another."""
    hf = make_model(LlamaConfig, tie_word_embeddings=False, num_hidden_layers=1)
    with torch.no_grad():
        hf.model.embed_tokens.weight[:, 0] = torch.where(torch.arange(VOCABULARY) < HALF, 4.0, -4.0)
        hf.model.layers[0].self_attn.o_proj.weight[0] = 0  # attention leaves this sign as it is
    return hf


traced = partial(compile_layers, backend="eager")  # torch's default one would take minutes


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


@contextlib.contextmanager
def noted() -> Iterator[dict[str, set[torch.dtype]]]:
    """The dtypes of the tensors that FSDP sums, by collective."""
    found: dict[str, set[torch.dtype]] = {}
    with contextlib.ExitStack() as patched:
        for name in ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce"):  # the second is its name before torch 2.13
            if (own := getattr(dist, name, None)) is None:
                continue

            def noting(*args: Any, own: Any = own, name: str = name, **keys: Any) -> Any:
                dtypes = {each.dtype for each in (*args, *keys.values()) if isinstance(each, Tensor)}
                found.setdefault("all_reduce" if name == "all_reduce" else "reduce_scatter", set()).update(dtypes)
                return own(*args, **keys)

            patched.enter_context(patch.object(dist, name, noting))
        yield found


def train(folder: Path, mesh: Mesh, load: dict[str, Any], part: int, *, experts: bool) -> dict[str, Any]:
    """The gradients of one step, of the row of rank `part`, summed over the ranks; and how they were summed."""
    with experts_in_modules() if experts else nullcontext(), patch("rlx.models.load.compile_layers", traced):
        model = load_policy(str(folder / "model"), mesh, **load)
        trainer = PolicyTrainer(model, Objective(grpo, LossTerms(aggregate="token_mean")), torch.optim.SGD(model.parameters()), mesh=mesh)
        (mini_batch,) = pack(step_batch(0, [make_halves()]), rank=part, ranks=RANKS, tokens=100).mini_batches
        (row,) = mini_batch.micro_batches
        with noted() as dtypes:
            trainer.accumulate_gradients(mini_batch)
    # An optimizer leaves a parameter without a gradient as it is.
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    dtype_of = {parameter.dtype for parameter in model.parameters()} | {gradient.dtype for gradient in gradients.values()}
    found = {"dtypes": dtypes, "own": dtype_of, "tokens": row.token_ids}
    return found | {"gradients": {name: whole(gradient).float() for name, gradient in gradients.items()}}


def work(rank: int, folder: str) -> None:
    """One of two ranks."""
    torch.set_num_threads(1)
    found = {}
    for case, keys in CASES.items():
        store = dist.FileStore(f"{folder}/{case}", RANKS)
        mesh = join(torch.device("cpu"), rank=rank, world_size=RANKS, timeout=120, store=store, copies=keys.get("copies", 1))
        found[case] = train(Path(folder), mesh, keys["load"], rank, experts="compile" not in keys["load"])
        mesh.close()
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """By case: what each of two ranks found, and what one process finds in each rank's row."""
    folder = tmp_path_factory.mktemp("two_ranks")
    make_divided_model().save_pretrained(folder / "model")
    run_ranks(work, (str(folder),), RANKS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    mesh = join(torch.device("cpu"), rank=0, world_size=1, timeout=60)
    try:
        plain = {"reduce_dtype": "float32", "compile": False}
        parts = {
            case: [train(folder, mesh, keys["load"] | plain, part, experts="compile" not in keys["load"]) for part in range(RANKS)]
            for case, keys in CASES.items()
        }
    finally:
        mesh.close()
        torch.set_num_threads(threads)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)], parts


def test_parameters_of_equal_size_that_only_one_rank_uses_get_their_own_gradients(results: Any) -> None:
    """FSDP sums the gradients of a unit end to end. Without those that a rank lacks, one matrix would get the sum with the other's."""
    ranks, parts = results
    gate, up = (f"hf.model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    below, above = parts["float32"]
    assert below["tokens"].max() < HALF <= above["tokens"].min()
    assert not below["gradients"][up].any()
    assert not above["gradients"][gate].any()
    assert below["gradients"][gate].shape == above["gradients"][up].shape
    assert below["gradients"][gate].any()
    assert above["gradients"][up].any()
    for found in (rank["float32"]["gradients"] for rank in ranks):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, below["gradients"][name] + above["gradients"][name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_summed_in_the_dtype_that_is_asked_for_and_near_those_of_one_process(case: str, results: Any) -> None:
    ranks, parts = results
    load = CASES[case]["load"]
    reduced, master = (getattr(torch, load.get(key, "float32")) for key in ("reduce_dtype", "optimization_dtype"))
    for rank in ranks:
        found = rank[case]
        assert found["dtypes"] == {"all_reduce" if "copies" in CASES[case] else "reduce_scatter": {reduced}}
        assert found["own"] == {master}, "parameters and gradients"
        for name, gradient in found["gradients"].items():
            one, other = (part["gradients"][name] for part in parts[case])
            rounded = torch.bfloat16 in (reduced, master)
            near = ROUNDING * (one.abs() + other.abs()) if rounded else 0.0
            assert bool(((gradient - one - other).abs() <= near + 1e-7).all()), name
            assert not rounded or torch.equal(gradient, gradient.bfloat16().float()), name
