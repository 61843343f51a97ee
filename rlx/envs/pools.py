"""What all worker pools of a mix say together."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.envs.base import Environment
from rlx.envs.pool import WorkerPool
from rlx.inference.sampler import Sampler


def waiting_for_workers(envs: Mapping[str, Environment]) -> int:
    """Rollouts that wait until the worker of their environment has computed for others; 0 while the workers keep up."""
    return sum(env.waiting for env in envs.values() if isinstance(env, WorkerPool))


def away(sampler: Sampler, envs: Mapping[str, Environment]) -> float:
    """Seconds so far in which no inference server took the requests of this process, or those of a worker."""
    return max(sampler.away, *(env.given.away for env in envs.values() if isinstance(env, WorkerPool)), 0.0)


def worker_metrics(envs: Mapping[str, Environment]) -> dict[str, float]:
    """The metrics of all pools of a mix: sums, but the largest memory."""
    values: dict[str, float] = {"workers/replayed": 0.0}
    for env in envs.values():
        for name, value in env.report().items() if isinstance(env, WorkerPool) else ():
            values[name] = max(values.get(name, 0.0), value) if name == "perf/env_worker_memory_gb" else values.get(name, 0.0) + value
    return values
