"""What torch finds of this machine's GPUs, as one JSON object on standard output: `python -m rlx.parallel.probe`.

    {"cuda": "13.0", "available": true, "devices": [{"name": "NVIDIA H100", "memory": 85e9, "capability": [9, 0]}],
     "apart": [[0, 1]], "nccl": {"ranks": 2, "bytes_per_second": 1.2e11}}

`apart`: pairs of GPUs without peer access. `nccl`: an all-reduce over all GPUs, or `{"error": …}`; null with one GPU.
`rlx doctor` starts it as a process of its own and kills it when it hangs.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

REDUCED = 64 * 2**20  # bytes of the all-reduce that is measured
TIMES = 5


def look() -> dict[str, Any]:
    """What torch finds."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found: dict[str, Any] = {"cuda": torch.version.cuda, "available": torch.cuda.is_available(), "apart": [], "nccl": None}
    found["devices"] = [
        {"name": each.name, "memory": each.total_memory, "capability": [each.major, each.minor]}
        for each in (torch.cuda.get_device_properties(index) for index in range(count))
    ]
    if count > 1:
        found["apart"] = [list(pair) for pair in combinations(range(count), 2) if not torch.cuda.can_device_access_peer(*pair)]
        found["nccl"] = reduce_over(count)
    return found


def reduce_over(ranks: int, backend: str = "nccl") -> dict[str, Any]:
    """Reduce a tensor over one process for each GPU; how fast that was, or the error of the first process that failed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(_rank, (ranks, backend, folder), nprocs=ranks)
        except Exception as error:  # each backend raises its own types
            return {"error": str(error).strip().splitlines()[-1]}
        with open(f"{folder}/seconds", encoding="utf-8") as file:
            return {"ranks": ranks, "bytes_per_second": REDUCED / float(file.read())}


def _rank(rank: int, ranks: int, backend: str, folder: str) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    tensor = torch.ones(REDUCED // 4, device=device)
    dist.all_reduce(tensor)  # the first one makes the connections
    began = time.perf_counter()
    for _ in range(TIMES):
        dist.all_reduce(tensor)
    value = tensor[-1].item()  # waits for the device
    assert value == float(ranks) ** (TIMES + 1), f"rank {rank} got {value}"
    if rank == 0:
        with open(f"{folder}/seconds", "w", encoding="utf-8") as file:
            file.write(str((time.perf_counter() - began) / TIMES))
    dist.destroy_process_group()
    os._exit(0)  # what is left of gloo's threads sometimes aborts an interpreter that shuts down (`rlx.process.end_at_once`)


if __name__ == "__main__":
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    print(json.dumps(look()), flush=True)
