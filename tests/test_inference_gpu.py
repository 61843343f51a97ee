"""Updates in flight of vLLM's engine on a GPU, by every way that one GPU allows: a token's log-probability is its version's.

What differs from the engine on a CPU: a process of its own, vLLM's second model runner, asynchronous scheduling, CUDA graphs, and
vLLM's own reload of weights. The reference is Hugging Face's forward pass on the CPU. Nothing here needs the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("vllm")
from inference_server import EXACT, MemoryTrainer, Run, from_memory, prompts, running, sample, under_load
from run_servers import Servers

from rlx.inference.telling import Manner
from rlx.types import Turn

pytestmark = [pytest.mark.slow, pytest.mark.gpu]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a CPU can play all but `ipc`, to try this file
SHARE = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30} if DEVICE == "cuda" else {}
LANES = 16
UPDATES = 3


WAYS = [("gloo", 0), *([("ipc", 0), ("ipc", 4)] if DEVICE == "cuda" else [])]
"""`weight_broadcast.type`, and the experts of a layer; 0: a dense model. A handle of GPU memory needs a GPU."""


@pytest.fixture(scope="module", params=WAYS, ids=[f"{kind}-{'experts' if experts else 'dense'}" for kind, experts in WAYS])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, str]]:
    kind, experts = request.param
    run = Run(tmp_path_factory.mktemp("run"), tied=not experts, experts=experts, device=DEVICE, vllm=dict(SHARE))
    from_memory(run, kind)
    run.start()
    try:
        run.ready()
        yield run, kind
    finally:
        run.stop()


@pytest.mark.parametrize("keep_kv", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("memory", [False, True], ids=["files", "memory"])
def test_updates_in_flight_are_exact_on_this_device(run: tuple[Run, str], memory: bool, keep_kv: bool) -> None:
    """Tokens of requests in flight, and of those after the last update, have the log-probabilities of the versions that they claim."""
    server, kind = run
    trainer = MemoryTrainer(server, kind=kind, device=DEVICE) if memory else None
    ids, newest = prompts(LANES, length=70, seed=4), max(server.models)  # of the tests before
    versions = range(newest + 1, newest + UPDATES + 1)

    async def conversation() -> tuple[list[Turn], list[Turn], float]:
        async with Servers(server.ready(), request_timeout=120, manner=Manner(keep_kv=keep_kv)) as client:
            await client.fleet.wait_ready(300)

            async def change() -> None:
                for version in versions:
                    await running(client, LANES // 2)
                    await asyncio.sleep(0.1)
                    if trainer is None:
                        await client.update(server.version(version), version)
                    else:
                        trainer.offer(version)
                        await trainer.update(client)
                await running(client, LANES // 2)

            flying = await under_load(client, ids, change)
            later = await asyncio.gather(*[sample(client, one, seed) for seed, one in enumerate(ids)])
            return flying, later, (await client.fleet.states())[0].attested

    try:
        flying, later, attested = asyncio.run(conversation())
    finally:
        if trainer is not None:
            trainer.offers.close()
    mixed = [turn for turn in flying if len(set(turn.versions.tolist())) > 1]
    worst, after = server.worst_kept(flying) if keep_kv else server.worst(flying, 1.0), server.worst(later, 1.0)
    print(f"{kind}, {'memory' if memory else 'files'}, {'kept' if keep_kv else 'dropped'}: ", end="")
    print(f"{sum(len(turn.versions) for turn in flying)} tokens, {len(mixed)} of {len(flying)} requests had updates in flight, ", end="")
    print(f"worst {worst:.1e} nats, afterwards {after:.1e}, compared {attested:.0%}")
    assert len(mixed) >= LANES // 2
    assert {version for turn in flying for version in turn.versions.tolist()} == {0, *versions}
    assert {version for turn in later for version in turn.versions.tolist()} == {versions[-1]}
    assert worst < EXACT
    assert after < EXACT
    assert attested == 1.0
    if keep_kv:
        assert server.worst(mixed, 1.0) > 0.1, "computed again, they would be others"
