"""The gateway: programs ask in the language of the service that they know, and every sampled token is in the trace once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest
from policy_stand_in import StandIn, policy_of, tiny_chat

from rlx.agents.gateway import UNTRAINED, Gateway, Session
from rlx.config.schema_rollout import HarnessConfig
from rlx.policy.base import NotShown
from rlx.trace import Trace, Turn
from rlx.types import Task

pytestmark = pytest.mark.anyio
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2,  "b": 3}}\n</tool_call>'
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


class Engine(StandIn):
    """Says the given texts in turn, each token under a version and with a log-probability of its own, and keeps what it said."""

    def __init__(self, *texts: str, delay: float = 0.0) -> None:
        super().__init__(tiny_chat(), error=0.0, delay=delay)
        self.texts, self.turns = list(texts), []
        self.turns: list[Turn] = []

    async def generate(self, prompt_ids: Any, sampling: dict, request_id: str, affinity: int) -> Turn:
        self.requests.append({"sampling": sampling})
        text = self.texts.pop(0)
        await asyncio.sleep(self.delay)
        cut = next((text[: text.find(stop) + len(stop)] for stop in sampling.get("stop", ()) if stop in text), None)
        end = [] if cut else [self.chat.stop_token_ids[0]]
        ids = np.array([*self.chat.tokenizer.encode(cut or text), *end], np.int32)[: sampling["max_tokens"]]
        number = len(self.turns)
        turn = Turn(
            prompt_ids=np.asarray(prompt_ids, np.int32),
            completion_ids=ids,
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) / (number + 3),
            versions=np.array([number + (at > len(ids) // 2) for at in range(len(ids))], np.int32),  # an update in its middle
            temperature=1.0,
            finish_reason="stop" if cut or ids[-1] == self.chat.stop_token_ids[0] else "length",
        )
        self.turns.append(turn)
        return turn


@asynccontextmanager
async def opened(engine: Engine, deadline: float = float("inf"), **limits: Any) -> AsyncIterator[tuple[Gateway, Session]]:
    gateway = Gateway()
    await gateway.start()
    policy = policy_of(engine, context_length=8192, sampling={"max_tokens": 200})
    try:
        episode = policy.episode(Task(env="e", example_id=0, index=0, row={}), 0, 0)
        yield gateway, gateway.open(episode, HarnessConfig(**limits), 200, deadline)
    finally:
        await gateway.stop()


def check(trace: Trace, engine: Engine, branches: int = 1) -> None:
    """Every token that the engine sampled is in the trace once, with its log-probability and version, behind the prompt that it saw."""
    answers = [trace.nodes[index] for index in trace.answers]
    assert len(answers) == len(engine.turns)
    for index, turn in zip(trace.answers, engine.turns, strict=True):
        np.testing.assert_array_equal(trace.ids(index), np.concatenate([turn.prompt_ids, turn.completion_ids]))
        np.testing.assert_array_equal(trace.nodes[index].logprobs, turn.logprobs)
        np.testing.assert_array_equal(trace.nodes[index].token_versions, turn.versions)
    assert len(trace.branches()) == branches


async def by_chat(url: str, key: str, stream: bool) -> list[str]:
    """A program on OpenAI's chat completions: it answers calls until there are none."""
    tools: Any = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}]
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "2+3?"}]}]
    said = []
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        while True:
            if stream:
                async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as events:
                    message = (await events.get_final_completion()).choices[0].message
            else:
                message = (await client.chat.completions.create(model="m", messages=messages, tools=tools)).choices[0].message
            said.append(message.content or "")
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            if not message.tool_calls:
                return said
            for call in message.tool_calls:
                arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])})


async def by_messages(url: str, key: str, stream: bool) -> list[str]:
    """The same program on Anthropic's messages."""
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": ADD}]
    messages: list[Any] = [{"role": "user", "content": "2+3?"}]
    said = []
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as client:
        while True:
            asked: Any = {"model": "m", "max_tokens": 100, "system": "Be brief.", "messages": messages, "tools": tools}
            if stream:
                async with client.messages.stream(**asked) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**asked)
            said.append("".join(part.text for part in message.content if part.type == "text"))
            messages.append({"role": "assistant", "content": [part.model_dump(exclude_none=True) for part in message.content]})
            results = [
                {"type": "tool_result", "tool_use_id": part.id, "content": str(part.input["a"] + part.input["b"])}
                for part in message.content
                if part.type == "tool_use"
            ]
            if not results:
                return said
            messages.append({"role": "user", "content": results})


async def by_responses(url: str, key: str, stream: bool) -> list[str]:
    """The same program on OpenAI's Responses."""
    tools: Any = [{"type": "function", "name": "add", "description": "Adds.", "parameters": ADD, "strict": False}]
    items: list[Any] = [{"role": "user", "content": "2+3?"}]
    said = []
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
        while True:
            asked: Any = {"model": "m", "instructions": "Be brief.", "input": items, "tools": tools}
            if stream:
                async with client.responses.stream(**asked) as events:
                    response: Any = await events.get_final_response()
            else:
                response = await client.responses.create(**asked)
            said.append(response.output_text)
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return said
            for call in calls:
                arguments = json.loads(call.arguments)
                output = str(arguments["a"] + arguments["b"])
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


PROGRAMS = {"chat": by_chat, "messages": by_messages, "responses": by_responses}
Program = Callable[[str, str, bool], Any]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
async def test_every_sampled_token_stands_in_the_trace_once(program: Program, stream: bool):
    engine = Engine(f"Let me see.\n{CALL}", CALL.replace("2, ", "7, "), "It is five.")
    async with opened(engine) as (gateway, session):
        said = await program(gateway.url, session.key, stream)
        assert [text.strip() for text in said] == ["Let me see.", "", "It is five."]
        check(session.episode.keep(session.delivered), engine)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
async def test_sixty_four_programs_at_once_keep_their_own_traces(program: Program):
    engines = [Engine(CALL, f"It is number {number}.", delay=0.01) for number in range(64)]
    gateway = Gateway()
    await gateway.start()
    sessions = []
    for number, engine in enumerate(engines):
        policy = policy_of(engine, context_length=8192, sampling={"max_tokens": 200})
        sessions.append(gateway.open(policy.episode(Task(env="e", example_id=0, index=number, row={}), 0, 0)))
    said = await asyncio.gather(*(program(gateway.url, session.key, number % 2 == 0) for number, session in enumerate(sessions)))
    assert [texts[-1] for texts in said] == [f"It is number {number}." for number in range(64)]
    for session, engine in zip(sessions, engines, strict=True):
        check(session.episode.keep(session.delivered), engine)
    await gateway.stop()


def post(url: str, body: Any, key: str, **headers: str) -> Any:
    async def ask() -> tuple[int, Any]:
        async with aiohttp.ClientSession() as client, client.post(url, json=body, headers={"x-api-key": key, **headers}) as answer:
            return answer.status, await answer.json()

    return ask()


HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}


async def test_a_key_opens_its_own_session_only_and_none_after_its_end():
    async with opened(Engine("one", "two")) as (gateway, session):
        for key in ("", "guessed", session.key[:-1]):
            status, body = await post(f"{gateway.url}/v1/messages", HELLO, key)
            assert (status, body["error"]["type"]) == (401, "authentication_error")
        status, body = await post(f"{gateway.url}/s/{session.key}/v1/messages", HELLO, "")
        assert (status, body["content"]) == (200, [{"type": "text", "text": "one"}])
        await gateway.close(session)
        status, body = await post(f"{gateway.url}/v1/chat/completions", HELLO, session.key)
        assert status == 401
        assert "its session has ended" in body["error"]["message"]


async def test_what_the_chat_format_cannot_show_is_refused_once(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise NotShown("the chat format does not serve these tools")

    monkeypatch.setattr("rlx.policy.chat.Chat.render", refuse)
    async with opened(Engine("one")) as (gateway, session):
        status, body = await post(f"{gateway.url}/v1/messages", HELLO, session.key)
        assert (status, "does not serve these tools" in body["error"]["message"]) == (400, True), "a client tries a 502 again for minutes"


async def test_budgets_of_turns_tokens_and_time_end_a_session_without_retries():
    for limits, stop, served in (
        ({"max_turns": 2}, "max_turns", 2),
        ({"max_tokens": 5}, "max_tokens", 2),
        ({"deadline": 0.0}, "timeout", 0),
    ):
        engine = Engine("abc", "abcdef", "never")
        async with (
            opened(engine, **limits) as (gateway, session),
            anthropic.AsyncAnthropic(base_url=gateway.url, api_key=session.key) as client,
        ):
            for _ in range(served):
                await client.messages.create(**HELLO)  # type: ignore[call-overload]
            with pytest.raises(anthropic.PermissionDeniedError, match=stop):
                await client.messages.create(**HELLO)  # type: ignore[call-overload]
            assert (session.stop, len(engine.turns)) == (stop, served)
            assert sum(len(turn.completion_ids) for turn in engine.turns) <= limits.get("max_tokens", 99)


async def test_a_history_that_is_written_otherwise_begins_a_branch():
    engine = Engine("first answer", "second answer", "third answer")
    async with opened(engine) as (gateway, session):
        url = f"{gateway.url}/v1/chat/completions"
        history: list[Any] = [{"role": "user", "content": "hello"}]
        for said in ("first answer", "First  answer (shortened)"):
            await post(url, {"model": "m", "messages": history}, session.key)
            history += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        await post(url, {"model": "m", "messages": history}, session.key)
        check(session.episode.keep(session.delivered), engine, branches=2)


async def test_a_second_try_gets_the_answer_of_the_first_and_it_counts_once():
    engine = Engine("only", "other", delay=0.3)
    async with opened(engine) as (gateway, session):
        with pytest.raises(TimeoutError):  # the program hangs up
            await asyncio.wait_for(post(f"{gateway.url}/v1/messages", HELLO, session.key), 0.1)
        _, body = await post(f"{gateway.url}/v1/messages", HELLO, session.key, **{"x-stainless-retry-count": "1"})
        assert body["content"][0]["text"] == "only"
        check(session.episode.keep(session.delivered), engine)
        await post(f"{gateway.url}/v1/messages", HELLO, session.key)  # the same request anew is a request of its own
        assert len(engine.turns) == 2


async def test_an_answer_that_the_program_never_received_is_not_trained():
    engine = Engine("lost", "kept", delay=0.2)
    async with opened(engine) as (gateway, session):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post(f"{gateway.url}/v1/messages", HELLO, session.key), 0.05)
        await asyncio.sleep(0.3)
        await post(f"{gateway.url}/v1/messages", {**HELLO, "system": "again"}, session.key)
        trace = session.episode.keep(session.delivered)
        assert [trace.nodes[index].message["content"] for index in trace.answers] == ["kept"]


async def test_requests_for_the_untrained_model_are_answered_and_left_out():
    engine = Engine("a title", "an answer")
    async with opened(engine) as (gateway, session):
        for model in (UNTRAINED, "policy"):
            status, _ = await post(f"{gateway.url}/v1/messages", {**HELLO, "model": model}, session.key)
            assert status == 200
        trace = session.episode.keep(session.delivered)
        assert [trace.nodes[index].message["content"] for index in trace.answers] == ["an answer"]


async def test_the_runs_own_sampling_stands_whatever_a_program_asks():
    engine = Engine("fine")
    async with opened(engine) as (gateway, session):
        await post(f"{gateway.url}/v1/messages", {**HELLO, "temperature": 0.0, "top_k": 1, "max_tokens": 32000}, session.key)
        asked = engine.requests[0]["sampling"]
        assert "top_k" not in asked
        assert asked["max_tokens"] == 200, "the run bounds an answer, whatever a program asks for"
        assert asked.get("temperature", 1.0) == 1.0


def shown(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


PREFILLED = [*HELLO["messages"], {"role": "assistant", "content": "{"}]
OLD_CALL = [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}


@pytest.mark.parametrize(
    ("route", "asked", "said"),
    [
        ("messages", {"messages": [shown({"type": "image", "source": {}})]}, "reads text alone"),
        ("chat/completions", {"messages": [shown({"type": "image_url", "image_url": {"url": ""}})]}, "parts of the type image_url"),
        ("responses", {"input": [shown({"type": "input_image", "image_url": ""})]}, "parts of the type input_image"),
        ("chat/completions", {"response_format": SCHEMA}, "answers of the form json_schema are not supported with this model"),
        ("responses", {"input": "hi", "text": {"format": {"type": "json_object"}}}, "answers of the form json_object are not supported"),
        ("messages", {"messages": PREFILLED}, "the last message is the model's own"),
        ("messages", {"messages": None}, "cannot be read"),
        ("chat/completions", {"n": 2}, "one answer a request"),
        ("chat/completions", {"messages": OLD_CALL}, "write it as tool_calls"),
        ("responses", {"input": "hi", "previous_response_id": "resp_0"}, "there is no answer resp_0"),
        ("messages", {"messages": [{"role": "user", "content": "long " * 5000}]}, "prompt is too long"),
    ],
)
async def test_a_request_that_cannot_be_served_is_an_error_of_the_service(route: str, asked: Any, said: str):
    async with opened(Engine("x")) as (gateway, session):
        status, answer = await post(f"{gateway.url}/v1/{route}", {**HELLO, **asked}, session.key)
        assert (status, session.turns) == (400, 0)
        assert said in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"
        assert set(answer) == ({"type", "error"} if route == "messages" else {"error"})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_named_as_the_reason(stream: bool):
    engine = Engine("thought END more", "no such word")
    async with opened(engine) as (gateway, session), anthropic.AsyncAnthropic(base_url=gateway.url, api_key=session.key) as client:
        found = []
        for _ in range(2):
            asked: Any = {**HELLO, "stop_sequences": ["STOP", "END"]}
            if stream:
                async with client.messages.stream(**asked) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**asked)
            found.append((message.stop_reason, message.stop_sequence, message.content[0].text))
        assert found == [("stop_sequence", "END", "thought "), ("end_turn", None, "no such word")]
        check(session.episode.keep(session.delivered), engine, branches=2)


async def test_a_response_continues_a_stored_one():
    engine = Engine("first", "second")
    async with opened(engine) as (gateway, session), openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session.key) as client:
        first = await client.responses.create(model="m", instructions="Be brief.", input="one")
        second = await client.responses.create(model="m", instructions="Be brief.", input="two", previous_response_id=first.id)
        assert (first.output_text, second.output_text) == ("first", "second")
        check(session.episode.keep(session.delivered), engine)


async def test_tokens_are_counted_as_the_prompt_has_them():
    engine = Engine("x")
    async with opened(engine) as (gateway, session), anthropic.AsyncAnthropic(base_url=gateway.url, api_key=session.key) as client:
        counted = await client.messages.count_tokens(model="m", messages=HELLO["messages"])  # type: ignore[arg-type]
        await client.messages.create(**HELLO)  # type: ignore[call-overload]
        assert counted.input_tokens == len(engine.turns[0].prompt_ids)
        assert [model.id async for model in client.models.list()] == ["policy"]


async def test_what_a_program_asks_beside_its_session_waits_its_turn_and_is_answered():
    engine = Engine(*("x" * 3 for _ in range(200)), delay=0.01)
    async with opened(engine) as (gateway, session):
        answers = await asyncio.gather(*(post(f"{gateway.url}/v1/messages", HELLO, session.key) for _ in range(200)))
        assert {status for status, _ in answers} == {200}
        check(session.episode.keep(session.delivered), engine, branches=200)


async def test_answers_with_the_same_words_keep_their_own_reasoning(monkeypatch: pytest.MonkeyPatch):
    """A program drops reasoning; the same words at two places stand for two answers."""
    monkeypatch.setattr(tiny_chat(), "reasoning_parser", "qwen3")
    engine = Engine(*(f"<think>\nthought {number}\n</think>\n\nOK" for number in range(3)), "end")
    async with opened(engine) as (gateway, session):
        url, history = f"{gateway.url}/v1/chat/completions", list[Any]()
        for number in range(4):
            history += [{"role": "user", "content": f"q{number}"}]
            _, body = await post(url, {"model": "m", "messages": history}, session.key)
            history += [{"role": "assistant", "content": body["choices"][0]["message"]["content"]}]
        trace = session.episode.trace
        said = [message for message in trace.conversation(trace.answers[-1]) if message["role"] == "assistant"]
        assert [message["reasoning_content"].strip() for message in said[:3]] == ["thought 0", "thought 1", "thought 2"]


async def test_equal_requests_at_the_same_time_all_end_with_their_session():
    engine = Engine(*("x" for _ in range(4)), delay=5)
    async with opened(engine) as (gateway, session):
        asking = [asyncio.create_task(post(f"{gateway.url}/v1/messages", HELLO, session.key)) for _ in range(4)]
        await asyncio.sleep(0.2)
        await asyncio.wait_for(gateway.close(session), 2)
        assert {status for status, _ in await asyncio.wait_for(asyncio.gather(*asking), 2)} == {403}
        assert engine.turns == []
