"""The prompts of self-distillation's teacher: the policy's own, with the demonstration in the first user message and nowhere else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from policy_stand_in import SAMPLING, StandIn, policy_of, tiny_chat

from rlx.policy.base import PolicyError
from rlx.policy.demonstrated import Demonstrated
from rlx.types import Task

HOW = Demonstrated("info.solution", "{prompt} as in {demonstration}")
ROW = {"prompt": "", "info": {"solution": "a {prompt} b"}}


def episode_of(how: Demonstrated = HOW, row: dict[str, Any] = ROW) -> tuple[Any, StandIn]:
    generator = StandIn(tiny_chat(), error=0.0)
    policy = replace(policy_of(generator, context_length=400, sampling=SAMPLING), demonstrated=how)
    return policy.episode(Task(env="e", example_id=0, index=0, row=row), 0, 0), generator


def test_the_teacher_reads_the_demonstration_and_the_policy_does_not():
    episode, generator = episode_of()
    prompt = [{"role": "system", "content": "be good"}, {"role": "user", "content": "abc"}]
    asyncio.run(episode.respond(prompt))
    (turn,) = episode.turns
    chat = tiny_chat()
    assert turn.prompt_ids.tolist() == generator.requests[0]["prompt_ids"] == chat.render(prompt)
    assert turn.shown.tolist() == chat.render([prompt[0], {"role": "user", "content": "abc as in a {prompt} b"}])


def test_what_follows_the_first_answer_follows_it_for_the_teacher_token_for_token():
    episode, _ = episode_of()
    first = [{"role": "user", "content": "abc"}]

    async def both() -> None:
        reply = await episode.respond(first)
        await episode.respond([*first, reply.message, {"role": "user", "content": "again"}])

    asyncio.run(both())
    one, two = episode.turns
    assert two.shown.tolist() == [*one.shown.tolist(), *two.prompt_ids.tolist()[len(one.prompt_ids) :]]
    assert two.prompt_ids.tolist()[: len(one.prompt_ids)] == one.prompt_ids.tolist()


def test_messages_are_a_demonstration_by_what_the_assistant_says():
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}]
    assert Demonstrated("answer", "{prompt}|{demonstration}").text("q", {"answer": said}) == "q|yes\nno"
    assert Demonstrated("answer", "{prompt}|{demonstration}").text("q", {"answer": 7}) == "q|7"


@pytest.mark.parametrize(("row", "text"), [
    ({"answer": "x"}, r"no column info\.solution \(teacher\.demonstration\); it has answer"),
    ({"info": {"solution": ""}}, r"in the column info\.solution \(teacher\.demonstration\) is no text: ''"),
    ({"info": {"solution": None}}, "is no text: None"),
])  # fmt: skip
def test_a_row_without_a_demonstration_is_named(row: dict[str, Any], text: str):
    episode, _ = episode_of(row=row)
    with pytest.raises(PolicyError, match=text):
        asyncio.run(episode.respond([{"role": "user", "content": "abc"}]))
    with pytest.raises(PolicyError, match="this conversation has none"):
        HOW.messages([{"role": "system", "content": "x"}], ROW)
