"""vLLM's schedulers, with a prefix cache that can be forgotten while requests keep their keys and values.

vLLM forgets cached prefixes only if no request has keys and values; else it refuses, or makes the running requests compute theirs again.
After an update that keeps them (`weight_broadcast.keep_kv`), a new request must not find keys and values of older weights, neither those
that were cached before the update, nor those of the requests that went on. So all cached prefixes are forgotten, and what the running
requests cache from now on gets a name that no other request asks for.
"""

from __future__ import annotations

import uuid
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


def keep_running(scheduler_config: Any) -> None:
    """Have the engine of this configuration use the schedulers below. vLLM warns of that at its start; it means nothing here."""
    kind = KeepingAsyncScheduler if scheduler_config.async_scheduling else KeepingScheduler
    scheduler_config.scheduler_cls = f"{kind.__module__}.{kind.__qualname__}"  # by name: the engine may be in another process


class KeepingScheduler(Scheduler):
    """Without `reset_running_requests`, a reset of the prefix cache succeeds also while requests run; they keep their keys and values."""

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if not reset_running_requests and self.connector is None:
            forget_prefixes(self)
            return True
        return super().reset_prefix_cache(reset_running_requests, reset_connector)


class KeepingAsyncScheduler(KeepingScheduler, AsyncScheduler):
    """The same where steps overlap (on CUDA)."""


def forget_prefixes(scheduler: Scheduler) -> None:
    """No request will find what is cached now, nor what the running requests add to it."""
    pool = scheduler.kv_cache_manager.block_pool
    pool.cached_block_hash_to_block = BlockHashToBlockMap()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()
    for request in scheduler.running:
        request.cache_salt = uuid.uuid4().hex  # part of the first block's hash, and so of all hashes after it
        request.block_hashes.clear()
        request.update_block_hashes()
