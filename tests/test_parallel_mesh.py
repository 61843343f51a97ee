"""The mesh: how ranks exchange values, and that a single process needs no process group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlx.config.schema import LoraConfig
from rlx.models.lora import AdaptedLinear
from rlx.parallel import mesh as module
from rlx.parallel.mesh import RankLost, divide, join, one_process, seed_masks


def test_one_process_has_no_process_group_and_hears_itself():
    mesh = one_process("cpu")
    assert (mesh.rank, mesh.world_size, mesh.data_rank, mesh.num_data_ranks) == (0, 1, 0, 1)
    assert not mesh.is_distributed
    assert not dist.is_initialized()
    assert (mesh.ranks_where(True), mesh.ranks_where(False)) == ([0], [])
    assert (mesh.any(True), mesh.any(False), mesh.broadcast_bytes(b"batch")) == (True, False, b"batch")
    values = torch.tensor([1.0, 2.0])
    mesh.barrier()
    mesh.sum(values)
    mesh.max(values)
    mesh.broadcast(values)
    mesh.close()
    assert values.tolist() == [1.0, 2.0]
    assert mesh.background_group() is None


def masks_of_all_ranks() -> list[torch.Tensor]:
    """What an adapter lets through on each rank, of the same inputs."""
    layer = AdaptedLinear(torch.nn.Linear(16, 16), LoraConfig(rank=16, alpha=16, dropout=0.5), torch.float32)
    with torch.no_grad():
        layer.lora_A.copy_(torch.eye(16))
        layer.lora_B.copy_(torch.eye(16))
    inputs = torch.ones(8, 16)
    kept = (layer(inputs) - torch.nn.functional.linear(inputs, layer.weight, layer.bias)).detach().round()
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    everyone = [torch.empty_like(kept) for _ in range(2)]
    dist.all_gather(everyone, kept)
    return everyone


def rank(number: int, folder: str) -> None:
    """Runs one of two ranks and writes the values that it received to a file."""
    threads: list[str] = []

    @contextmanager
    def alive() -> Iterator[None]:
        threads.append(threading.current_thread().name)
        yield

    meeting = dist.FileStore(f"{folder}/store", 2)
    mesh = join(torch.device("cpu"), rank=number, world_size=2, timeout=300, store=meeting, alive=alive, copies=2)
    limits = {group._get_backend(mesh.device).options._timeout.total_seconds() for group in mesh.fsdp.get_all_groups()}
    assert limits == {300}, limits
    heard = [mesh.any(number == 1), mesh.any(False)]
    module.PIECE = 1000  # so that the message takes several broadcasts
    content = mesh.broadcast_bytes(bytes(range(256)) * 10 if mesh.first else None)
    assert content == bytes(range(256)) * 10
    assert mesh.broadcast_bytes(b"" if mesh.first else None) == b""
    values = torch.tensor([1.0 + number, 5.0])
    mesh.sum(values)
    largest = torch.tensor([float(number)])
    mesh.max(largest)
    assert mesh.ranks_where(number == 1) == [1]
    assert mesh.all_gather_float(number + 0.3) == [0.3, 1.3]
    together = divide(mesh, timeout=300, context=2)
    assert (together.data_rank, together.num_data_ranks, together.row.context.rank) == (0, 1, number)
    assert together.is_group_leader == (number == 0)
    assert together.row.context.group._get_backend(mesh.device).options._timeout.total_seconds() == 300
    seed_masks(5, mesh)
    ours, theirs = masks_of_all_ranks()
    assert not torch.equal(ours, theirs), "ranks with other samples must not drop the same inputs"
    seed_masks(5, divide(mesh, timeout=300, tensor=2))
    assert torch.equal(*masks_of_all_ranks()), "ranks that divide a matrix must drop the same of their common inputs"
    alone = torch.tensor(1.0)
    together.sum(alone)  # both ranks of a context group have the whole loss
    assert alone == 1
    mesh.barrier()
    Path(folder, str(number)).write_text(f"{heard} {values.tolist()} {largest.tolist()} {bool(threads)}")
    if mesh.first:
        mesh.close()  # leaves while the other rank is in a collective
        return
    module.RANK_LOST_SECONDS = 0.0
    with pytest.raises(RankLost, match="rank 1 of 2 lost another rank, whose own log says why"):
        mesh.barrier()
    Path(folder, "lost").touch()


@pytest.mark.slow
def test_two_ranks_hear_each_other_and_one_that_loses_the_other_says_so(tmp_path: Path):
    mp.spawn(rank, (str(tmp_path),), nprocs=2)
    said = "[True, False] [3.0, 10.0] [1.0]"
    assert [(tmp_path / name).read_text() for name in "01"] == [f"{said} False", f"{said} True"]
    assert (tmp_path / "lost").exists()


def patient(number: int, folder: str) -> None:
    """One of two ranks, of which rank 0 waits for a file longer than a collective may take."""
    limit = 8.0
    mesh = join(torch.device("cpu"), rank=number, world_size=2, timeout=limit, store=dist.FileStore(f"{folder}/store", 2))

    def read(waits: Callable[[], None]) -> bytes:
        until = time.monotonic() + 1.5 * limit
        while time.monotonic() < until:
            time.sleep(0.05)
            waits()
        return b"batch"

    for _ in range(2):
        assert mesh.read(read if number == 0 else lambda _: b"of another rank") == b"batch"
        limit = 0.0
    mesh.barrier()
    mesh.close()  # a group that ends with its process may abort it
    Path(folder, str(number)).touch()


@pytest.mark.slow
@pytest.mark.long
def test_rank_0_may_wait_longer_than_a_collective_while_it_says_that_it_waits(tmp_path: Path):
    mp.spawn(patient, (str(tmp_path),), nprocs=2)
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}
