"""A v1 environment on a real server: what is kept has the log-probabilities of the model, at the temperature of each agent."""

from __future__ import annotations

import asyncio
import sys

import pytest
from inference_server import CONTEXT, EXACT, Run
from policy_stand_in import OUTSIDE, SAMPLING, policy_of, task_of
from run_servers import Servers
from traces import turns_of

from rlx.config.schema import EnvConfig
from rlx.types import Rollout

pytestmark = pytest.mark.slow


def test_two_agents_are_trained_at_their_own_temperatures(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [OUTSIDE, *sys.path])
    from rlx.envs.verifiers_v1 import load_environment

    env = load_environment("e", EnvConfig(id="rlx_test_v1", num_tasks=8), dict(SAMPLING), 120.0)
    run = Run(tmp_path, tied=True)
    run.start()

    async def play() -> list[Rollout]:
        async with Servers(run.ready(), request_timeout=120) as client:
            await client.fleet.wait_ready(300)
            env.policy = policy_of(client, context_length=CONTEXT, sampling={**SAMPLING, "max_tokens": 12})
            try:
                groups = await asyncio.gather(*(env.play(task_of(env, index), [0, 1, 2], 0) for index in range(4)))
            finally:
                await env.close()
            return [rollout for group in groups for rollout in group]

    try:
        rollouts = asyncio.run(play())
    finally:
        run.stop()
    assert {rollout.status for rollout in rollouts} == {"ok"}
    by_agent = {agent: [one for one in rollouts if env.trained_agent(one.task) == agent] for agent in env.agents}
    assert all(by_agent.values())
    for agent, temperature in {"left": 1.0, "right": 0.5}.items():
        turns = [turn for rollout in by_agent[agent] for turn in turns_of(rollout)]
        assert {turn.temperature for turn in turns} == {temperature}
        assert run.worst(turns, temperature) < EXACT
