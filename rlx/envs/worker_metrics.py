"""What all worker pools of a mix say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rlx.envs.base import Environment
from rlx.envs.pool import WorkerPool
from rlx.inference.sampler import Sampler


def pools_of(envs: Mapping[str, Environment]) -> list[WorkerPool]:
    """Those of the environments that have workers."""
    return [env for env in envs.values() if isinstance(env, WorkerPool)]


def away(sampler: Sampler, envs: Mapping[str, Environment]) -> float:
    """Seconds so far in which no inference server took requests: those of this process, and those of each environment's workers, in sum.

    So any outage of one of them shows, also while others had longer ones.
    """
    return sampler.away + sum(pool.away for pool in pools_of(envs))


def worker_metrics(envs: Mapping[str, Environment]) -> dict[str, float]:
    """What the workers of a mix need now and what happened to them since the start, by metric name."""
    pools = pools_of(envs)
    values = {"workers/replayed": float(sum(pool.replayed for pool in pools))}
    if pools:
        largest = max((worker.memory for pool in pools for worker in pool._workers), default=0)
        values["perf/env_worker_memory_gb"] = largest / 2**30
        values["perf/waiting_for_workers"] = float(sum(pool.waiting for pool in pools))
    replaced = sum((pool.replaced for pool in pools), Counter[str]())
    return values | {f"workers/replaced_{cause}": float(count) for cause, count in replaced.items()}
