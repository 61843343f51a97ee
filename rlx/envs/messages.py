"""The messages of verifiers' environments, classic and v1, in the form that chat templates read. Imports no verifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlx.json_values import one_text, utf8
from rlx.policy.base import Message


def for_template(message: Any) -> Message:
    """A message of verifiers, classic or v1, as chat templates and renderers read it. Raises ValueError for content that is not text."""
    out: Message = {"role": message.role, "content": text_of(message.content)}
    if message.role == "assistant":
        if message.reasoning_content:
            out["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            out["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
    elif message.role == "tool":
        out["tool_call_id"] = message.tool_call_id
        if name := getattr(message, "name", None):  # v1 has it
            out["name"] = name
    return utf8(out)


def text_of(content: Any) -> str:
    """The text of a message's content. Parts are joined, because many templates lose a list. Raises ValueError for parts without text."""
    if not isinstance(content, list):
        return content or ""
    parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
    if others := sorted({str(part.get("type")) for part in parts if part.get("type") != "text"}):
        raise ValueError(f"a message of the conversation has parts of the type {', '.join(others)}, but rlx trains on text alone")
    return one_text(part["text"] for part in parts)


def recorded(message: Any) -> Message:
    """A message as a plain dict, for people and files. It may have an image that no request showed."""
    if isinstance(message, dict):
        return utf8(message)
    try:
        return for_template(message)
    except ValueError:
        return utf8(message.model_dump(exclude_none=True))
