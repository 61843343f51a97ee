"""What all worker pools of a mix say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rlx.envs.base import Environment
from rlx.envs.pool import WorkerPool
from rlx.inference.sampler import Sampler


def waiting_for_workers(envs: Mapping[str, Environment]) -> int:
    """Rollouts that wait until the worker of their environment has computed for others; 0 while the workers keep up."""
    return sum(env.waiting for env in envs.values() if isinstance(env, WorkerPool))


def away(sampler: Sampler, envs: Mapping[str, Environment]) -> float:
    """Seconds so far in which no inference server took requests: those of this process, and those of each environment's workers, in sum.

    So any outage of one of them shows, also while others had longer ones.
    """
    return sampler.away + sum(env.away for env in envs.values() if isinstance(env, WorkerPool))


def worker_metrics(envs: Mapping[str, Environment]) -> dict[str, float]:
    """What the workers of a mix need now and what happened to them since the start, by metric name."""
    pools = [env for env in envs.values() if isinstance(env, WorkerPool)]
    values = {"workers/replayed": float(sum(pool.replayed for pool in pools))}
    if pools:
        values["perf/env_worker_memory_gb"] = max(pool.memory for pool in pools) / 2**30
        values["perf/waiting_for_workers"] = float(sum(pool.waiting for pool in pools))
    replaced = sum((pool.replaced for pool in pools), Counter[str]())
    return values | {f"workers/replaced_{cause}": float(count) for cause, count in replaced.items()}
