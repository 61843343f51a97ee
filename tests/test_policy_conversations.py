"""Random conversations through the policy: whatever an environment does with its messages, every kept token is trained exactly once."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from policy_stand_in import policy_of, tiny_chat
from public_classic import check_tokens

from rlx.policy.base import Message, Reply
from rlx.rollout.samples import samples_of
from rlx.trace import Turn
from rlx.types import Group, Rollout, Task

TASK = Task(env="e", example_id=0, index=0, row={})


class Babbler:
    """Samples random text, with thoughts. Tokens carry numbers of their own as log-probabilities, so that each can be found again."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.count, self.turns = rng, 0, {}

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any], request_id: str, affinity: int) -> Turn:
        rng, chat = self.rng, tiny_chat()
        text = "".join(rng.choices("ab \n", k=rng.randint(0, 6)))
        thought = f"<think>{rng.choice('xyz') * rng.randint(0, 3)}</think>" if rng.random() < 0.6 else ""
        ids = chat.tokenizer.encode(thought + text) + [chat.stop_token_ids[0]] * (rng.random() < 0.8)
        ids = ids or [chat.stop_token_ids[0]]
        logprobs = -np.arange(self.count, self.count + len(ids), dtype=np.float32)
        self.count += len(ids)
        turn = Turn(
            prompt_ids=np.asarray(prompt_ids, np.int32),
            completion_ids=np.asarray(ids, np.int32),
            logprobs=logprobs,
            versions=np.sort(np.array([rng.randint(0, 3) for _ in ids], np.int32)),
            temperature=sampling["temperature"],
            finish_reason="stop" if ids[-1] == chat.stop_token_ids[0] else "length",
        )
        self.turns[request_id] = turn
        return turn


class Stripping(type(tiny_chat())):  # type: ignore[misc]
    """A template that shows thoughts only in the last answer, as thinking models' templates do."""

    def __init__(self) -> None:
        self.__dict__ |= vars(tiny_chat()) | {"_prompts": {}}

    def _render(self, messages: list[Message], *arguments: Any, **keys: Any) -> list[int]:
        shown = [{**m, "content": re.sub(r"<think>.*?</think>", "", m["content"])} if m["role"] == "assistant" else m for m in messages]
        return super()._render(shown, *arguments, **keys)


def converse(rng: random.Random, chat: Any) -> tuple[tuple[Turn, ...], list[Turn]]:
    """The kept turns of one random rollout, and those that were sampled for them. Several agents speak; some requests are beside."""
    generator = Babbler(rng)
    episode = replace(policy_of(generator, context_length=10_000), chat=chat).episode(TASK, 0, 0)
    agents: list[list[Message]] = [[{"role": "user", "content": f"agent {number}"}] for number in range(rng.randint(1, 3))]
    kept: list[str] = []

    async def ask(messages: list[Message]) -> Reply:
        reply = await episode.respond(messages, None, {"temperature": rng.choice([0.5, 1.0]), "max_tokens": 50})
        if rng.random() < 0.8:
            kept.append(reply.request_id)
            kept.extend([reply.request_id] * (rng.random() < 0.1))  # an environment may list a step twice
        return reply

    for _ in range(rng.randint(1, 7)):
        messages = rng.choice(agents)
        act = rng.random()
        if act < 0.15 and len(messages) > 2:  # rewrite an earlier message
            place = rng.randrange(len(messages))
            messages[place] = {**messages[place], "content": messages[place]["content"] + "!"}
        elif act < 0.3:  # go on from an earlier place, and keep the first conversation
            messages = [*messages[: 1 + 2 * rng.randrange((len(messages) + 1) // 2)]]
            agents.append(messages)
        if act > 0.9:  # two requests at once with the same prompt

            async def both(messages: list[Message] = messages) -> None:
                await asyncio.gather(ask(list(messages)), ask(list(messages)))

            asyncio.run(both())
            continue
        reply = asyncio.run(ask(list(messages)))
        messages += [reply.message, {"role": "user", "content": rng.choice(["more", "", "why?"])}]
    trace = episode.keep(kept)
    return trace, [generator.turns[request_id] for request_id in dict.fromkeys(kept)]


@pytest.mark.parametrize("chat", ["verbatim", "stripping"])
def test_every_kept_token_of_a_random_conversation_is_trained_exactly_once(chat: str) -> None:
    merged = 0
    for seed in range(60):
        trace, sampled = converse(random.Random(seed), tiny_chat() if chat == "verbatim" else Stripping())
        rollout = Rollout(
            task=TASK, member=0, trace=trace, prompt=[], completion=[], reward=0.0, rewards={}, metrics={}, status="ok", stop=""
        )
        check_tokens(rollout, sampled)
        group = Group(id=0, task=TASK, rollouts=(rollout,), advantages=np.ones(1, np.float32))
        merged += len(trace.answers) - len(samples_of(group, strategy="interleaved"))
    assert merged > 20, "some turns extend others"


def test_one_agent_whose_template_keeps_its_words_is_one_sample() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        generator = Babbler(rng)
        episode = policy_of(generator, context_length=10_000).episode(TASK, 0, 0)
        messages: list[Message] = [{"role": "user", "content": "go"}]
        ids = []
        for _ in range(4):
            reply = asyncio.run(episode.respond(messages, None, {"max_tokens": 50, "temperature": 1.0}))
            ids.append(reply.request_id)
            if reply.truncated:
                break
            messages += [reply.message, {"role": "user", "content": "more"}]
        rollout = Rollout(
            task=TASK, member=0, trace=episode.keep(ids), prompt=[], completion=[], reward=0.0, rewards={}, metrics={}, status="ok", stop=""
        )
        group = Group(id=0, task=TASK, rollouts=(rollout,), advantages=np.ones(1, np.float32))
        assert len(samples_of(group, strategy="interleaved")) == 1
