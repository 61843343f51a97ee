"""Reads a row of a data set as a conversation: its messages, its tools, and which messages may be trained.

A row has one of three forms:

    messages: [{role, content, …}, …]        every message may be trained
    conversations: [{from, value}, …]        the same as ShareGPT writes it; `from` is human, gpt, system or tool
    prompt, completion                       only the completion may be trained; each is a `str`, a message or a list of messages

A prompt that is a `str` is a user's message, a completion that is a `str` is an assistant's. `tools` (or `tool_defs`) is a list of
functions in OpenAI's or verifiers' form. Data sets may hold lists and mappings as JSON; they are read as well. Pure: knows no
tokens, no templates and no files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from rlx.json_values import one_text

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
AS_SYSTEM = "developer"  # OpenAI's name for the system's role since 2024
SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool"}
OTHER_FORMS = {  # of a part: columns that are read in its place where a row has them
    "prompt": ("messages", "conversations"),
    "completion": ("messages", "conversations"),
    "conversations": ("messages",),
}
IMAGES = ("images", "image")  # columns of data sets for models that see
PARTS = ("text", "input_text", "output_text")  # types of content parts that are text


class RowError(ValueError):
    """A row that cannot be trained on. The message says why; it does not know the row's index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What one row says.

    `messages` have the form that chat templates read: `role`, `content` (a `str`), and if given `reasoning_content`, `tool_calls` (their
    arguments as JSON), `tool_call_id`, `name`.
    """

    messages: list[Message]
    first: int  # index of the first message that may be trained; those before it are context
    tools: list[dict[str, Any]] | None  # functions in OpenAI's form; None: no tools


def read_conversation(row: Mapping[str, Any], *, fills: bool = False, columns: Mapping[str, str] | None = None) -> Conversation:
    """The conversation of a row. Raises RowError. `columns`: the columns of its parts, where they have other names.

    `fills`: the row's file has one set of columns for all rows (Parquet), so a mapping may have keys of other rows, with None. These are
    removed, also from the arguments of tool calls. A JSONL row has only its own keys, so its arguments stay as they are; so do tools and
    calls that are JSON texts, which no file fills in.
    """
    row = _without_none(row) if fills else row
    if absent := [column for column in (columns or {}).values() if column not in row]:
        raise RowError(f"it has no column {', '.join(absent)}; it has {', '.join(sorted(row)) or 'nothing'}")
    if columns:  # a part with a column of its own counts, not another form that the row has, too
        hidden = {form for part in columns for form in OTHER_FORMS.get(part, ())} - columns.keys()
        row = {name: value for name, value in row.items() if name not in hidden} | {part: row[column] for part, column in columns.items()}
    if seen := [name for name in IMAGES if row.get(name)]:
        raise RowError(f"its column `{seen[0]}` has images; only text can be trained")
    messages, first = _messages_of(row)
    if not messages:
        raise RowError("it has no messages")
    read = [read_message(message) for message in messages]
    for message in messages[first:]:
        if message.get("role") == "assistant" and message.get("weight") not in (None, 1):
            raise RowError(
                f"an answer has `weight` {message['weight']}, and every answer behind the prompt is trained alike; to train only some, "
                "give the row a `prompt`, which is not trained, and a `completion`"
            )
    tools = row.get("tools") if row.get("tools") is not None else row.get("tool_defs")
    if tools is None and row.get("functions"):
        raise RowError("it has `functions`, the older form of tools; write them as `tools` in OpenAI's form")
    return Conversation(messages=read, first=first, tools=_tools(tools))


def _messages_of(row: Mapping[str, Any]) -> tuple[list[Any], int]:
    """The messages of a row as they stand there, and how many of them are the prompt."""
    if row.get("messages") is not None:
        return _listed(row["messages"], "assistant", "messages"), 0
    if row.get("conversations") is not None:
        return [_shared(turn) for turn in _listed(row["conversations"], "assistant", "conversations")], 0
    if row.get("prompt") is None or row.get("completion") is None:
        has = ", ".join(sorted(key for key, value in row.items() if value is not None)) or "nothing"
        raise RowError(f"it needs `messages`, `conversations`, or `prompt` and `completion`; it has {has}. Other names: data.columns")
    prompt = _listed(row["prompt"], "user", "prompt")
    return prompt + _listed(row["completion"], "assistant", "completion"), len(prompt)


def _listed(value: Any, role: str, column: str) -> list[Any]:
    """A column as a list of messages. A `str` that is JSON of messages is read; any other, also other JSON, is a message of `role`."""
    if isinstance(value, str):
        decoded = _from_json(value) if value.lstrip().startswith("[") else None
        if column in ("messages", "conversations"):
            if not isinstance(decoded, list):
                raise RowError(f"`{column}` is a text; it must be a list of messages, or that as JSON")
            return decoded
        return decoded if _are_messages(decoded) else [{"role": role, "content": value}]
    if isinstance(value, Mapping):
        return [value]
    if not isinstance(value, list | tuple):
        raise RowError(f"`{column}` is of type {type(value).__name__}; it must be a list of messages")
    return [{"role": role, "content": each} if isinstance(each, str) else each for each in value]


def _shared(turn: Any) -> Any:
    """A turn of ShareGPT as a message; one that is a message already stays."""
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn
    if turn["from"] not in SHAREGPT:
        raise RowError(f"a turn is `from` {turn['from']!r}; known are {', '.join(SHAREGPT)}. Write calls as `tool_calls` of `messages`")
    return {"role": SHAREGPT[turn["from"]], "content": turn.get("value")}


def _are_messages(value: Any) -> TypeGuard[list[Any]]:
    known = (*ROLES, AS_SYSTEM)
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) and each.get("role") in known for each in value)


def read_message(message: Any, *, fills: bool = False) -> Message:
    """A message in the form that chat templates read. Raises RowError. `fills`: see `read_conversation`."""
    message = _without_none(message) if fills else message
    if not isinstance(message, Mapping):
        raise RowError(f"a message is of type {type(message).__name__}; it must be a mapping with `role` and `content`")
    role = "system" if message.get("role") == AS_SYSTEM else message.get("role")
    if role not in ROLES:
        raise RowError(f"a message has the role {role!r}; known are {', '.join(ROLES)} and {AS_SYSTEM}")
    read: Message = {"role": role, "content": _text(message.get("content"))}
    if message.get("function_call"):
        raise RowError("a message has `function_call`, the older form of a call; write it as `tool_calls` in OpenAI's form")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not reasoning and isinstance(message.get("thinking"), str):
        reasoning = message["thinking"]
    if reasoning:
        if not isinstance(reasoning, str):
            raise RowError(f"`reasoning_content` is of type {type(reasoning).__name__}; it must be a text")
        read["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        if role != "assistant":
            raise RowError(f"a message of role {role} has `tool_calls`")
        read["tool_calls"] = [_call(call) for call in _decoded(calls, "tool_calls")]
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            read[key] = message[key]
    return read


def _text(content: Any) -> str:
    """The content of a message as one text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RowError(f"the `content` of a message is of type {type(content).__name__}; it must be a text, or parts of type text")
    for part in content:
        if not isinstance(part, str) and not (isinstance(part, Mapping) and part.get("type") in PARTS):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RowError(f"a message has content of type {kind!r}; only text can be trained")
    return one_text(part if isinstance(part, str) else part.get("text") or "" for part in content)


def _call(call: Any) -> dict[str, Any]:
    """A tool call in OpenAI's form. The flat form of verifiers (`id`, `name`, `arguments`) is read, too."""
    call = _decoded(call, "a tool call")
    function = call.get("function") if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else call
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError("a tool call has no name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        if arguments is not None and not isinstance(arguments, Mapping):
            raise RowError(f"the arguments of a call of {function['name']} are of type {type(arguments).__name__}; they must be a mapping")
        arguments = json.dumps(dict(arguments or {}), ensure_ascii=False)
    read = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return read | ({"id": call["id"]} if call.get("id") is not None else {})


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = [_tool(_decoded(tool, "a tool")) for tool in _decoded(value, "tools") or ()]
    return tools or None


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise RowError(f"a tool is of type {type(tool).__name__}; it must be a function in OpenAI's form")
    tool = dict(tool)
    if isinstance(tool.get("function"), Mapping):
        function = dict(tool["function"])
    else:
        function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    if not isinstance(function.get("name"), str):
        raise RowError("a tool has no name")
    if "parameters" in function:
        function["parameters"] = _decoded(function["parameters"], "the parameters of a tool")
    return {"type": "function", "function": function}


def _decoded(value: Any, what: str) -> Any:
    """A value that a data set may hold as JSON. Raises RowError for a `str` that is none."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    decoded = _from_json(value)
    if decoded is None:
        raise RowError(f"{what} is a text that is not JSON: {value[:80]!r}")
    return decoded


def _from_json(text: str) -> Any:
    """The decoded text, or None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _without_none(value: Any) -> Any:
    """The value without keys whose value is None, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_without_none(inner) for inner in value]
    return value
