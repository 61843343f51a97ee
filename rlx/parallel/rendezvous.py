"""This process's rank, and how ranks on several hosts meet: rank 0 binds a free port and writes its address to the run directory.

torchrun starts several ranks on one host; they meet by its variables instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rlx.paths import RunPaths, listed, write_text
from rlx.process import host_name
from rlx.waiting import wait_for

if TYPE_CHECKING:
    import torch.distributed as dist

TOKEN = "RLX_RUN_TOKEN"  # the supervisor gives all processes of one attempt the same value
CONNECT = 300.0  # seconds for a rank to reach the store after reading its address


@dataclass(frozen=True, slots=True)
class Place:
    """This process's ranks, as the plan or torchrun gives them."""

    rank: int
    local_rank: int  # index of its GPU among the visible ones
    world_size: int
    under_torchrun: bool

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place:
        """Read from the environment. Without RANK and WORLD_SIZE it is a single process."""
        numbers = (int(environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
        rank, local_rank, world_size = numbers
        return cls(rank, local_rank, world_size, under_torchrun="TORCHELASTIC_RUN_ID" in environ)

    @property
    def name(self) -> str | None:
        """The process's name in the plan; None for a rank that torchrun starts, which the plan does not list."""
        if self.rank == 0:
            return "trainer"
        return None if self.under_torchrun else f"trainer_{self.rank}"


def meet(paths: RunPaths, rank: int, world_size: int, timeout: float, tick: Callable[[], None] | None = None) -> dist.Store:
    """The store of this attempt's ranks. Rank 0 serves it; the others wait at most `timeout` seconds for its address.

    `tick` is called while waiting. An address of an earlier attempt is ignored. Raises WaitTimeout.
    """
    import torch.distributed as dist

    file = paths.endpoints / "trainer.json"
    token = os.environ.get(TOKEN, "")
    if rank == 0:
        store = dist.TCPStore(host_name(), 0, world_size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=CONNECT))
        write_text(file, json.dumps({"host": host_name(), "port": store.port, "token": token}))
        return store

    def address() -> dict | None:
        try:
            found = json.loads(file.read_text()) if listed(file) else {"token": None}
        except OSError:
            return None
        return found if found["token"] == token else None

    found = wait_for(address, f"the address of the trainer's rank 0 ({file})", timeout, poll=0.05, tick=tick)
    return dist.TCPStore(found["host"], found["port"], world_size, is_master=False, timeout=timedelta(seconds=CONNECT))
