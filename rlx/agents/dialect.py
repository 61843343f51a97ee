"""What the languages of programs have in common: a request in the form of `rlx.policy.base`, and the pieces of answers."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.plain import one_text
from rlx.policy.base import Message, Reply

log = logging.getLogger(__name__)

TEXTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
OWN = {
    "temperature": 1,
    "top_p": 1,
    "top_k": -1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}  # what a program asks where it does not care


class BadRequest(ValueError):
    """A request that no service would take, or that shows what a model of text cannot see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a program asks, in whatever language."""

    messages: list[Message]
    tools: list[dict[str, Any]]  # functions in OpenAI's form
    system: list[Message] = field(default_factory=list)  # comes before `previous`, which does not hold it
    sampling: dict[str, Any]  # `max_tokens` and `stop`: a program bounds its answers; how they are sampled is the run's
    stream: bool = False
    model: str = ""
    usage: bool = True  # whether a stream ends with the number of tokens
    free: frozenset[str] = frozenset()  # tools whose argument is a text, not JSON (Responses' `custom`)
    previous: str = ""  # the answer that this request continues (Responses' `previous_response_id`)


@dataclass(frozen=True, slots=True)
class Dialect:
    """One language."""

    name: str
    route: str
    counts: str  # the route that counts a request's tokens; empty: there is none
    read: Callable[[Mapping[str, Any]], Request]
    answer: Callable[[Reply, Request], dict[str, Any]]
    events: Callable[[Mapping[str, Any], bool], Iterator[bytes]]  # of an answer; whether it ends with the number of tokens

    def error(self, status: int, text: str, code: str = "") -> dict[str, Any]:
        """The body of an error."""
        if self.name == "messages":
            kinds = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
            return {"type": "error", "error": {"type": kinds.get(status, "api_error"), "message": text}}
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": text, "type": kind, "param": None, "code": code or None}}


def text_of(content: Any) -> str:
    """The text of a message's content. Raises BadRequest for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    if others := sorted({str(part.get("type")) for part in parts} - {*TEXTS}):
        raise BadRequest(f"this model reads text alone, and a message has parts of the type {', '.join(others)}")
    return one_text(str(part.get("text", part.get("refusal", ""))) for part in parts)


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


def sampling_of(body: Mapping[str, Any], limits: Iterable[str], stop: str = "stop") -> dict[str, Any]:
    asked: dict[str, Any] = {}
    if others := [f"{name}={body[name]}" for name, usual in OWN.items() if body.get(name) not in (None, usual)]:
        _say_once(f"a program asks for {', '.join(others)}; the run's own `sampling` stands, because that is what is trained")
    if body.get(stop):
        asked["stop"] = [body[stop]] if isinstance(body[stop], str) else list(body[stop])
    for name in limits:
        if body.get(name) is not None:
            asked["max_tokens"] = int(body[name])
    return asked


def offered(tools: Sequence[Any], choice: Any) -> Sequence[Any]:
    """The tools that a request offers. A choice that forces a call is not enforced: the model chooses."""
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind not in (None, "auto", "none"):
        _say_once(f"a program asks for tool_choice={json.dumps(choice)}; the model chooses by itself, as with auto")
    return [] if kind == "none" else tools


@functools.cache
def _say_once(text: str) -> None:
    log.warning("%s", text)


def no_format(asked: Any) -> None:
    """A form that an answer is to have is not enforced."""
    if isinstance(asked, Mapping) and asked.get("type", "text") != "text":
        _say_once(f"a program asks for answers of the form {asked['type']}; the model is not held to it")


def not_offered(tools: Iterable[Any]) -> None:
    if names := sorted({str(tool.get("type")) for tool in tools}):
        _say_once(f"a program offers tools of its service ({', '.join(names)}), which do not exist here; the model is not shown them")
