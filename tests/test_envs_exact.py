"""What is trained is exactly the trajectory of a classic environment, at the temperature of each request."""

from __future__ import annotations

import asyncio
from typing import Any

from policy_stand_in import StandIn, load, policy_of, task_of, tiny_chat

from rlx.types import Rollout


def play(env: Any, generator: Any, **keys: Any) -> Rollout:
    env.policy = policy_of(generator, **keys)
    (rollout,) = asyncio.run(env.play(task_of(env), [0], 0))
    return rollout


def test_requests_beside_the_trajectory_are_answered_and_not_trained() -> None:
    env = load("rlx_test_beside")
    stand_in = StandIn(tiny_chat(), error=0.0)
    rollout = play(env, stand_in)
    assert (rollout.status, rollout.reward) == ("ok", 1.0)
    plan, answer, judge = stand_in.requests
    assert [one["sampling"]["temperature"] for one in (plan, answer, judge)] == [0.25, 1.0, 0.0]
    assert plan["sampling"]["max_tokens"] == 5
    (turn,) = rollout.turns
    assert turn.prompt_ids.tolist() == answer["prompt_ids"]
    assert turn.temperature == 1.0
    assert rollout.metrics["requests_beside"] == 2.0
