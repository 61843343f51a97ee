"""`TokenPolicy`: the parameters of a request, its record, and how later turns keep a conversation's tokens."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from policy_stand_in import StandIn, load, policy_of, task_of, tiny_chat
from traces import plain, same, turns_of

from rlx.policy import tokens
from rlx.policy.base import PolicyError, PromptTooLong, Reply, request_seed
from rlx.policy.tokens import TokenEpisode
from rlx.trace import Turn
from rlx.types import Task

TASK = Task(env="e", example_id=4, index=2, row={})
RUN = {"max_tokens": 20, "temperature": 1.0, "top_k": -1, "min_tokens": 6}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def episode_of(generator: Any, **keys: Any) -> TokenEpisode:
    return policy_of(generator, sampling=RUN, **keys).episode(TASK, 1, 3)


def ask(episode: TokenEpisode, messages: Sequence[Mapping[str, Any]], sampling: Mapping[str, Any] | None = None, **keys: Any) -> Reply:
    return asyncio.run(episode.respond([dict(message) for message in messages], None, sampling, **keys))


def test_a_reply_has_its_turn_and_a_request_its_seed_and_name() -> None:
    stand_in = StandIn(tiny_chat(), error=0.0)
    episode = episode_of(stand_in)
    reply = ask(episode, [user("abc")])
    (turn,) = turns_of(episode.trace)
    assert reply.turn is not None
    assert same(reply.turn, turn)
    assert (reply.content, reply.num_prompt_tokens, reply.num_tokens) == ("cba", len(turn.prompt_ids), len(turn.completion_ids))
    assert stand_in.requests[0]["sampling"]["seed"] == request_seed(0, TASK, 1, 3, 0)
    assert (stand_in.requests[0]["request_id"], stand_in.requests[0]["affinity"]) == ("e-2-1-3-0", 2)


def test_a_request_has_the_policys_sampling_with_its_own_in_its_place() -> None:
    stand_in = StandIn(tiny_chat())
    episode = episode_of(stand_in)
    ask(episode, [user("abc")])
    ask(episode, [user("abc")], {"temperature": 0.2, "max_tokens": 4, "top_k": None, "stop_token_ids": [7]})
    ask(episode, [user("abc")], {"max_completion_tokens": 3})
    first, second, third = (request["sampling"] for request in stand_in.requests)
    assert {**first, "seed": 0} == {**RUN, "seed": 0, "stop_token_ids": tiny_chat().stop_token_ids}
    assert (second["temperature"], second["max_tokens"], second["min_tokens"], second["top_k"]) == (0.2, 4, 4, -1)
    assert second["stop_token_ids"] == [*tiny_chat().stop_token_ids, 7]
    assert (third["temperature"], third["max_tokens"]) == (1.0, 3)


def test_openais_parameters_become_vllms() -> None:
    stand_in = StandIn(tiny_chat())
    own = {"n": 1, "stop": "x", "extra_body": {"top_k": 5}, "logit_bias": {"7": 1}, "seed": 3, "presence_penalty": 0.5}
    ask(episode_of(stand_in), [user("abc")], own)
    sampling = stand_in.requests[0]["sampling"]
    assert (sampling["stop"], sampling["top_k"], sampling["logit_bias"], sampling["presence_penalty"]) == (["x"], 5, {7: 1.0}, 0.5)
    assert sampling["seed"] == request_seed(0, TASK, 1, 3, 0)
    assert not {"n", "extra_body"} & sampling.keys()


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"temperature": 0.0}, "temperature"),
        ({"repetition_penalty": 1.2, "top_k": 3}, "top_k|repetition_penalty"),
        ({"logit_bias": {7: 1.0}}, "logit_bias"),
        ({"temperature": 0.3, "stop": ["."], "max_tokens": 4, "stop_token_ids": [9]}, None),
    ],
)
def test_tokens_of_another_distribution_are_not_trained_where_ratios_need_the_policys_own(
    own: dict, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    tokens._say_biased.cache_clear()
    run = {"max_tokens": 20, "temperature": 1.0}
    for exact in (True, False):
        episode = policy_of(StandIn(tiny_chat(), error=0.0), sampling=run, exact=exact).episode(TASK, 0, 0)
        replies = [ask(episode, [user("abc")], own), ask(episode, [user("abc")], own), ask(episode, [user("abc")])]
        assert [reply.content for reply in replies] == ["cba"] * 3, "every request is answered"
        kept = episode.keep([reply.request_id for reply in replies])
        assert plain(turns_of(kept)) == plain(turns_of(episode.trace))
        assert len(turns_of(kept)) == (1 if exact and said else 3)
    names = said.split("|") if said else []
    assert [re.findall(r"asks for (\w+):", record.getMessage()) for record in caplog.records] == [[name] for name in names]


def without_end(turn: Turn) -> Turn:
    """The turn without its end token: a stop string ended it."""
    return replace(turn, completion_ids=turn.completion_ids[:-1], logprobs=turn.logprobs[:-1], versions=turn.versions[:-1])


def test_a_stop_string_is_cut_from_the_text_and_not_from_the_tokens() -> None:
    class Stopping(StandIn):
        async def generate(self, prompt_ids: Any, sampling: dict, request_id: str, affinity: int) -> Turn:
            turn = await super().generate(prompt_ids, sampling, request_id, affinity)
            return without_end(turn)

    stand_in = Stopping(tiny_chat(), answer=lambda _: "ab;\nc", error=0.0)
    episode = episode_of(stand_in)
    first = ask(episode, [user("abc")], {"stop": [";\n", "\n"], "min_tokens": 0})
    assert first.content == "ab"
    assert tiny_chat().tokenizer.decode(turns_of(episode.trace)[0].completion_ids) == "ab;\nc"
    assert not first.truncated
    ask(episode, [user("abc"), first.message, user("again")])
    assert ";" not in tiny_chat().tokenizer.decode(stand_in.requests[1]["prompt_ids"])


def test_a_stop_string_among_the_first_min_tokens_cuts_nothing() -> None:
    """vLLM looks for stop strings from there on only, so an earlier one belongs to the answer."""

    class Stopping(StandIn):
        async def generate(self, prompt_ids: Any, sampling: dict, request_id: str, affinity: int) -> Turn:
            turn = await super().generate(prompt_ids, sampling, request_id, affinity)
            return without_end(turn)

    stand_in = Stopping(tiny_chat(), answer=lambda _: "\nab;c;", error=0.0)
    sampling = {"stop": ["\n", ";"], "min_tokens": 5}
    assert ask(episode_of(stand_in), [user("abc")], sampling).content == "\nab;c"
    assert ask(episode_of(stand_in), [user("abc")], {**sampling, "min_tokens": 0}).content == ""


def test_a_raw_prompt_gets_no_chat_template() -> None:
    stand_in = StandIn(tiny_chat(), answer=lambda _: "def", error=0.0)
    reply = ask(episode_of(stand_in), [{"role": "text", "content": "abc"}])
    assert tiny_chat().tokenizer.decode(stand_in.requests[0]["prompt_ids"]) == "abc"
    assert reply.content == "def"
    with pytest.raises(PolicyError, match="raw text prompt cannot offer tools"):
        asyncio.run(episode_of(stand_in).respond([{"role": "text", "content": "abc"}], [{"type": "function"}]))


def test_a_request_beside_the_trajectory_is_answered_and_is_no_turn() -> None:
    stand_in = StandIn(tiny_chat(), error=0.0)
    episode = episode_of(stand_in)
    ask(episode, [user("abc")])
    judged = ask(episode, [user("is cba right?")], {"temperature": 0.0}, trained=False)
    ask(episode, [user("xyz")])
    assert judged.turn is not None
    assert [tiny_chat().parse(turn).content for turn in turns_of(episode.trace)] == ["cba", "zyx"]
    assert [episode.trace.nodes[place].message["content"] for place in episode.trace.answers] == ["cba", "zyx"]
    seeds = [request["sampling"]["seed"] for request in stand_in.requests]
    assert len(set(seeds)) == 3


async def test_turns_stand_in_the_order_in_which_they_were_asked_for() -> None:
    class Slower(StandIn):
        async def generate(self, prompt_ids: Any, sampling: dict, request_id: str, affinity: int) -> Turn:
            await asyncio.sleep(0.02 if request_id.endswith("-0") else 0)
            return await super().generate(prompt_ids, sampling, request_id, affinity)

    episode = episode_of(Slower(tiny_chat(), error=0.0))

    await asyncio.gather(episode.respond([user("slow")]), episode.respond([user("fast")]))
    assert [tiny_chat().parse(turn).content for turn in turns_of(episode.trace)] == ["wols", "tsaf"]


def test_a_conversation_that_goes_on_extends_the_tokens_of_the_turn_that_it_answers() -> None:
    chat = tiny_chat()
    extended = []

    class Extending(type(chat)):  # type: ignore[misc]
        def __init__(self) -> None:
            self.__dict__ |= vars(chat)

        def extend(self, asked: Any, answer: Any, before: Any, new: Any, tools: Any = None) -> list[int]:
            extended.append((asked.tolist(), answer.tolist(), list(new)))
            return [*asked.tolist(), *answer.tolist(), 9]

    policy = policy_of(StandIn(chat, error=0.0), Extending(), sampling=RUN)
    episode = policy.episode(TASK, 0, 0)
    first = ask(episode, [user("abc")])
    ask(episode, [user("abc"), first.message, user("again")])
    one, two = turns_of(episode.trace)
    assert extended == [(one.prompt_ids.tolist(), one.completion_ids.tolist(), [user("again")])]
    assert two.prompt_ids.tolist() == [*one.prompt_ids.tolist(), *one.completion_ids.tolist(), 9]
    ask(episode, [user("other"), first.message, user("again")])
    assert len(extended) == 1, "a rewritten history is not extended"


def test_what_leaves_no_room_and_what_is_aborted_are_errors() -> None:
    class Aborting(StandIn):
        async def generate(self, prompt_ids: Any, sampling: dict, request_id: str, affinity: int) -> Turn:
            return replace(await super().generate(prompt_ids, sampling, request_id, affinity), finish_reason="abort")

    length = len(tiny_chat().render([user("abc")]))
    with pytest.raises(PromptTooLong, match=f"{length} prompt tokens, but the context is {length}"):
        ask(episode_of(StandIn(tiny_chat()), context_length=length), [user("abc")])
    aborted = episode_of(Aborting(tiny_chat()))
    with pytest.raises(PolicyError, match="aborted"):
        ask(aborted, [user("abc")])
    assert aborted.trace.nodes == ()


class Slow(StandIn):
    """Takes a minute for each answer after the first."""

    async def generate(self, *given: Any) -> Turn:
        self.delay = 60.0 if self.requests else 0.0
        return await super().generate(*given)


@pytest.mark.parametrize(
    ("spec", "ended", "error"),
    [
        ({"turn_timeout": 0.1}, ("timeout", "timeout", False), "no answer after 0.1 s (turn_timeout)"),
        ({"deadline": 0.3}, ("ok", "prompt_too_long", True), None),
        ({"deadline": 60.0, "turn_timeout": 0.1}, ("ok", "prompt_too_long", True), None),
    ],
    ids=["a turn", "the rollout, which is scored", "a turn of a rollout that is scored"],
)
def test_a_deadline_ends_a_rollout_as_a_timeout_or_leaves_its_score_to_the_environment(spec: dict, ended: tuple, error: str | None) -> None:
    env = load("rlx_test_multi")
    env.policy = policy_of(Slow(tiny_chat(), error=1.0), context_length=4000, **spec)
    (rollout,) = asyncio.run(asyncio.wait_for(env.play(task_of(env), [0], 0), 10))
    assert (rollout.status, rollout.stop, rollout.is_truncated) == ended
    assert (rollout.error, len(turns_of(rollout))) == (error, 1), "the first turn is kept"
    assert rollout.rewards == ({} if error else {"solved": 0.0}), "scored or not"


def test_a_program_that_asks_again_after_a_deadline_gets_no_other_answer() -> None:
    slow = Slow(tiny_chat(), error=1.0)
    episode = episode_of(slow, turn_timeout=0.1)
    ask(episode, [user("abc")])
    for _ in range(2):
        with pytest.raises(PolicyError, match="turn_timeout"):
            ask(episode, [user("abcd")])
    assert len(slow.requests) == 2, "the third was not sent"
