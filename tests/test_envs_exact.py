"""What is trained is exactly the trajectory of a classic environment, at the temperature of each request."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
import pytest
import verifiers as vf
from datasets import Dataset
from policy_stand_in import OUTSIDE, SAMPLING, StandIn, load, policy_of, task_of, tiny_chat
from public_classic import Said, check_as_stock, check_tokens, judge, ours, stock
from traces import turns_of

from rlx.envs.messages import for_template
from rlx.envs.verifiers_v0 import VerifiersEnvironment
from rlx.rollout.samples import samples_of
from rlx.types import Group, Rollout

sys.path.insert(0, OUTSIDE)
from rlx_test_envs import words

pytestmark = pytest.mark.slow


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
    assert [turn.prompt_ids.tolist() for turn in turns_of(rollout)] == [request["prompt_ids"] for request in stand_in.requests]
    assert rollout.completion[0] == {"role": "assistant", "content": " a time"}


class Talks(vf.MultiTurnEnv):
    """Never stops, or breaks when it answers."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> list[dict[str, Any]]:
        if state["answer"] == "breaks":
            raise KeyError("no answer")
        return [{"role": "user", "content": "more"}]


@pytest.mark.parametrize(("answer", "status", "stop"), [("goes on", "ok", "prompt_too_long"), ("breaks", "error", "environment_error")])
def test_an_environment_that_never_stops_ends_with_the_context_and_one_that_breaks_says_where(answer: str, status: str, stop: str) -> None:
    data = Dataset.from_list([{"question": "once upon", "answer": answer}])
    env = VerifiersEnvironment("e", Talks(dataset=data, max_turns=-1, rubric=vf.Rubric(funcs=[one])), SAMPLING, 30.0)
    rollout = play(env, StandIn(tiny_chat(), answer=lambda _: " a time", error=0.0))
    assert (rollout.status, rollout.stop, rollout.is_truncated) == (status, stop, status == "ok")
    assert (len(turns_of(rollout)) > 1) == (status == "ok")
    assert status == "ok" or "KeyError" in (rollout.error or "")


class Parts(vf.MultiTurnEnv):
    """Says its messages in parts."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": state["info"]["later"]}]


def parts_env(*later: dict[str, Any]) -> VerifiersEnvironment:
    parts = [{"type": "text", "text": "once"}, {"type": "text", "text": "upon"}]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": parts}], "answer": "", "info": json.dumps({"later": later})}])
    return VerifiersEnvironment("e", Parts(dataset=data, max_turns=2, rubric=vf.Rubric(funcs=[one])), SAMPLING, 30.0)


def one() -> float:
    return 1.0


def test_the_parts_of_a_text_reach_the_template_as_one_text() -> None:
    stand_in = StandIn(tiny_chat(), answer=lambda _: "a", error=0.0)
    rollout = play(parts_env({"type": "text", "text": "more"}), stand_in)
    assert (rollout.status, rollout.reward) == ("ok", 1.0)
    first = "<|im_start|>user\nonce\nupon<|im_end|>\n<|im_start|>assistant\n"
    prompts = [tiny_chat().tokenizer.decode(request["prompt_ids"]) for request in stand_in.requests]
    assert prompts == [first, first + "a<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"]
    assert [message["content"] for message in [*rollout.prompt, *rollout.completion]] == ["once\nupon", "a", "more", "a"]


def test_a_tool_result_may_have_no_parts_and_an_image_fails_the_rollout_with_a_sentence() -> None:
    assert for_template(vf.ToolMessage(tool_call_id="a", content=[])) == {"role": "tool", "tool_call_id": "a", "content": ""}
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    rollout = play(parts_env({"type": "text", "text": "look"}, image), StandIn(tiny_chat(), answer=lambda _: "a", error=0.0))
    assert rollout.status == "error"
    assert "a message of the conversation has parts of the type image_url, but rlx trains on text alone" in (rollout.error or "")


def test_requests_beside_the_trajectory_are_answered_and_not_trained() -> None:
    env = load("rlx_test_beside")
    stand_in = StandIn(tiny_chat(), error=0.0)
    rollout = play(env, stand_in)
    assert (rollout.status, rollout.reward) == ("ok", 1.0)
    plan, answer, judge = stand_in.requests
    assert [one["sampling"]["temperature"] for one in (plan, answer, judge)] == [0.25, 1.0, 0.0]
    assert plan["sampling"]["max_tokens"] == 5
    (turn,) = turns_of(rollout)
    assert turn.prompt_ids.tolist() == answer["prompt_ids"]
    assert turn.temperature == 1.0
    assert rollout.metrics["requests_beside"] == 2.0


REVERSE = (("reverse", {"text": "word"}),)
OWN: dict[str, tuple[list[Said], int]] = {  # package -> what the model says, row
    "rlx_test_multi": ([Said("no"), Said("nono")], 0),
    "rlx_test_tool": ([Said("I try. ", REVERSE), Said("drow")], 0),
    "rlx_test_mcp": ([Said("", REVERSE), Said("drow")], 0),
    "rlx_test_stateful": ([Said("", (("count", {"step": 2}),)), Said("", (("count", {"step": 1}), ("count", {"step": 2})))], 0),
    "rlx_test_rewrite": ([Said("abc"), Said("def"), Said("ghi")], 0),
    "rlx_test_judge": ([Said("x")], 0),
    "rlx_test_nested single": ([Said("x")], 0),
    "rlx_test_nested multi": ([Said("x"), Said("y"), Said("z")], 2),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name == "rlx_test_mcp" else ()) for name in OWN])
def test_environments_of_every_kind_train_as_verifiers_plays_them(name: str) -> None:
    module, (script, row) = name.partition(" ")[0], OWN[name]
    with judge("yes, it is") as endpoint:
        arguments = {"url": endpoint.url} if name == "rlx_test_judge" else {}
        _, rollouts, generator = ours(module, arguments, script, members=4 if "nested" in name else 1, row=row)
        expected = stock(module, arguments, script, row)
    check_as_stock(rollouts[0], expected)
    own = [turn for turn, member in zip(generator.turns, generator.members, strict=True) if member == 0]
    check_tokens(rollouts[0], own)


def test_a_group_of_environments_scores_the_groups_of_the_member_that_compares_them() -> None:
    env, rollouts, _ = ours("rlx_test_nested", {}, [Said("x")], members=4, row=4)
    assert env.scores_groups
    assert [rollout.reward for rollout in rollouts] == [1.0] * 4
    assert rollouts[0].rewards == {"shortest": 1.0}
    assert [len(env.rows), {tuple(row["info"]["env_id"]) for row in env.rows}] == [
        6,
        {("inner", "one"), ("inner", "many"), ("compared", "short")},
    ]


def test_requests_of_a_judge_that_compares_a_group_are_counted() -> None:
    async def compared(states: list[Any]) -> list[float]:
        for state in states:
            await state["client"].get_response([vf.UserMessage(content="which is best?")], "m", {"temperature": 0.0})
        return [1.0] * len(states)

    env = VerifiersEnvironment("e", vf.SingleTurnEnv(dataset=words(2), rubric=vf.Rubric(funcs=[compared])), SAMPLING, 30.0)
    env.policy = policy_of(StandIn(tiny_chat()))
    rollouts = asyncio.run(env.play(task_of(env), range(2), 0))
    assert [(len(turns_of(rollout)), rollout.metrics["requests_beside"]) for rollout in rollouts] == [(1, 1.0)] * 2


def test_history_that_an_environment_rewrites_begins_a_new_sample() -> None:
    _, (rollout,), _ = ours("rlx_test_rewrite", {}, [Said("abc"), Said("def"), Said("ghi")])
    group = Group(id=0, task=rollout.task, rollouts=(rollout,), advantages=np.ones(1, np.float32))
    assert [int(sample.loss_mask.sum()) for sample in samples_of(group, strategy="interleaved")] == [4, 4, 4]


@pytest.mark.parametrize(
    ("returned", "status", "said"),
    [
        (float("nan"), "error", "the reward is nan: odd returned nan"),
        (float("inf"), "error", "the reward is inf: odd returned inf"),
        (None, "error", "odd raised TypeError"),
        ("good", "error", "odd raised ValueError"),
        ("0.5", "ok", ""),
    ],
)
def test_a_reward_that_is_no_number(returned: Any, status: str, said: str) -> None:
    def odd(completion: Any) -> Any:
        return returned

    env = VerifiersEnvironment("e", vf.SingleTurnEnv(dataset=words(2), rubric=vf.Rubric(funcs=[odd])), SAMPLING, 30.0)
    rollout = play(env, StandIn(tiny_chat()))
    assert rollout.status == status
    assert said in (rollout.error or "")
    assert rollout.reward == (0.5 if returned == "0.5" else 0.0)


def test_a_group_reward_of_the_wrong_length_is_no_reward_and_says_so() -> None:
    def short(completions: list[Any]) -> list[float]:
        return [1.0]

    env = VerifiersEnvironment("e", vf.SingleTurnEnv(dataset=words(2), rubric=vf.Rubric(funcs=[short])), SAMPLING, 30.0)
    env.policy = policy_of(StandIn(tiny_chat()))
    rollouts = asyncio.run(env.play(task_of(env), range(2), 0))
    assert [(rollout.status, rollout.stop, rollout.metrics["reward_error"]) for rollout in rollouts] == [
        ("error", "reward_raised", 1.0)
    ] * 2
    assert "1 rewards for a group of 2 rollouts" in (rollouts[0].error or "")


def test_rows_with_an_old_task_name_play() -> None:
    def right(completion: Any, answer: str) -> float:
        return float(completion[-1]["content"] == answer)

    data = words(2).add_column("task", ["reverse-text"] * 2)
    env = VerifiersEnvironment("e", vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[right])), SAMPLING, 30.0)
    env.rehearse()  # nor is it refused before a run
    assert play(env, StandIn(tiny_chat(), error=0.0)).reward == 1.0
