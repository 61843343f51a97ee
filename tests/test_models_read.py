"""Reading weights on several ranks: parameters without local rows, files that differ between hosts, buffers with a dtype of their own."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from trainer_examples import make_model
from transformers import AutoModelForCausalLM

from rlx.models.load import load_policy
from rlx.parallel.mesh import join

RANKS = 3


def load(rank: int, folder: str, models: list[str]) -> None:
    """One of several ranks: load each model. If its name has `{rank}`, every rank has its own files. Write the outcomes to a file."""
    torch.set_num_threads(1)
    mesh = join(torch.device("cpu"), rank=rank, world_size=RANKS, timeout=20, store=dist.FileStore(f"{folder}/store", RANKS))
    found: list[dict[str, torch.Tensor] | str] = []
    for name in models:
        try:
            model = load_policy(f"{folder}/{name.format(rank=rank)}", mesh, dtype="float32")
            found.append({key: tensor.full_tensor() for key, tensor in model.hf.state_dict().items()})
        except ValueError as error:
            found.append(str(error))
    torch.save(found, f"{folder}/{rank}.pt")
    mesh.close()


def outcomes(folder: Path, *models: str) -> list[list]:
    """What each rank found. The processes are forked, because importing takes far longer than the test."""
    mp.start_processes(load, (str(folder), list(models)), nprocs=RANKS, start_method="fork")
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def test_a_rank_without_any_row_of_the_tied_embedding_reads_as_the_others(tmp_path: Path):
    make_model(vocab_size=4, tie_word_embeddings=True).save_pretrained(tmp_path / "model")  # 2 rows, 2 rows, none
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for (found,) in outcomes(tmp_path, "model"):
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), key
