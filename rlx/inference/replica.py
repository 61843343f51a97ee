"""What a fleet knows of one of its servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rlx.inference.endpoints import Endpoint
from rlx.inference.protocol import PolicyState

GONE = 2.0  # seconds without an answer after which an update goes on without a server, if others have the version


def totals(states: Sequence[PolicyState]) -> dict[str, float]:
    """Metrics of servers by name: the mean of their cache usage, the sums of the others."""
    return {
        "perf/servers": len(states),
        "perf/kv_cache_usage": sum(state.kv_cache_usage for state in states) / len(states),
        "perf/running": sum(state.running for state in states),
        "perf/waiting": sum(state.waiting for state in states),
        "perf/preemptions": sum(state.preemptions for state in states),
    }


class Replica:
    """One replica."""

    def __init__(self, endpoint: Endpoint, serves: bool = True) -> None:
        self.endpoint = endpoint
        self.serves = serves  # samplers use it
        self.claimed = False  # for the run, and without another run's weights
        self.silent_since: float | None = None  # monotonic time of the first of its latest failures to answer
        self.hung = False  # it took a connection and did not answer
        self.said = ""  # the latest warning about it
        self.updating = asyncio.Lock()

    @property
    def gone(self) -> bool:
        """Whether there is no use in waiting for it."""
        return self.hung or (self.silent_since is not None and time.monotonic() - self.silent_since > GONE)
