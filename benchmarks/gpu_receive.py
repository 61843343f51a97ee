"""The other end of the transfers that `gpu.py` measures: `server DIRECTORY` calls for three versions, `bare HOST:PORT SIZE` only receives.

As a server it prints how many tensors of the last version have another checksum than the trainer's.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlx.parallel.transfer import Announced, Group, reach_store
from rlx.paths import RunPaths
from rlx.types import WeightVersion
from rlx.waiting import wait_for
from rlx.weights.attest import checksum
from rlx.weights.mailbox import Call
from rlx.weights.offer import read_offer, read_secret

LIMIT = 60.0  # seconds
VERSIONS = (1, 2, 3)


def offered(paths: RunPaths, version: int) -> WeightVersion | None:
    found = read_offer(paths)
    return found if found is not None and found.version == version else None


def server(folder: str) -> int:
    paths = RunPaths(Path(folder))
    group: Group | None = None
    tensors: dict[str, torch.Tensor] = {}
    sums: Any = None
    for version in VERSIONS:
        latest = wait_for(lambda version=version: offered(paths, version), f"version {version}", LIMIT, poll=0.001)
        call = Call(latest.where, LIMIT, read_secret(paths.offer_secret))
        call.ask("receiver", version, 1, 1)
        sums = None
        while sums is None:
            order, arguments = call.next()
            if order == "init_weight_transfer_engine":
                info = arguments["init_info"]
                group = Group(reach_store(info["where"], LIMIT), info["name"], info["rank_offset"], info["world_size"], LIMIT)
            if order == "update_weights":
                assert group is not None
                for part in group.receive(Announced(**arguments["update_info"])):
                    tensors |= {name: tensor.clone() for name, tensor in part}
            sums = arguments.get("sums")
            call.done()
    return sum(checksum(tensors[name]) != fact["sum"] for name, fact in sums.items())


def bare(where: str, size: int) -> None:
    store = reach_store(where, LIMIT)
    group: Any = dist.ProcessGroupGloo(dist.PrefixStore("bare", store), 1, 2, timedelta(seconds=LIMIT))
    flat = torch.empty(size, dtype=torch.uint8)
    for _ in VERSIONS:
        for work in [group.broadcast(piece, 0) for piece in flat.split(1 << 26)]:
            work.wait()
        group.barrier().wait()


if __name__ == "__main__":
    if sys.argv[1] == "server":
        print(server(sys.argv[2]))
    else:
        bare(sys.argv[2], int(sys.argv[3]))
