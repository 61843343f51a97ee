"""Messages between rank 0 and some other ranks, from threads that work beside training.

They have a process group of their own, over gloo, so that they never mix with training's collectives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from rlx.parallel import mesh as meshes
from rlx.parallel.mesh import Mesh, RankLost

LIMIT = 3600.0  # seconds for a message, thus also for what its sender does before: writing tens of GB to a slow disk


class Subgroup:
    """Rank 0 and others. Each member makes the same calls in the same order, from one thread at a time."""

    def __init__(self, mesh: Mesh, ranks: Sequence[int]) -> None:
        """Every rank of the mesh calls this. `ranks`: the members, with rank 0 first; a member alone needs no group."""
        assert ranks[0] == 0, ranks
        self.rank, self.ranks = mesh.rank, tuple(ranks)
        self._group = dist.new_group(list(ranks), timedelta(seconds=LIMIT), backend="gloo") if len(ranks) > 1 else None

    def hear_first(self, flag: bool = False) -> bool:
        """Rank 0's `flag`, on every member. Raises RankLost."""
        if self._group is None:
            return flag
        told = torch.tensor(float(flag))
        with _blaming("rank 0"):
            dist.broadcast(told, src=0, group=self._group)
        return bool(told)

    def send(self, content: bytes) -> None:
        """Send to rank 0, which must `receive`. Returns when rank 0 has it. Raises RankLost."""
        with _blaming("rank 0"):
            dist.send(torch.tensor(len(content)), dst=0, group=self._group)
            dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), dst=0, group=self._group)

    def receive(self, rank: int) -> bytes:
        """On rank 0: what this rank sends, which is not empty. Raises RankLost if that rank left before."""
        size = torch.tensor(0)
        with _blaming(f"rank {rank}"):
            dist.recv(size, src=rank, group=self._group)
            content = bytearray(int(size))
            dist.recv(torch.frombuffer(content, dtype=torch.uint8), src=rank, group=self._group)
        return bytes(content)


@contextmanager
def _blaming(lost: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        time.sleep(meshes.PATIENCE)
        raise RankLost(f"{lost} left, or sent nothing for {LIMIT:g} s; its own log says why") from error
