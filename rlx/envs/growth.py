"""How many workers an environment has if no key says so: one, and more while its rollouts wait for them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlx.envs.watch import Worker

WAITING = 0.1  # share of the rollouts in flight that wait until their worker has computed for others
PATIENCE = 10.0  # seconds for which so many must wait


def most_workers(num_envs: int) -> int:
    """How many workers each of so many environments may have: together half of this process's cores, as others run here, too."""
    return max(1, len(os.sched_getaffinity(0)) // (2 * num_envs))


@dataclass(slots=True)
class Growth:
    """Decides when a pool gets another worker."""

    least: int  # workers at the start
    most: int
    _calm: float = field(default_factory=time.monotonic)  # monotonic seconds when rollouts did not wait

    def due(self, workers: Sequence[Worker], now: float) -> bool:
        """Whether another worker should start now."""
        in_flight = sum(len(playing.members) for worker in workers for playing in worker.playing.values())
        grows = len(workers) < self.most and all(worker.loaded for worker in workers)
        if not grows or sum(worker.waiting for worker in workers) <= WAITING * in_flight:
            self._calm = now
        if now - self._calm < PATIENCE:
            return False
        self._calm = now
        return True

    def refused(self, worker: Worker, workers: Sequence[Worker]) -> bool:
        """Whether a worker that cannot be used is one too many, which the others can do without. Then there will be no further ones."""
        if worker.place < self.least:
            return False
        self.most = min(self.most, max(1, len(workers) - 1))
        return True
