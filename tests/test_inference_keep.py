"""Who finds whose keys and values in the cache: requests of a group, and those in flight at an update that keeps them. Real vLLM on CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from inference_server import EXACT, MemoryTrainer, Run, prompts, running, sample, under_load
from run_servers import Servers

from rlx.config.kv_cache import CPU_BLOCK
from rlx.config.load import load_run, to_yaml
from rlx.inference.telling import Manner
from rlx.types import Turn

pytestmark = pytest.mark.slow  # importing vLLM takes seconds


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("run"), tied=True)
    config = load_run(run.paths.root)
    config.weight_broadcast.type = "gloo"  # it reads files, too
    run.paths.config.write_text(to_yaml(config))
    run.paths.endpoints.mkdir(parents=True, exist_ok=True)
    run.start()
    run.ready()
    yield run
    run.stop()


def test_the_prompt_of_a_group_is_computed_once_and_a_prompt_of_its_own_anew(run: Run) -> None:
    """Seven of eight requests find the whole blocks of their prompt, although all come at once. Another prompt finds nothing."""
    group, other = prompts(2, length=200, seed=11)
    blocks = len(group) // CPU_BLOCK * CPU_BLOCK

    async def conversation() -> list[list[int]]:
        async with Servers(run.ready(), request_timeout=120) as client:
            await client.fleet.wait_ready(300)

            async def counted() -> list[int]:
                (state,) = await client.fleet.states()
                return [state.prompt_tokens, state.cached_tokens]

            found = [await counted()]
            for ids, requests in ((group, 8), (other, 1), (group, 1)):
                await asyncio.gather(*[sample(client, ids, seed, max_tokens=2) for seed in range(requests)])
                found.append(await counted())
            assert 0 < (await client.fleet.stats())["perf/prefix_cache_hits"] < 1
            return found

    steps = np.diff(asyncio.run(conversation()), axis=0).tolist()
    assert steps == [[8 * len(group), 7 * blocks], [len(other), 0], [len(group), blocks]]


@pytest.mark.parametrize("way", ["files", "gloo"])
def test_kept_keys_and_values_serve_their_own_request_alone_and_are_those_of_the_versions_that_computed_them(run: Run, way: str) -> None:
    """Three updates in flight. The reference computes each token's keys and values with the version that read the token.

    Afterwards the same prompts, and the conversations that were in flight, are exact under the last version alone.
    """

    trainer, ids = MemoryTrainer(run), prompts(12, length=70, seed=4)  # two blocks of the cache and some

    async def conversation() -> tuple[list[Turn], list[Turn]]:
        async with Servers(run.ready(), request_timeout=120, manner=Manner(keep_kv=True)) as client:
            await client.fleet.wait_ready(300)

            async def change() -> None:
                for version in (1, 2, 3):
                    await running(client, 8)
                    await asyncio.sleep(0.3)
                    if way == "files":
                        await client.update(run.version(version), version)
                    else:
                        trainer.offer(version)
                        await trainer.update(client)

            flying = await under_load(client, ids, change)
            assert (await client.fleet.stats())["perf/preemptions"] == 0, "nothing was computed again"
            again = [list(turn.prompt_ids) for turn in flying] + [[*turn.prompt_ids, *turn.completion_ids][:220] for turn in flying]
            return flying, await asyncio.gather(*[sample(client, one, seed, max_tokens=5) for seed, one in enumerate(again)])

    for version in (1, 2, 3):
        run.version(version)
    flying, later = asyncio.run(conversation())
    trainer.offers.close()
    mixed = [turn for turn in flying if len(set(turn.versions.tolist())) > 1]
    assert len(mixed) >= 8
    assert run.worst_kept(flying) < EXACT
    assert run.worst(mixed, 1.0) > 0.1, "computed again, they would be others"
    assert {version for turn in later for version in turn.versions.tolist()} == {3}
    assert run.worst(later, 1.0) < EXACT


def test_after_an_update_that_keeps_them_the_prefixes_of_running_requests_are_nobody_elses() -> None:
    """vLLM's own scheduler with two requests that share a prompt: what they cache later is not found by a third one."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from rlx.inference.server.scheduler import forget_prefixes

    init_none_hash(sha256)

    def request(name: str) -> Any:
        return Request(name, list(range(8)), SamplingParams(max_tokens=4), None, block_hasher=get_request_block_hasher(4, sha256))

    pool = BlockPool(num_gpu_blocks=16, enable_caching=True, hash_block_size=4)
    old, new = request("old"), request("new")
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(old, blocks, 0, 1, 4, 0)
    assert pool.get_cached_block(new.block_hashes[0], [0]), "shared before"
    scheduler: Any = SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=pool), running=[old])
    forget_prefixes(scheduler)
    pool.cache_full_blocks(old, blocks, 1, 2, 4, 0)  # it goes on
    assert [pool.get_cached_block(one, [0]) for one in new.block_hashes] == [None, None]
    assert pool.get_cached_block(old.block_hashes[1], [0]), "its own, should it lose its place"
    pool.free_blocks(reversed(blocks))


def test_with_a_connector_the_prefix_cache_is_vllms_to_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from rlx.inference.server.scheduler import KeepingAsyncScheduler, KeepingScheduler, keep_running

    asked: list[tuple[bool, bool]] = []
    monkeypatch.setattr(Scheduler, "reset_prefix_cache", lambda _, running, connector: asked.append((running, connector)) or False)
    scheduler: Any = KeepingScheduler.__new__(KeepingScheduler)
    scheduler.connector = object()
    assert not scheduler.reset_prefix_cache(False, False)
    scheduler.connector = None
    scheduler.reset_prefix_cache(True, True)
    assert asked == [(False, False), (True, True)]
    for overlapping, kind, parent in ((False, KeepingScheduler, Scheduler), (True, KeepingAsyncScheduler, AsyncScheduler)):
        config: Any = SimpleNamespace(scheduler_cls=None, async_scheduling=overlapping)
        keep_running(config)
        assert config.scheduler_cls == f"{kind.__module__}.{kind.__name__}"
        assert issubclass(kind, parent)
