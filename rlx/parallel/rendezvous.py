"""This process's rank, and how ranks meet: rank 0 binds a free port and writes its address to the run directory.

If they are all on one host, nobody else can reach what they listen on. Between hosts, whoever reaches these ports is trusted, as
torch.distributed trusts them (docs/trust.md).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlx.paths import RunPaths, listed, write_text
from rlx.polling import wait_for
from rlx.process import host_name

if TYPE_CHECKING:
    import torch.distributed as dist

TOKEN = "RLX_RUN_TOKEN"  # the supervisor gives all processes of one attempt the same value
LOOPBACK = "127.0.0.1"
INTERFACES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # of processes that talk with no other host
CONNECT = 300.0  # seconds for a rank to reach the store after reading its address


@dataclass(frozen=True, slots=True)
class Place:
    """This process's rank, as the plan gives it."""

    rank: int
    local_rank: int  # index of its GPU among the visible ones
    world_size: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place:
        """Read from the environment. Without RANK and WORLD_SIZE it is a single process."""
        numbers = (int(environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
        return cls(*numbers)

    @property
    def name(self) -> str:
        """The process's name in the plan."""
        return f"trainer_{self.rank}" if self.rank else "trainer"


def create_store(
    paths: RunPaths, rank: int, world_size: int, timeout: float, tick: Callable[[], None] | None = None, one_host: bool = False
) -> dist.Store:
    """The store of this attempt's ranks. Rank 0 serves it; the others wait at most `timeout` seconds for its address.

    `tick` is called while waiting. `one_host`: all ranks are on this one. An address of an earlier attempt is ignored. Raises WaitTimeout.
    """
    import torch.distributed as dist

    file = paths.endpoints / "trainer.json"
    token = os.environ.get(TOKEN, "")
    if rank == 0:
        host, port, listens = host_name(), 0, dict[str, Any]()
        if one_host:  # by itself the store listens on all interfaces
            socket_ = socket.create_server((LOOPBACK, 0))
            host, port, listens = LOOPBACK, socket_.getsockname()[1], {"master_listen_fd": socket_.detach()}
        limit = timedelta(seconds=CONNECT)
        store = dist.TCPStore(host, port, world_size, is_master=True, wait_for_workers=False, timeout=limit, **listens)
        write_text(file, json.dumps({"host": host, "port": store.port, "token": token}))
        return store

    def address() -> dict | None:
        try:
            found = json.loads(file.read_text()) if listed(file) else {"token": None}
        except OSError:
            return None
        return found if found["token"] == token else None

    found = wait_for(address, f"the address of the trainer's rank 0 ({file})", timeout, poll=0.05, tick=tick)
    return dist.TCPStore(found["host"], found["port"], world_size, is_master=False, timeout=timedelta(seconds=CONNECT))
