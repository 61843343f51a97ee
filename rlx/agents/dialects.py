"""The three languages in which programs ask a model: OpenAI's chat completions and Responses, and Anthropic's messages.

    dialect.read(body) → Request → the policy → Reply → dialect.answer(reply, …) → JSON, or dialect.events(JSON) → a stream

Messages are those of `rlx.policy.base`. What a model cannot be shown (images, files) is refused; a service's own tools (web search, code
interpreters) are not offered to it. Formats: the public references of the two services, as of November 2026.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlx.agents.dialect import (
    BadRequest,
    Dialect,
    Request,
    assistant,
    call,
    function,
    no_format,
    not_offered,
    offered,
    sampling_of,
    text_of,
)
from rlx.plain import one_text, utf8
from rlx.policy.base import Message, Reply

# chat completions


def read_chat(body: Mapping[str, Any]) -> Request:
    """A request of `/v1/chat/completions`."""
    if body.get("n") not in (None, 1):
        raise BadRequest("n: one answer a request is all that is served")
    no_format(body.get("response_format"))
    messages: list[Message] = []
    for one in body["messages"]:
        role = {"developer": "system", "function": "tool"}.get(one["role"], one["role"])
        text = text_of(one.get("content"))
        if one.get("function_call"):
            raise BadRequest("function_call: write it as tool_calls, which have ids")
        if role == "assistant":
            calls = [call(each["id"], each["function"]["name"], each["function"]["arguments"]) for each in one.get("tool_calls") or ()]
            messages.append(assistant(text, one.get("reasoning_content") or one.get("reasoning") or "", calls))
        elif role == "tool":
            messages.append({"role": "tool", "content": text, "tool_call_id": one.get("tool_call_id", "")})
        else:
            messages.append({"role": role, "content": text})
    tools = offered(body.get("tools") or (), body.get("tool_choice"))
    not_offered(tool for tool in tools if tool.get("type") != "function")
    functions = [tool["function"] for tool in tools if tool.get("type") == "function"]
    return Request(
        messages=messages,
        tools=[function(one["name"], one.get("description"), one.get("parameters")) for one in functions],
        sampling=sampling_of(body, ("max_tokens", "max_completion_tokens")),
        stream=bool(body.get("stream")),
        model=str(body.get("model", "")),
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


def answer_chat(reply: Reply, request: Request) -> dict[str, Any]:
    """The body of a chat completion."""
    message = {**reply.message, "content": reply.content or None, "refusal": None}
    return {
        "id": reply.request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [{"index": 0, "message": message, "finish_reason": _finish(reply), "logprobs": None}],
        "usage": {
            "prompt_tokens": reply.num_prompt_tokens,
            "completion_tokens": reply.num_tokens,
            "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
        },
    }


def _finish(reply: Reply) -> str:
    return "length" if reply.truncated else "tool_calls" if reply.calls else "stop"


def events_chat(answer: Mapping[str, Any], usage: bool) -> Iterator[bytes]:
    """The chunks of a chat completion."""
    (choice,) = answer["choices"]
    message = choice["message"]
    head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        return _data({**head, "choices": [{"index": 0, "delta": dict(delta), "finish_reason": finish, "logprobs": None}]})

    yield chunk({"role": "assistant", "content": ""})
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield chunk({name: message[name]})
    for index, one in enumerate(message.get("tool_calls") or ()):
        yield chunk({"tool_calls": [{"index": index, **one}]})
    yield chunk({}, choice["finish_reason"])
    if usage:
        yield _data({**head, "choices": [], "usage": answer["usage"]})
    yield b"data: [DONE]\n\n"


# Anthropic's messages


def read_messages(body: Mapping[str, Any]) -> Request:
    """A request of `/v1/messages`."""
    messages: list[Message] = [{"role": "system", "content": text_of(body["system"])}] if body.get("system") else []
    for one in body["messages"]:
        parts = [{"type": "text", "text": one["content"]}] if isinstance(one["content"], str) else list(one["content"])
        if one["role"] == "assistant":
            texts = [part for part in parts if part["type"] not in ("thinking", "redacted_thinking", "tool_use")]
            thoughts = "".join(part["thinking"] for part in parts if part["type"] == "thinking")
            calls = [call(part["id"], part["name"], part["input"]) for part in parts if part["type"] == "tool_use"]
            messages.append(assistant(text_of(texts), thoughts, calls))
            continue
        for part in parts:
            if part["type"] == "tool_result":
                messages.append({"role": "tool", "content": text_of(part.get("content")), "tool_call_id": part["tool_use_id"]})
        if rest := [part for part in parts if part["type"] != "tool_result"]:
            messages.append({"role": one["role"], "content": text_of(rest)})
    tools = offered(body.get("tools") or (), body.get("tool_choice"))
    not_offered(tool for tool in tools if "input_schema" not in tool)
    own = [function(tool["name"], tool.get("description"), tool["input_schema"]) for tool in tools if "input_schema" in tool]
    sampling = sampling_of(body, ("max_tokens",), stop="stop_sequences")
    return Request(messages=messages, tools=own, sampling=sampling, stream=bool(body.get("stream")), model=str(body.get("model", "")))


def answer_messages(reply: Reply, request: Request) -> dict[str, Any]:
    """The body of a message."""
    content: list[dict[str, Any]] = []
    if reply.reasoning:
        content.append({"type": "thinking", "thinking": reply.reasoning, "signature": reply.request_id})
    if reply.content or not (reply.reasoning or reply.calls):
        content.append({"type": "text", "text": reply.content})
    content += [{"type": "tool_use", "id": one.id, "name": one.name, "input": as_object(one.arguments)} for one in reply.calls]
    stop = {"length": "max_tokens", "tool_calls": "tool_use"}.get(_finish(reply), "end_turn")
    return {
        "id": reply.request_id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {"input_tokens": reply.num_prompt_tokens, "output_tokens": reply.num_tokens},
    }


def as_object(arguments: str) -> dict[str, Any]:
    """The arguments of a call, which Anthropic's form wants as an object."""
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def events_messages(answer: Mapping[str, Any], usage: bool) -> Iterator[bytes]:
    """The events of a message."""
    tokens = answer["usage"]
    start = {**answer, "content": [], "stop_reason": None, "usage": {**tokens, "output_tokens": 0}}
    yield _event("message_start", message=start)
    for index, part in enumerate(answer["content"]):
        if part["type"] == "tool_use":
            empty, deltas = {**part, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(part["input"])}]
        elif part["type"] == "thinking":
            empty = {**part, "thinking": "", "signature": ""}
            deltas = [{"type": f"{kind}_delta", kind: part[kind]} for kind in ("thinking", "signature")]
        else:
            empty, deltas = {**part, "text": ""}, [{"type": "text_delta", "text": part["text"]}]
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta={"stop_reason": answer["stop_reason"], "stop_sequence": None}, usage=tokens)
    yield _event("message_stop")


# Responses


@dataclass(slots=True)
class _Said:
    """Items of one answer of the model, which a message holds together."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)

    def message(self) -> list[Message]:
        empty = not (self.content or self.reasoning or self.calls)
        return [] if empty else [assistant(one_text(self.content), "".join(self.reasoning), self.calls)]


def read_responses(body: Mapping[str, Any]) -> Request:
    """A request of `/v1/responses`."""
    no_format((body.get("text") or {}).get("format"))
    messages: list[Message] = []
    given, said = body.get("input") or [], _Said()
    items: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for one in items:
        kind, role = one.get("type", "message"), one.get("role")
        if kind == "reasoning":
            parts = one.get("content") or one.get("summary") or ()
            said.reasoning.append("".join(part["text"] for part in parts))
        elif kind == "function_call":
            said.calls.append(call(one["call_id"], one["name"], one["arguments"]))
        elif kind == "custom_tool_call":
            said.calls.append(call(one["call_id"], one["name"], {"input": one["input"]}))
        elif kind == "message" and role == "assistant":
            said.content.append(text_of(one["content"]))
        elif kind in ("message", "function_call_output", "custom_tool_call_output"):
            messages += said.message()
            said = _Said()
            text = text_of(one.get("output", one.get("content")))
            plain = {"role": "system" if role == "developer" else role, "content": text}
            messages.append(plain if kind == "message" else {"role": "tool", "content": text, "tool_call_id": one["call_id"]})
        else:
            raise BadRequest(f"an item of the type {kind} cannot be shown to this model")
    messages += said.message()
    tools = offered(body.get("tools") or (), body.get("tool_choice"))
    not_offered(tool for tool in tools if tool.get("type") not in ("function", "custom"))
    argument = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    own = [
        function(tool["name"], tool.get("description"), tool.get("parameters") if tool["type"] == "function" else argument)
        for tool in tools
        if tool.get("type") in ("function", "custom")
    ]
    return Request(
        messages=messages,
        system=[{"role": "system", "content": body["instructions"]}] if body.get("instructions") else [],
        tools=own,
        sampling=sampling_of(body, ("max_output_tokens",)),
        stream=bool(body.get("stream")),
        model=str(body.get("model", "")),
        free=frozenset(tool["name"] for tool in tools if tool.get("type") == "custom"),
        previous=str(body.get("previous_response_id") or ""),
    )


def answer_responses(reply: Reply, request: Request) -> dict[str, Any]:
    """The body of a response."""
    output: list[dict[str, Any]] = []
    if reply.reasoning:
        parts = [{"type": "reasoning_text", "text": reply.reasoning}]
        output.append({"type": "reasoning", "id": _id("rs"), "summary": [], "content": parts, "status": "completed"})
    if reply.content or not (reply.reasoning or reply.calls):
        texts = [{"type": "output_text", "text": reply.content, "annotations": []}]
        output.append({"type": "message", "id": _id("msg"), "role": "assistant", "status": "completed", "content": texts})
    for one in reply.calls:
        item: dict[str, Any] = {"id": _id("fc"), "call_id": one.id, "name": one.name, "status": "completed"}
        text = as_object(one.arguments).get("input") if one.name in request.free else None
        if isinstance(text, str):
            output.append({"type": "custom_tool_call", **item, "input": text})
        else:
            output.append({"type": "function_call", **item, "arguments": one.arguments})
    return {
        "id": reply.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if reply.truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if reply.truncated else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": request.previous or None,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": reply.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
        },
    }


def events_responses(answer: Mapping[str, Any], usage: bool) -> Iterator[bytes]:
    """The events of a response."""
    number = iter(range(1 << 30))

    def event(kind: str, **fields: Any) -> bytes:
        return _event(f"response.{kind}", sequence_number=next(number), **fields)

    begun = {**answer, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for place, item in enumerate(answer["output"]):
        at = {"item_id": item["id"], "output_index": place}
        empty: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""} if "arguments" in item else {"input": ""}
        yield event("output_item.added", output_index=place, item={**item, **empty, "status": "in_progress"})
        for index, part in enumerate(item.get("content") or ()):
            here, kind = {**at, "content_index": index}, part["type"]
            yield event("content_part.added", **here, part={**part, "text": ""})
            yield event(f"{kind}.delta", **here, delta=part["text"], logprobs=[])
            yield event(f"{kind}.done", **here, text=part["text"], logprobs=[])
            yield event("content_part.done", **here, part=part)
        if item["type"] == "function_call":
            yield event("function_call_arguments.delta", **at, delta=item["arguments"])
            yield event("function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"])
        elif item["type"] == "custom_tool_call":
            yield event("custom_tool_call_input.delta", **at, delta=item["input"])
            yield event("custom_tool_call_input.done", **at, input=item["input"])
        yield event("output_item.done", output_index=place, item=item)
    yield event(answer["status"], response=answer)


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _data(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(utf8(dict(value))).encode() + b"\n\n"


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + _data({"type": kind, **fields})


CHAT = Dialect("chat", "/chat/completions", "", read_chat, answer_chat, events_chat)
MESSAGES = Dialect("messages", "/messages", "/messages/count_tokens", read_messages, answer_messages, events_messages)
RESPONSES = Dialect("responses", "/responses", "/responses/input_tokens", read_responses, answer_responses, events_responses)
DIALECTS = (CHAT, MESSAGES, RESPONSES)
