"""The exchanges of data-parallel CPU engines, over two real gloo processes (`rlx/inference/server/exchange.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlx.inference.server.exchange import add_up, gather

pytestmark = pytest.mark.slow

SIZES = ([3, 1], [0, 2], [2, 2], None)  # rows of each rank; None: all alike


def rows(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count * 5, dtype=torch.float64).reshape(count, 5) + 100 * (rank + 1)


def sums(rank: int, count: int) -> torch.Tensor:
    """What a rank computed for the rows of all."""
    return torch.arange(count * 5, dtype=torch.float64).reshape(count, 5) * (rank + 1)


def rank(number: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=number, world_size=2)
    for sizes in SIZES:
        counts = sizes or [2, 2]
        start = sum(counts[:number])
        everything = torch.cat([rows(0, counts[0]), rows(1, counts[1])])
        assert torch.equal(gather(rows(number, counts[number]), sizes, 2, None), everything)
        parts = sums(number, sum(counts))
        expected = (sums(0, sum(counts)) + sums(1, sum(counts)))[start : start + counts[number]]
        assert torch.equal(add_up(parts, sizes, number, 2, None), expected)
        assert torch.equal(parts, sums(number, sum(counts))), "what was given is left as it was"
    dist.destroy_process_group()  # a group that ends with its process may abort it


def test_every_rank_gets_the_rows_of_all_and_its_own_rows_of_the_sums(tmp_path: Path) -> None:
    mp.spawn(rank, (str(tmp_path),), nprocs=2)
