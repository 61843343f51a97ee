"""`OpenAIPolicy` against a small HTTP server that follows OpenAI's protocol and fails on demand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from policy_stand_in import load, task_of
from traces import turns_of

from rlx.cli.eval_display import eval_table
from rlx.policy.base import PolicyError, PromptTooLong
from rlx.policy.openai import OpenAIEpisode, OpenAIPolicy, parameters_of
from rlx.rollout.eval_results import outcome_of
from rlx.rollout.evaluation import score_metrics
from rlx.types import Task

TASK = Task(env="e", example_id=0, index=0, row={})
TOOL = {"type": "function", "function": {"name": "reverse", "description": "", "parameters": {"type": "object", "properties": {}}}}


def completion(content: str | None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": content, **message}}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return {"id": "c1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


class Endpoint:
    """Gives the `answers` in turn. Each is `(status, body)`, or seconds to sleep before an ordinary answer.

    After that it repeats the last message of each request.
    """

    def __init__(self, *answers: Any, signed: str | None = None) -> None:
        """`signed`: the owner in its list of models; None: it has no such list."""
        self.answers, self.signed = list(answers), signed
        self.asked: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer key"
        self.asked.append(await request.json())
        said = self.answers.pop(0) if self.answers else 0.0
        if isinstance(said, float):
            await asyncio.sleep(said)
            return web.json_response(completion(self.asked[-1]["messages"][-1]["content"][::-1]))
        status, body = said
        if isinstance(body, str):
            return web.Response(status=status, text=body)
        return web.json_response(body, status=status, headers={"retry-after-ms": "1"})

    async def list_models(self, request: web.Request) -> web.Response:
        if self.signed is None:
            raise web.HTTPNotFound
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": self.signed}]})


def play(endpoint: Endpoint, scene: Callable[[OpenAIPolicy], Awaitable[Any]], **keys: Any) -> Any:
    async def whole() -> Any:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", endpoint.answer)
        application.router.add_post("/v1/completions", endpoint.answer)
        application.router.add_get("/v1/models", endpoint.list_models)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        policy = OpenAIPolicy(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "key", "m", **keys)
        try:
            return await scene(policy)
        finally:
            await policy.close()
            await runner.cleanup()

    return asyncio.run(whole())


def ask(endpoint: Endpoint, messages: list[dict] | None = None, tools: Any = None, sampling: Any = None, **keys: Any) -> Any:
    async def scene(policy: OpenAIPolicy) -> Any:
        return await policy.episode(TASK, 0, 0).respond(messages or [{"role": "user", "content": "abc"}], tools, sampling)

    return play(endpoint, scene, **keys)


def test_a_message_comes_back_without_tokens_and_the_seed_is_that_of_the_request() -> None:
    endpoint = Endpoint()

    async def scene(policy: OpenAIPolicy) -> OpenAIEpisode:
        episode = policy.episode(TASK, 0, 0)
        for trained in (True, False):
            reply = await episode.respond([{"role": "user", "content": "abc"}], trained=trained)
            assert (reply.content, reply.turn, reply.truncated, reply.num_prompt_tokens, reply.num_tokens) == ("cba", None, False, 7, 3)
        return episode

    episode = play(endpoint, scene, sampling={"temperature": 0.5, "max_tokens": 9})
    assert (turns_of(episode.trace), [episode.trace.nodes[n].message["content"] for n in episode.trace.answers]) == ((), ["cba"])
    assert [(asked["temperature"], asked["max_tokens"], asked["model"]) for asked in endpoint.asked] == [(0.5, 9, "m")] * 2
    assert endpoint.asked[0]["seed"] != endpoint.asked[1]["seed"]
    again = Endpoint()
    ask(again)
    assert again.asked[0]["seed"] == endpoint.asked[0]["seed"]
    assert all(asked["seed"] < 2**31 for asked in endpoint.asked)


def test_a_request_has_its_own_sampling_and_what_says_nothing_is_not_sent() -> None:
    endpoint = Endpoint()
    run = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0}
    ask(endpoint, sampling={"temperature": 0.2, "stop": ["."], "top_k": 5, "max_tokens": None})
    assert endpoint.asked[0].keys() == {"model", "messages", "seed", "temperature", "stop", "top_k"}
    assert parameters_of(run, {}) == {"max_tokens": 16, "temperature": 1.0}
    assert parameters_of({"max_tokens": 16, "max_completion_tokens": 4}, {}) == {"max_completion_tokens": 4}
    assert parameters_of({"response_format": {"type": "json_object"}}, {}) == {"extra_body": {"response_format": {"type": "json_object"}}}


@pytest.mark.parametrize(("signed", "sent"), [("vllm", True), ("openai", False), (None, False)])
def test_a_server_with_defaults_of_its_own_is_told_every_value(signed: str | None, sent: bool) -> None:
    """vLLM would take `top_k: 20` from the model's `generation_config.json`, and the record would say that there was none."""
    endpoint = Endpoint(signed=signed)
    ask(endpoint, sampling={"top_p": 1.0, "top_k": -1, "min_p": 0.0})
    every = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: endpoint.asked[0].get(name) for name in every} == (every if sent else dict.fromkeys(every))


def test_a_raw_prompt_goes_to_the_route_for_text() -> None:
    choice = {"index": 0, "finish_reason": "length", "text": "def"}
    answer = {"id": "t1", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}
    endpoint = Endpoint((200, answer))
    reply = ask(endpoint, [{"role": "text", "content": "abc"}])
    assert (reply.content, reply.truncated, endpoint.asked[0]["prompt"]) == ("def", True, "abc")
    assert "messages" not in endpoint.asked[0]


def test_tools_are_offered_and_calls_read() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "reverse", "arguments": '{"text": "ab"}'}}
    endpoint = Endpoint((200, completion(None, "tool_calls", tool_calls=[call], reasoning_content="hm")))
    before = {"role": "assistant", "content": "", "reasoning_content": "earlier", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "x", "name": "reverse", "content": "ba"}
    reply = ask(endpoint, [{"role": "user", "content": "q"}, before, result], [TOOL])
    assert (reply.content, reply.reasoning, reply.calls[0].name, reply.calls[0].arguments) == ("", "hm", "reverse", '{"text": "ab"}')
    assert reply.message["tool_calls"] == [call]
    assert endpoint.asked[0]["tools"] == [TOOL]
    assert endpoint.asked[0]["messages"][1].keys() == {"role", "content", "tool_calls"}
    assert endpoint.asked[0]["messages"][2].keys() == {"role", "tool_call_id", "content"}


@pytest.mark.parametrize(
    ("call", "read"),
    [
        ({"id": "x", "function": {"name": "reverse", "arguments": "{}"}}, ("x", "reverse", "{}")),
        ({"id": "x", "type": None, "function": {"name": "reverse", "arguments": {"text": "ab"}}}, ("x", "reverse", '{"text": "ab"}')),
        ({"id": None, "type": "function", "function": {"name": "reverse", "arguments": None}}, ("call_0", "reverse", "{}")),
        ({"id": 7, "type": "", "function": {"name": "reverse", "arguments": "{}"}}, ("7", "reverse", "{}")),
    ],
)
def test_a_call_in_another_servers_form_is_read_and_not_left_out(call: dict[str, Any], read: tuple[str, ...]) -> None:
    answer = completion(None, "tool_calls", tool_calls=[call])
    answer["usage"] = {"prompt_tokens": 7}
    reply = ask(Endpoint((200, answer)), tools=[TOOL])
    assert [(one.id, one.name, one.arguments) for one in reply.calls] == [read]
    assert reply.num_tokens == 0


def test_an_endpoint_that_is_full_or_fails_is_asked_again() -> None:
    endpoint = Endpoint((429, {"error": {"message": "slow down"}}), (500, {"error": {"message": "oops"}}))
    assert ask(endpoint).content == "cba"
    assert len(endpoint.asked) == 3


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        ((500, {"error": {"message": "oops"}}), PolicyError, r"/v1 \(500\): .*oops.*tried 2 times"),
        ((401, {"error": {"message": "bad key"}}), PolicyError, r"refuses every request: .*\(401\): .*bad key"),
        ((429, {"error": {"message": "pay", "code": "insufficient_quota"}}), PolicyError, r"refuses every request: .*\(429\): .*pay"),
        ((400, {"error": {"message": "This model's maximum context length is 8 tokens"}}), PromptTooLong, "maximum context length is 8"),
        ((400, {"error": {"message": "no", "code": "context_length_exceeded"}}), PromptTooLong, r"\(400\)"),
        ((400, {"error": {"message": "temperature is wrong"}}), PolicyError, "temperature is wrong"),
        ((200, "<html>hello</html>"), PolicyError, "not a chat completion: <html>hello"),
        ((200, {"id": "c1", "choices": []}), PolicyError, "not a chat completion"),
        ((200, completion("half", "content_filter")), PolicyError, "broke an answer off: finish_reason=content_filter"),
        ((200, completion("half", "error")), PolicyError, "broke an answer off: finish_reason=error"),
        (
            (200, completion("", "tool_calls", tool_calls=[{"id": "x", "type": "custom", "custom": {"name": "f", "input": "a"}}])),
            PolicyError,
            "gave a tool call that calls no function",
        ),
        (3600.0, PolicyError, r"did not answer in 0\.2 s, tried 2 times"),
    ],
)
def test_what_an_endpoint_does_not_answer_is_an_error_that_names_it(answer: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        ask(Endpoint(answer, answer), max_retries=1, timeout=0.2 if answer == 3600.0 else 60)
    assert type(raised.value) is error


async def test_an_endpoint_that_is_not_there_is_said_so() -> None:
    policy = OpenAIPolicy("http://127.0.0.1:9/v1", "key", "m", max_retries=0)
    with pytest.raises(PolicyError, match=r"127\.0\.0\.1:9/v1 cannot be reached, tried 1 times: "):
        await policy.episode(TASK, 0, 0).respond([{"role": "user", "content": "abc"}])


def test_an_environment_is_played_and_scored_without_tokens() -> None:
    env = load("rlx_reverse_text", num_examples=4)
    endpoint = Endpoint((200, completion(env.rows[0]["answer"])), (401, {"error": {"message": "bad key"}}))

    async def scene(policy: OpenAIPolicy) -> Any:
        env.policy = policy
        return [(await env.play(task_of(env), [0], 0))[0] for _ in range(2)]

    good, bad = play(endpoint, scene)
    assert (good.status, good.reward, turns_of(good)) == ("ok", 1.0, ())
    outcome = outcome_of(good, env="e")
    assert (outcome.token_usage.input_tokens, outcome.token_usage.output_tokens) == (None, None)
    described = score_metrics("e", [[outcome]], 0.5)
    assert "eval/e/completion_mean" not in described
    row = {"step": 0, "env": "e"} | {name.removeprefix("eval/e/"): value for name, value in described.items()}
    assert eval_table([row])[1][0][-3] == "-"
    assert good.completion == [{"role": "assistant", "content": env.rows[0]["answer"]}]
    assert (bad.status, bad.stop) == ("error", "model_error")
    assert "bad key" in bad.error


@pytest.mark.parametrize(
    ("answer", "tools", "says"),
    [
        ((400, {"error": {"message": "tool choice needs a parser"}}), True, "tool choice needs a parser"),
        ((401, {"error": {"message": "bad key"}}), False, r"\(401\): .*bad key"),
        ((200, completion("yes")), True, None),
    ],
)
def test_what_an_endpoint_can_do_is_known_before_any_work(answer: Any, tools: bool, says: str | None) -> None:
    endpoint = Endpoint(answer)
    with pytest.raises(PolicyError, match=says) if says else contextlib.nullcontext():
        play(endpoint, lambda policy: policy.check(tools=tools), max_retries=0)
    assert ("tools" in endpoint.asked[0]) == tools


def test_parameters_that_an_endpoint_does_not_take_are_left_out_or_renamed() -> None:
    endpoint, sampling = Endpoint(), {"max_tokens": 9, "top_k": 5}
    ask(endpoint, sampling=sampling, names={"seed": None, "max_tokens": "max_completion_tokens", "top_k": "k"})
    assert endpoint.asked[0].keys() == {"model", "messages", "max_completion_tokens", "k"}
