"""A stand-in for a generator behind HTTP, as inference servers are: environments in processes of their own reach it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from aiohttp import web
from policy_stand_in import CONTEXT, tiny_chat

from rlx.envs.pool import WorkerPool
from rlx.inference import wire
from rlx.inference.endpoints import Endpoint
from rlx.inference.sampler import Sampler
from rlx.policy.spec import PolicySpec, spec_of

RUN = "0a1b2c3d"


@asynccontextmanager
async def served(generator: Any) -> AsyncIterator[Sampler]:
    """A sampler on a server that answers with `generator`, whose versions are those of the run."""

    async def generate(request: web.Request) -> web.Response:
        asked = await request.json()
        turn = await generator.generate(np.asarray(asked["token_ids"], np.int32), asked["sampling_params"], asked["request_id"], 0)
        versions = turn.versions.tolist()
        starts = [at for at, version in enumerate(versions) if not at or version != versions[at - 1]]
        choice = {
            "token_ids": turn.completion_ids.tolist(),
            "logprobs": {"content": [{"logprob": float(each)} for each in turn.logprobs]},
            "finish_reason": turn.finish_reason,
            "weight_versions": [
                {"version": wire.label_of(versions[start], RUN), "start": start, "end": end}
                for start, end in zip(starts, [*starts[1:], len(versions)], strict=True)
            ],
        }
        return web.Response(body=json.dumps({"choices": [choice]}), content_type="application/json")

    application = web.Application(client_max_size=1 << 26)
    application.router.add_post(wire.GENERATE, generate)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        async with Sampler([Endpoint(f"http://{host}:{port}", "key")], 60, run=RUN) as sampler:
            yield sampler
    finally:
        await runner.cleanup()


def give(pool: WorkerPool, sampler: Sampler, **keys: Any) -> None:
    """Let a pool play with the tiny policy on the servers of `sampler`."""
    pool.give(PolicySpec(seed=0, **{"sampling": {}, "context_length": CONTEXT, **keys}, chat=spec_of(tiny_chat())), sampler)
