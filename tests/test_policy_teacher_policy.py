"""A teacher that plays: its text becomes tokens as the policy writes them, and only cross-entropy trains on them."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_templates import CLOSING, HERMES, LLAMA, OPENING, PLAIN, RETAINING, small_tokenizer
from policy_stand_in import tiny_chat
from traces import plain, trace_of, turns_of

from rlx.config.load import compose
from rlx.envs.load import give_policy
from rlx.policy.base import Call, Message, PolicyError, PromptTooLong, Reply
from rlx.policy.chat import Chat
from rlx.policy.teacher_policy import TeacherEpisode, TeacherPolicy
from rlx.rollout.samples import samples_of
from rlx.trace import Turn
from rlx.types import Group, Rollout, Task

TASK = Task(env="e", example_id=0, index=0, row={})
USER: Message = {"role": "user", "content": "abc"}


class Says:
    """An endpoint's episode with given answers."""

    def __init__(self, *replies: Reply) -> None:
        self.left = list(replies)

    async def respond(self, messages: Any, tools: Any = None, sampling: Any = None, *, trained: bool = True) -> Reply:
        return self.left.pop(0)


def episode_of(chat: Chat, *replies: Reply, context: int = 200, learn: frozenset[str] = frozenset()) -> TeacherEpisode:
    policy: Any = TeacherPolicy([SimpleNamespace()], chat, lambda: 7, context, learn=learn)  # type: ignore[arg-type]
    inner: Any = Says(*replies)
    return TeacherEpisode(policy, inner)


def rollout_of(*turns: Turn) -> Rollout:
    return Rollout(
        task=TASK, member=0, trace=trace_of(*turns), prompt="", completion="", reward=1.0, rewards={}, metrics={}, status="ok", stop="stop"
    )


@pytest.mark.parametrize("chat", [tiny_chat(), Chat(small_tokenizer(PLAIN)), Chat(small_tokenizer(HERMES))])
def test_the_answer_is_what_the_policy_would_have_to_write(chat: Chat):
    episode = episode_of(chat, Reply("cba", request_id="r1"), Reply("long", truncated=True, request_id="r2"))

    async def whole() -> None:
        first = await episode.respond([USER])
        await episode.respond([USER, first.message, USER])

    asyncio.run(whole())
    one, two = turns_of(episode.trace)
    assert one.prompt_ids.tolist() == chat.render([USER])
    assert chat.tokenizer.decode(one.completion_ids, skip_special_tokens=True) == "cba"
    assert int(one.completion_ids[-1]) in chat.stop_token_ids, "the policy must learn to end"
    assert chat.tokenizer.decode(two.completion_ids, skip_special_tokens=False) == "long", "a cut answer has no end to learn"
    assert set(one.versions.tolist()) == {7}
    assert plain(turns_of(episode.keep(["r2"]))) == plain([two])


@pytest.mark.parametrize("strategy", ["interleaved", "branching"])
def test_what_the_environment_answers_a_teacher_is_learned_too_if_the_environment_says_so(strategy: str) -> None:
    chat, asked = Chat(small_tokenizer(PLAIN)), {"role": "user", "content": "dog"}
    replies = Reply("cba", request_id="r1"), Reply("god", request_id="r2"), Reply("dgo", request_id="r3")
    episode = episode_of(chat, *replies, learn=frozenset({"user"}))

    async def whole() -> None:
        first = await episode.respond([USER])
        for _ in range(2):  # the same question twice
            await episode.respond([USER, first.message, asked])

    asyncio.run(whole())
    group = Group(id=0, task=TASK, rollouts=(rollout_of(*turns_of(episode.trace)),), advantages=np.ones(1, np.float32))
    samples = samples_of(group, strategy=strategy, taught=True, learn={"user": 0.25})
    learned: dict[float, str] = {}
    for sample in samples:
        assert sample.ce_weights is not None
        for weight in set(sample.ce_weights.tolist()) - {0.0}:
            ids = sample.token_ids[sample.ce_weights == weight]
            learned[weight] = learned.get(weight, "") + chat.tokenizer.decode(ids, skip_special_tokens=True)
    assert {weight: text.split() for weight, text in learned.items()} == {1.0: ["cbagoddgo"], 0.25: ["dog"]}, (
        "the first prompt is not learned"
    )


def test_all_addresses_of_a_teacher_answer_and_the_next_attempt_asks_another_one():
    keys = ["envs.reverse_text.played_by=teacher", "envs.reverse_text.learn.user=1", "loss=sft", "loss.ce_coef=1", "teacher.model=m"]
    cfg = compose(["hardware=cpu", *keys, "teacher.base_url=[http://a:1,http://b:1/v1]", "teacher.timeout=300"], {}).cfg
    env: Any = SimpleNamespace(rows=[], policy=None)
    give_policy({"reverse_text": env}, cfg, tiny_chat(), SimpleNamespace(version=3))  # type: ignore[arg-type]
    policy = env.policy
    assert policy.learn == {"user"}
    assert [(one.timeout, one.max_retries) for one in policy.endpoints] == [(300, 1)] * 2

    def at(env: str, index: int, member: int, attempt: int) -> str:
        episode = policy.episode(Task(env=env, example_id=0, index=index, row={}), member, attempt)
        return str(episode.inner.policy.base_url)

    for env, first in (("a", 0), ("b", 1)):  # the environments of a mix have every second index
        share = sum(at(env, index, 0, 0) == "http://a:1/v1" for index in range(first, 400, 2)) / 200
        assert 0.4 < share < 0.6, "each environment is spread"
    for index in range(20):
        assert len({at("a", index, member, 0) for member in range(4)}) == 1, "a group stays together"
        assert {at("a", index, 0, attempt) for attempt in (0, 1)} == {"http://a:1/v1", "http://b:1/v1"}


def learned(template: str, reply: Reply, eos: str = "<|im_end|>") -> str:
    """What the policy learns of one answer, as text."""
    chat = Chat(small_tokenizer(template, eos))
    episode = episode_of(chat, reply)
    asyncio.run(episode.respond([USER]))
    return chat.text(turns_of(episode.trace)[0].completion_ids.tolist())


def test_a_template_that_closes_the_conversation_gives_one_end_mark_and_a_cut_answer_none():
    assert learned(CLOSING, Reply("yes"), eos="<|eot_id|>") == "yes<|im_end|>"
    assert learned(CLOSING, Reply("yes", truncated=True), eos="<|eot_id|>") == "yes"


def test_an_answer_that_is_cut_in_its_reasoning_does_not_teach_the_end_of_the_reasoning():
    thinking = Reply("", reasoning="two and", truncated=True)
    assert learned(RETAINING, thinking) == "<think>\ntwo and"
    assert learned(RETAINING, replace(thinking, content="fi")) == "<think>\ntwo and\n</think>\n\nfi"


@pytest.mark.parametrize(
    ("template", "reply", "said"),
    [
        (HERMES, Reply("yes<|im_end|>no"), "contains '<|im_end|>', which ends a turn"),
        (HERMES, Reply("five", reasoning="two and three"), "does not show the `reasoning_content`"),
        (LLAMA, Reply("I add", calls=(Call("c", "add", "{}"),)), "does not show the `content` of an answer beside a tool call"),
        (HERMES, Reply("", calls=(Call("c", "add", "{}"),), truncated=True), "a length limit cut an answer with a tool call"),
        (HERMES, Reply(""), "says nothing"),
    ],
)
def test_an_answer_that_the_policys_template_shows_otherwise_is_refused(template: str, reply: Reply, said: str):
    with pytest.raises(PolicyError, match=re.escape(said)):
        learned(template, reply, eos="<|eot_id|>" if template == LLAMA else "<|im_end|>")


def test_a_request_beside_the_trajectory_is_not_learned():
    episode = episode_of(tiny_chat(), Reply("a verdict"))
    asyncio.run(episode.respond([USER], trained=False))
    assert turns_of(episode.trace) == ()


def test_what_cannot_be_tokenized_as_the_policys_is_refused():
    with pytest.raises(PromptTooLong):
        asyncio.run(episode_of(tiny_chat(), Reply("x" * 60), context=30).respond([USER]))
    with pytest.raises(PolicyError, match="raw text"):
        asyncio.run(episode_of(tiny_chat(), Reply("x")).respond([{"role": "text", "content": "abc"}]))
    with pytest.raises(PolicyError, match="does not show an answer as the continuation of its prompt"):
        asyncio.run(episode_of(Chat(small_tokenizer(OPENING)), Reply("x")).respond([USER]))


def test_a_teachers_tokens_are_for_cross_entropy_alone():
    turn = Turn(
        prompt_ids=np.array([1, 2], np.int32),
        completion_ids=np.array([3, 4], np.int32),
        logprobs=np.zeros(2, np.float32),
        versions=np.full(2, 7, np.int32),
        temperature=1.0,
        finish_reason="stop",
    )
    group = Group(id=0, task=TASK, rollouts=(rollout_of(turn),), advantages=np.ones(1, np.float32))
    (sample,) = samples_of(group, strategy="interleaved", taught=True)
    assert not sample.loss_mask.any()
    assert not sample.advantages.any()
    assert sample.versions.tolist() == [-1] * 4
    assert sample.ce_weights is not None
    assert sample.ce_weights.tolist() == [0, 0, 1, 1]
