"""Gives environments a model that answers: on servers of the run or others, at the version that the configuration asks for, or at an
endpoint. For commands that train nothing (`rlx.config.schema_eval.PlayWithModel`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from rlx.config.schema_eval import PlayWithModel
from rlx.envs.base import Local, sampling_of
from rlx.envs.load import give_policy
from rlx.inference.endpoints import find_servers, present_servers
from rlx.inference.fleet import Fleet
from rlx.inference.sampler import Sampler
from rlx.paths import RunPaths
from rlx.policy.chat import Chat
from rlx.policy.endpoint import check
from rlx.policy.openai import OpenAIPolicy
from rlx.types import WeightVersion


@asynccontextmanager
async def answering(
    config: PlayWithModel, paths: RunPaths, envs: Mapping[str, Local], chat: Chat | None, beat: Callable[[str], None]
) -> AsyncIterator[Callable[[], float]]:
    """While it lasts, the environments have policies that answer. `chat`: the model's chat format; None at an endpoint.

    Yields a function: seconds so far in which no server took requests (`rlx.rollout.groups.play_through`).

    Raises PolicyError if the endpoint does not answer as it must (a wrong key, an unknown model, no tools), and the errors of the fleet.
    """
    if config.client.base_url:
        async with _endpoint(config, envs, beat):
            yield lambda: 0.0
        return
    assert chat is not None

    def tick() -> None:
        beat("waiting for inference servers")

    endpoints = await asyncio.to_thread(find_servers, config, paths, tick)
    patience = config.inference.startup_timeout
    fleet = Fleet(endpoints, patience, find=lambda: present_servers(config, paths))
    async with fleet, Sampler(endpoints, config.inference.request_timeout, patience, restore=fleet.restore) as sampler:
        fleet.on_change = sampler.use
        give_policy(envs, config, chat, sampler)
        await fleet.wait_ready(config.inference.startup_timeout, tick=tick)
        if (weights := wanted_weights(config)) is not None:
            beat(f"loading step_{weights.version}")
            await fleet.update(weights, config.weight_broadcast.timeout)
            sampler.version = weights.version
        yield lambda: sampler.away


def wanted_weights(config: PlayWithModel) -> WeightVersion | None:
    """The weights to play with; None: the initial model."""
    step = getattr(config, "step", None)
    if config.weights_dir is None or not step:
        return None
    return WeightVersion(version=step, kind="files", where=f"{config.weights_dir}/step_{step}")


@asynccontextmanager
async def _endpoint(config: PlayWithModel, envs: Mapping[str, Local], beat: Callable[[str], None]) -> AsyncIterator[None]:
    client = config.client
    assert client.base_url is not None
    policies = {}
    for name, env in envs.items():
        env.policy = policies[name] = OpenAIPolicy(
            client.base_url,
            (os.environ.get(client.api_key_var) if client.api_key_var else None) or "none",
            config.model.name,
            seed=config.seed,
            sampling=sampling_of(config, config.envs[name]),
            timeout=client.timeout,
            max_retries=client.max_retries,
        )
    try:
        beat(f"asking {client.base_url}")
        await check(next(iter(policies.values())), tools=any(env.tools for env in envs.values()))
        yield
    finally:
        await asyncio.gather(*(policy.close() for policy in policies.values()))
