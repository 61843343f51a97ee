"""What the environment answered is marked, token for token, and nothing else: headers, end marks and the first prompt are not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from chat_templates import HERMES, LLAMA, PLAIN, STRIPPING, small_tokenizer
from policy_stand_in import StandIn, policy_of, tiny_chat
from traces import trace_of, turns_of

from rlx.policy import observation_mask as observation_mask_module
from rlx.policy.base import Message
from rlx.policy.chat import Chat
from rlx.policy.observation_mask import ROLES, text_ends
from rlx.policy.tokens import TokenEpisode
from rlx.rollout.samples import samples_of
from rlx.trace import Turn
from rlx.types import Group, Rollout, Task, TrainingSample

SAMPLING = {"max_tokens": 40, "temperature": 1.0}
TASK = Task(env="e", example_id=0, index=0, row={})
SAID = [  # what the environment says, some of it like the template's own words
    ("user", "now add two"),
    ("tool", "user\nthe result is 5"),
    ("user", "assistant"),
    ("tool", " spaced out \n"),
    ("user", "naïve 五 🙂 ok"),
    ("user", "<tool_call>add</tool_call>"),
]


def play(chat: Chat, said: list[tuple[str, str]], roles: frozenset[str] = frozenset(ROLES), system: bool = True) -> tuple[Turn, ...]:
    """An episode in which the environment answers with `said`, one message a turn."""
    policy = policy_of(StandIn(chat, error=0.0), chat, sampling=SAMPLING, context_length=2000, learn=sorted(roles))
    episode = policy.episode(TASK, 0, 0)

    async def whole() -> None:
        messages: list[Message] = [{"role": "system", "content": "be good"}] if system else []
        messages += [{"role": "user", "content": "abc"}]
        messages += [(await episode.respond(messages)).message]
        for role, content in said:
            messages += [{"role": role, "content": content}]
            messages += [(await episode.respond(messages)).message]

    asyncio.run(whole())
    return turns_of(episode.trace)


def marked(chat: Chat, turn: Turn) -> str:
    """The text of a prompt's marked tokens."""
    assert turn.observation_mask is not None
    runs = np.flatnonzero(turn.observation_mask)
    assert (np.diff(runs) == 1).all(), "one message is one stretch"
    return chat.tokenizer.decode(turn.prompt_ids[runs], skip_special_tokens=False)


@pytest.mark.parametrize("template", [PLAIN, HERMES, STRIPPING, LLAMA], ids=["plain", "hermes", "stripping", "llama"])
def test_the_messages_text_is_marked_and_nothing_of_the_template(template: str):
    chat = Chat(small_tokenizer(template))
    first, *later = play(chat, SAID)
    assert first.observation_mask is None, "the first prompt is the task, not an answer"
    for (role, content), turn in zip(SAID, later, strict=True):
        if turn.observation_mask is None:  # shown in another form by this template
            assert role == "tool" or content != content.strip(), (role, content)
            continue
        assert set(turn.observation_mask.tolist()) == {0, ROLES.index(role) + 1}
        text = marked(chat, turn)
        assert text
        assert text in content, "a token that is partly template is left out"
        assert len(content.strip()) - len(text.strip()) <= 3
    assert sum(turn.observation_mask is not None for turn in later) >= 4


def test_a_message_that_the_template_changes_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture):
    observation_mask_module._say_hidden.cache_clear()
    chat = Chat(small_tokenizer(PLAIN.replace("{{ message.content }}", "{{ message.content | upper }}")))
    assert all(turn.observation_mask is None for turn in play(chat, [("user", "quiet"), ("user", "words")]))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["envs.e.observation_ce_weights"]


def test_token_ends_add_up_for_characters_of_several_tokens():
    tokenizer = small_tokenizer(PLAIN)
    text = "the naïve tool 五五🙂 is five"
    ids = tokenizer.encode(text, add_special_tokens=False)
    ends = text_ends(tokenizer, ids)
    assert ends[-1] == len(text)
    assert (np.diff(ends) >= 0).all()
    for place, end in enumerate(ends):
        whole = tokenizer.decode(ids[: place + 1])
        assert whole.rstrip("\ufffd") == text[:end] or whole.endswith("\ufffd")


def samples(turns: tuple[Turn, ...], strategy: str, learn: dict[str, float]) -> list[TrainingSample]:
    rollout: Any = Rollout(
        task=TASK, member=0, trace=trace_of(*turns), prompt="", completion="", reward=1.0, rewards={}, metrics={}, status="ok", stop="stop"
    )
    group = Group(id=0, task=TASK, rollouts=(rollout,), advantages=np.ones(1, np.float32))
    return samples_of(group, strategy=strategy, learn=learn)


@pytest.mark.parametrize("strategy", ["interleaved", "branching"])
def test_each_answer_is_learned_once_with_its_roles_weight(strategy: str):
    chat = tiny_chat()
    turns = play(chat, [("user", "one"), ("system", "seven")])
    found = samples(turns, strategy, {"user": 0.5, "system": 2.0})
    assert len(found) == (1 if strategy == "interleaved" else 3)
    by_weight: dict[float, str] = {}
    for sample in found:
        if sample.ce_weights is None:
            continue
        assert not (sample.loss_mask & (sample.ce_weights > 0)).any(), "the policy's own tokens are not the environment's"
        for weight in (0.5, 2.0):
            by_weight[weight] = by_weight.get(weight, "") + chat.tokenizer.decode(sample.token_ids[sample.ce_weights == weight])
    assert by_weight == {0.5: "one", 2.0: "seven"}
    assert all(sample.ce_weights is None for sample in samples(turns, strategy, {}))
    assert all(sample.ce_weights is None for sample in samples(turns, strategy, {"tool": 1.0}))


def asked_twice(generator: StandIn, chat: Chat) -> tuple[TokenEpisode, list[list[str]]]:
    """An episode whose second and third prompts are each asked twice, at the same time; and the ids of the requests of each prompt."""
    policy = policy_of(generator, chat, sampling=SAMPLING, context_length=2000, learn=["user"])
    episode, ids = policy.episode(TASK, 0, 0), []

    async def whole() -> None:
        messages: list[Message] = [{"role": "user", "content": "abc"}]
        for content in ("one", "seven", None):
            times = 1 if not ids else 2
            replies = await asyncio.gather(*(episode.respond(messages) for _ in range(times)), return_exceptions=True)
            answers = [reply for reply in replies if not isinstance(reply, BaseException)]
            ids.append([reply.request_id for reply in answers])
            messages = [*messages, answers[-1].message, {"role": "user", "content": content}]

    asyncio.run(whole())
    return episode, ids


@pytest.mark.parametrize("which", [0, -1])
def test_a_message_that_is_asked_for_twice_is_learned_whichever_answer_is_kept(which: int):
    chat = tiny_chat()
    episode, ids = asked_twice(StandIn(chat, error=0.0), chat)
    turns = turns_of(episode.keep([each[which] for each in ids]))
    assert [turn.observation_mask is not None and marked(chat, turn) for turn in turns] == [False, "one", "seven"]
    again = turns_of(episode.keep([each[which] for each in ids]))
    assert [marked(chat, turn) for turn in again[1:]] == ["one", "seven"], "asking again changes nothing"
    rest = turns_of(episode.keep([each[-1 - which] for each in ids[1:]]))
    assert all(turn.observation_mask is None or not turn.observation_mask.any() for turn in rest), (
        "another rollout of the episode does not learn it again"
    )
    episode, ids = asked_twice(StandIn(chat, error=0.0), chat)
    (last,) = turns_of(episode.keep([ids[2][which]]))
    assert last.observation_mask is not None
    learned = chat.tokenizer.decode(last.prompt_ids[last.observation_mask > 0], skip_special_tokens=False)
    assert learned == "oneseven", "the requests before it are not kept, so it has all that the environment said"


class Stopped(StandIn):
    """Its answers end at a stop string, without an end mark."""

    async def generate(self, *given: Any, **keys: Any) -> Turn:
        turn = await super().generate(*given, **keys)
        return replace(turn, completion_ids=turn.completion_ids[:-1], logprobs=turn.logprobs[:-1], versions=turn.versions[:-1])


async def test_answers_that_a_stop_string_ended_hide_nothing_and_two_requests_of_one_prompt_learn_it_once():
    chat = tiny_chat()
    policy = policy_of(Stopped(chat, error=0.0), chat, sampling={**SAMPLING, "stop": ["a"]}, context_length=2000, learn=["user"])
    episode = policy.episode(TASK, 0, 0)

    messages: list[Message] = [{"role": "user", "content": "abc"}]
    for content in ("one", "seven"):
        reply = await episode.respond(messages)
        assert reply.message["content"] == ("cb" if content == "one" else "eno"), "cut before the stop string, where it came"
        messages = [*messages, reply.message, {"role": "user", "content": content}]
    await asyncio.gather(*(episode.respond(messages) for _ in range(3)))
    assert [marked(chat, turn) for turn in turns_of(episode.trace) if turn.observation_mask is not None] == ["one", "seven"]
