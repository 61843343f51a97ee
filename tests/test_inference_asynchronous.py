"""vLLM's asynchronous scheduling, the default on CUDA: the next step is scheduled before the tokens of the last one are known.

vLLM turns it off on a CPU. Here it is turned on after vLLM's check, in an engine with a process of its own.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from inference_server import EXACT, Run, prompts, running, sample, under_load
from run_servers import Servers

from rlx.inference.protocol import PolicyState
from rlx.inference.telling import Manner
from rlx.types import Turn

pytestmark = [pytest.mark.slow, pytest.mark.long]

ASYNCHRONOUS = """
from rlx.inference.server import start
make = start.AsyncEngineArgs.create_engine_config
def asynchronous(*arguments, **keys):
    config = make(*arguments, **keys)
    config.scheduler_config.async_scheduling = True
    return config
start.AsyncEngineArgs.create_engine_config = asynchronous

from vllm.v1.engine.core import EngineCore
step = EngineCore.step_with_batch_queue
def noted(core):
    found = step(core)
    if not core.__dict__.get("rlx_noted") and len(core.batch_queue):
        core.rlx_noted = print("a step was scheduled before the last one had ended:", type(core.scheduler).__name__, flush=True) or True
    return found
EngineCore.step_with_batch_queue = noted

from rlx.roles import inference
inference.runs_in_process = lambda config: False
inference.end_at_once(inference.main)
"""


@pytest.mark.parametrize("keep_kv", [False, True], ids=["dropped", "kept"])
def test_updates_in_flight_are_exact_when_the_next_step_is_scheduled_before_the_last_one_has_ended(tmp_path: Path, keep_kv: bool) -> None:
    run = Run(tmp_path, tied=True)
    run.start(ASYNCHRONOUS)
    folders = {version: run.version(version) for version in (1, 2, 3)}
    ids = prompts(16, seed=2)

    async def conversation() -> tuple[list[Turn], list[Turn], PolicyState]:
        async with Servers(run.ready(), request_timeout=120, manner=Manner(keep_kv=keep_kv)) as client:
            await client.fleet.wait_ready(300)

            async def change() -> None:
                for version, folder in folders.items():
                    await running(client, 8)
                    await asyncio.sleep(0.3)
                    await client.update(folder, version)

            flying = await under_load(client, ids, change)
            # The same prompts and seeds again, so that cached keys and values of other versions would be noticed.
            later = await asyncio.gather(*[sample(client, one, seed) for seed, one in enumerate(ids)])
            return flying, later, (await client.fleet.states())[0]

    flying, later, state = asyncio.run(conversation())
    run.stop()
    assert "a step was scheduled before the last one had ended: KeepingAsyncScheduler" in run.log.read_text()
    assert (state.version, state.attested) == (3, 1.0)
    assert {version for turn in flying for version in turn.versions.tolist()} == {0, 1, 2, 3}
    assert sum(len(set(turn.versions.tolist())) > 1 for turn in flying) >= 8
    assert all(set(turn.versions.tolist()) == {3} for turn in later)
    assert (run.worst_kept(flying) if keep_kv else run.worst(flying, 1.0)) < EXACT
    assert run.worst(later, 1.0) < EXACT
