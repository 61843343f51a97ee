"""What is trained is exactly the trajectory of a classic environment, at the temperature of each request."""

from __future__ import annotations

import asyncio
from typing import Any

import verifiers as vf
from datasets import Dataset
from policy_stand_in import SAMPLING, StandIn, load, policy_of, task_of, tiny_chat

from rlx.envs.verifiers_v0 import VerifiersEnvironment
from rlx.types import Rollout


def play(env: Any, generator: Any, **keys: Any) -> Rollout:
    env.policy = policy_of(generator, **keys)
    (rollout,) = asyncio.run(env.play(task_of(env), [0], 0))
    return rollout


class Raw(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> str:
        return "more"


def test_prompts_of_the_completion_type_are_raw_text() -> None:
    data = Dataset.from_list([{"prompt": "once upon", "answer": ""}])

    def length(completion: Any) -> float:
        return float(len(completion))

    inner = Raw(dataset=data, max_turns=2, rubric=vf.Rubric(funcs=[length]), message_type="completion")
    env = VerifiersEnvironment("e", inner, SAMPLING, 30.0)
    stand_in = StandIn(tiny_chat(), answer=lambda _: " a time", error=0.0)
    rollout = play(env, stand_in)
    assert (rollout.status, rollout.reward) == ("ok", 3.0)
    prompts = [tiny_chat().tokenizer.decode(request["prompt_ids"]) for request in stand_in.requests]
    assert prompts == ["once upon", "once upon\n\n a time\n\nmore"], "joined as verifiers' client of completion endpoints does it"
    assert [turn.prompt_ids.tolist() for turn in rollout.turns] == [request["prompt_ids"] for request in stand_in.requests]
    assert rollout.completion[0] == {"role": "assistant", "content": " a time"}


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
