"""The three languages in which programs ask a model: OpenAI's chat completions and Responses, and Anthropic's messages.

    dialect.read(body) → Request → the policy → Reply → dialect.answer(reply, …) → JSON, or dialect.events(JSON) → a stream

Messages are those of `rlx.policy.base`. What a model cannot be shown (images, files) is refused, and so is a form of answers that it cannot
be held to; a service's own tools (web search, code interpreters) are not offered to it. Formats: the public references of the two services,
as of November 2026.
"""

from __future__ import annotations

import functools
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.json_values import one_text, utf8
from rlx.policy.base import Message, Reply

log = logging.getLogger(__name__)

TEXTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # of an answer
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}  # Anthropic's errors


class Refused(Exception):
    """A request that is not answered, with its HTTP status and OpenAI's `code`."""

    def __init__(self, text: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(text)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a program asks, in whatever language."""

    messages: list[Message]
    tools: list[dict[str, Any]]  # functions in OpenAI's form
    system: list[Message] = field(default_factory=list)  # comes before `previous`, which does not hold it
    sampling: dict[str, Any]  # `max_tokens` and `stop`: a program bounds its answers; how they are sampled is the run's
    stream: bool = False
    model: str = ""
    usage: bool = False  # whether a stream of chat completions ends with the number of tokens
    free: frozenset[str] = frozenset()  # tools whose argument is a text, not JSON (Responses' `custom`)
    previous: str = ""  # the answer that this request continues (Responses' `previous_response_id`)


class Dialect:
    """One language."""

    route: str
    messages: Callable[[Mapping[str, Any]], Iterable[Message]]  # the conversation of a request
    answer: Callable[[Reply, Request], dict[str, Any]]  # the body of an answer
    events: Callable[[Mapping[str, Any], bool], Iterator[bytes]]  # the stream of an answer, with its number of tokens or without
    counts = ""  # the route that counts a request's tokens; empty: there is none
    ping = b": waiting\n\n"  # a part of a stream that says nothing

    def read(self, body: Mapping[str, Any]) -> Request:
        """A request. Raises Refused, or whatever a malformed body raises."""
        form = (body.get("text") or {}).get("format") or body.get("response_format") or body.get("output_format") or {}
        if form.get("type", "text") != "text":
            raise Refused(f"answers of the form {form['type']} are not supported with this model, which is held to no schema; ask for text")
        bounds = [int(body[name]) for name in LIMITS if body.get(name) is not None]
        sampling: dict[str, Any] = {"max_tokens": bounds[-1]} if bounds else {}
        if stop := body.get("stop") or body.get("stop_sequences"):
            sampling["stop"] = [stop] if isinstance(stop, str) else list(stop)
        tools = offered(body.get("tools") or (), body.get("tool_choice"))
        if others := sorted({str(tool.get("type")) for tool in tools if as_function(tool) is None}):
            _say_once(f"a program offers tools of its service ({', '.join(others)}), which do not exist here; the model is not shown them")
        return Request(
            messages=list(self.messages(body)),
            tools=[own for own in map(as_function, tools) if own is not None],
            system=[{"role": "system", "content": body["instructions"]}] if body.get("instructions") else [],
            sampling=sampling,
            stream=bool(body.get("stream")),
            model=str(body.get("model", "")),
            usage=bool((body.get("stream_options") or {}).get("include_usage")),
            free=frozenset(str(tool.get("name")) for tool in tools if tool.get("type") == "custom"),
            previous=str(body.get("previous_response_id") or ""),
        )

    def error(self, error: Refused) -> dict[str, Any]:
        """The body of an error."""
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


class ChatDialect(Dialect):
    """OpenAI's chat completions."""

    route = "/chat/completions"

    def messages(self, body: Mapping[str, Any]) -> Iterator[Message]:
        if body.get("n") not in (None, 1):
            raise Refused("n: one answer a request is all that is served")
        for one in body["messages"]:
            role = {"developer": "system", "function": "tool"}.get(one["role"], one["role"])
            text = text_of(one.get("content"))
            if one.get("function_call"):
                raise Refused("function_call: write it as tool_calls, which have ids")
            if role == "assistant":
                calls = [call(each["id"], each["function"]["name"], each["function"]["arguments"]) for each in one.get("tool_calls") or ()]
                yield assistant(text, one.get("reasoning_content") or one.get("reasoning") or "", calls)
            else:
                yield {"role": role, "content": text} | ({"tool_call_id": one.get("tool_call_id", "")} if role == "tool" else {})

    def answer(self, reply: Reply, request: Request) -> dict[str, Any]:
        message = {**reply.message, "content": reply.content or None, "refusal": None}
        finish = "length" if reply.truncated else "tool_calls" if reply.calls else "stop"
        return {
            "id": reply.request_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
            "usage": {
                "prompt_tokens": reply.num_prompt_tokens,
                "completion_tokens": reply.num_tokens,
                "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
            },
        }

    def events(self, answer: Mapping[str, Any], usage: bool) -> Iterator[bytes]:
        (choice,) = answer["choices"]
        message = choice["message"]
        head = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        calls = [{"index": index, **one} for index, one in enumerate(message.get("tool_calls") or ())]
        whole = {**message, "content": message["content"] or "", **({"tool_calls": calls} if calls else {})}
        for delta, finish in ((whole, None), ({}, choice["finish_reason"])):
            yield _data({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]})
        if usage:
            yield _data({**head, "choices": [], "usage": answer["usage"]})
        yield b"data: [DONE]\n\n"


class MessagesDialect(Dialect):
    """Anthropic's messages."""

    route, counts = "/messages", "/messages/count_tokens"
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def messages(self, body: Mapping[str, Any]) -> Iterator[Message]:
        if body.get("system"):
            yield {"role": "system", "content": text_of(body["system"])}
        for one in body["messages"]:
            parts = [{"type": "text", "text": one["content"]}] if isinstance(one["content"], str) else list(one["content"])
            texts = [part for part in parts if part["type"] not in ("thinking", "redacted_thinking", "tool_use", "tool_result")]
            if one["role"] == "assistant":
                thoughts = "".join(part["thinking"] for part in parts if part["type"] == "thinking")
                calls = [call(part["id"], part["name"], part["input"]) for part in parts if part["type"] == "tool_use"]
                yield assistant(text_of(texts), thoughts, calls)
                continue
            for part in parts:
                if part["type"] == "tool_result":
                    yield {"role": "tool", "content": text_of(part.get("content")), "tool_call_id": part["tool_use_id"]}
            if texts:
                yield {"role": one["role"], "content": text_of(texts)}

    def answer(self, reply: Reply, request: Request) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": reply.request_id})
        if reply.content or not (reply.reasoning or reply.calls):
            content.append({"type": "text", "text": reply.content})
        content += [{"type": "tool_use", "id": one.id, "name": one.name, "input": as_object(one.arguments)} for one in reply.calls]
        stopped = "end_turn" if reply.stop is None else "stop_sequence"
        return {
            "id": reply.request_id,
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": content,
            "stop_reason": "max_tokens" if reply.truncated else "tool_use" if reply.calls else stopped,
            "stop_sequence": reply.stop,
            "usage": {"input_tokens": reply.num_prompt_tokens, "output_tokens": reply.num_tokens},
        }

    def events(self, answer: Mapping[str, Any], usage: bool) -> Iterator[bytes]:
        tokens = answer["usage"]
        start = {**answer, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**tokens, "output_tokens": 0}}
        yield _event("message_start", message=start)
        for index, part in enumerate(answer["content"]):
            if part["type"] == "tool_use":
                empty, deltas = {**part, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(part["input"])}]
            else:
                texts = [name for name in ("thinking", "text", "signature") if name in part]
                empty = part | dict.fromkeys(texts, "")
                deltas = [{"type": f"{name}_delta", name: part[name]} for name in texts]
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta={name: answer[name] for name in ("stop_reason", "stop_sequence")}, usage=tokens)
        yield _event("message_stop")

    def error(self, error: Refused) -> dict[str, Any]:
        return {"type": "error", "error": {"type": KINDS.get(error.status, "api_error"), "message": str(error)}}


class ResponsesDialect(Dialect):
    """OpenAI's Responses. Several items are one message of the model."""

    route, counts = "/responses", "/responses/input_tokens"

    def messages(self, body: Mapping[str, Any]) -> list[Message]:
        given = body.get("input") or []
        items: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else given
        told: list[Message] = []
        for message in map(self._message, items):
            joins = told and told[-1]["role"] == message["role"] == "assistant"
            told.append(_joined(told.pop(), message) if joins else message)
        return told

    def _message(self, one: Mapping[str, Any]) -> Message:
        kind, role = one.get("type", "message"), one.get("role")
        if kind == "message":
            text = text_of(one["content"])
            return assistant(text) if role == "assistant" else {"role": "system" if role == "developer" else role, "content": text}
        if kind == "reasoning":
            return assistant("", "".join(part["text"] for part in one.get("content") or one.get("summary") or ()))
        if kind in ("function_call", "custom_tool_call"):
            arguments = one["arguments"] if kind == "function_call" else {"input": one["input"]}
            return assistant("", "", [call(one["call_id"], one["name"], arguments)])
        if kind in ("function_call_output", "custom_tool_call_output"):
            return {"role": "tool", "content": text_of(one["output"]), "tool_call_id": one["call_id"]}
        raise Refused(f"an item of the type {kind} cannot be shown to this model")

    def answer(self, reply: Reply, request: Request) -> dict[str, Any]:
        output: list[dict[str, Any]] = []
        if reply.reasoning:
            output.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": reply.reasoning}]})
        if reply.content or not (reply.reasoning or reply.calls):
            texts = [{"type": "output_text", "text": reply.content, "annotations": []}]
            output.append({"type": "message", "role": "assistant", "content": texts})
        for one in reply.calls:
            text = as_object(one.arguments).get("input") if one.name in request.free else None
            custom = {"type": "custom_tool_call", "input": text}
            said = custom if isinstance(text, str) else {"type": "function_call", "arguments": one.arguments}
            output.append({**said, "call_id": one.id, "name": one.name})
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
            "output": [{**item, "id": f"{item['type']}_{uuid.uuid4().hex}", "status": "completed"} for item in output],
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

    def events(self, answer: Mapping[str, Any], usage: bool) -> Iterator[bytes]:
        begun = {**answer, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        found: list[tuple[str, dict[str, Any]]] = [("created", {"response": begun}), ("in_progress", {"response": begun})]
        for place, item in enumerate(answer["output"]):
            at = {"item_id": item["id"], "output_index": place}
            inner = next(name for name in ("content", "arguments", "input") if name in item)
            empty = {**item, inner: [] if inner == "content" else "", "status": "in_progress"}
            found.append(("output_item.added", {"output_index": place, "item": empty}))
            if inner == "content":
                for index, part in enumerate(item["content"]):
                    here, kind = {**at, "content_index": index}, part["type"]
                    found.append(("content_part.added", {**here, "part": {**part, "text": ""}}))
                    found.append((f"{kind}.delta", {**here, "delta": part["text"], "logprobs": []}))
                    found.append((f"{kind}.done", {**here, "text": part["text"], "logprobs": []}))
                    found.append(("content_part.done", {**here, "part": part}))
            else:
                kind = f"{item['type']}_{inner}"  # function_call_arguments, custom_tool_call_input
                found.append((f"{kind}.delta", {**at, "delta": item[inner]}))
                found.append((f"{kind}.done", {**at, inner: item[inner], "name": item["name"]}))
            found.append(("output_item.done", {"output_index": place, "item": item}))
        found.append((answer["status"], {"response": answer}))
        for number, (kind, fields) in enumerate(found):
            yield _event(f"response.{kind}", sequence_number=number, **fields)


def text_of(content: Any) -> str:
    """The text of a message's content. Raises Refused for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    if others := sorted({str(part.get("type")) for part in parts} - {*TEXTS}):
        raise Refused(f"this model reads text alone, and a message has parts of the type {', '.join(others)}")
    return one_text(str(part.get("text", part.get("refusal", ""))) for part in parts)


def as_function(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """A tool of any dialect in OpenAI's form; None for one that the service itself would run."""
    own = tool.get("function", tool)
    free = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]} if tool.get("type") == "custom" else None
    kind = tool.get("type", "function" if "function" in tool else None)
    if "input_schema" not in own and (kind not in ("function", "custom") or "custom" in tool):
        return None
    return function(own["name"], own.get("description"), own.get("input_schema", free or own.get("parameters")))


def function(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    empty = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters or empty}}


def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call of a message. `arguments`: JSON, or what it stands for."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": text}}


def assistant(content: str, reasoning: str = "", calls: Sequence[Any] = ()) -> Message:
    """A message of the model, as `Reply.message` writes it."""
    message: Message = {"role": "assistant", "content": content}
    return message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": list(calls)} if calls else {})


def _joined(one: Message, other: Message) -> Message:
    texts = one_text(text for text in (one["content"], other["content"]) if text)
    thoughts = "".join(message.get("reasoning_content", "") for message in (one, other))
    return assistant(texts, thoughts, [*one.get("tool_calls", ()), *other.get("tool_calls", ())])


def as_object(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object, whatever the model has written."""
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def offered(tools: Sequence[Any], choice: Any) -> Sequence[Any]:
    """The tools that a request offers. A choice that forces a call is not enforced: the model chooses."""
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind not in (None, "auto", "none"):
        _say_once(f"a program asks for tool_choice={json.dumps(choice)}; the model chooses by itself, as with auto")
    return [] if kind == "none" else tools


@functools.cache
def _say_once(text: str) -> None:
    log.warning("%s", text)


def _data(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(utf8(dict(value))).encode() + b"\n\n"


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + _data({"type": kind, **fields})


CHAT, MESSAGES, RESPONSES = ChatDialect(), MessagesDialect(), ResponsesDialect()
DIALECTS = (CHAT, MESSAGES, RESPONSES)
