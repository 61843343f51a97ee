"""Compares the estimate of the trainer's memory with what is free, before the model is loaded. It warns: the estimate is one.

On a GPU two numbers count: the device's free memory, beside an engine that has its own already, and the host's. On a CPU only the host's,
which the ranks there share; engines beside them may not have taken theirs yet.
"""

from __future__ import annotations

import logging

import torch

from rlx.config import limits
from rlx.config.memory import size, trainer_memory
from rlx.config.savings import remedies
from rlx.config.schema import TrainingRoot
from rlx.parallel.mesh import Mesh

log = logging.getLogger("rlx.trainer")


def too_little(cfg: TrainingRoot, mesh: Mesh) -> str | None:
    """A warning if some rank or host has less memory free than the estimate; it is also logged. Every rank calls this."""
    memory, problems = trainer_memory(cfg), []
    if mesh.device.type == "cuda":
        need = memory.device - memory.context  # this process has its context already
        free = mesh.each(float(torch.cuda.mem_get_info(mesh.device)[0]))
        least = min(range(len(free)), key=lambda rank: free[rank])
        if need > free[least]:
            problems.append(f"a rank needs {size(need)} of its device, and {size(free[least])} are free on that of rank {least}")
    hosts = mesh.hosts()
    here = next(ranks for ranks in hosts if mesh.rank in ranks)
    writers = 1 if cfg.lora.on else len(hosts)  # rank 0 writes adapters alone, otherwise each host its share of the model
    need = len(here) * memory.host + (memory.published / writers if hosts.index(here) < writers else 0.0)
    needs, frees = mesh.each(need), mesh.each(float(limits.free_memory()))
    worst = max(range(len(needs)), key=lambda rank: needs[rank] - frees[rank])
    if needs[worst] > frees[worst]:
        there = next(ranks for ranks in hosts if worst in ranks)
        ranks = f"the {len(there)} ranks there need" if len(there) > 1 else "it needs"
        problems.append(f"{ranks} {size(needs[worst])} of host memory, and {size(frees[worst])} are free on the host of rank {worst}")
    if not problems:
        return None
    text = f"the trainer may run out of memory: by the estimate {'; '.join(problems)}. {'; '.join(line.strip() for line in remedies(cfg))}"
    log.warning("%s", text)
    return text
