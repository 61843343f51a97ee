"""One rollout as lines of text: its facts, and its conversation with tools. Shared by the terminal browser and the plain commands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlx.terminal import shown

IN_WORDS = {
    "max_turns_reached": "the environment's last turn was played (max_turns_reached)",
    "no_tools_called": "ended by an answer without a call (no_tools_called)",
}
"""Stop conditions whose names read like errors."""


def printable(text: str) -> str:
    """The text as `shown` leaves it, with spaces for tabs, so that its length is its width."""
    return shown(text).replace("\t", "    ")


@dataclass(frozen=True, slots=True)
class Message:
    """One message, or one part of it, of the conversation."""

    role: str  # "user", "assistant", "tool", …; "" for environments without chat
    text: str
    part: str = ""  # "" for what was said; "reasoning", "call" for the others
    sampled: bool = False  # whether it belongs to the completion and the policy said it

    @property
    def head(self) -> str:
        return f"{self.role} ({self.part})" if self.part else self.role


def facts(record: Mapping[str, Any]) -> str:
    """The line over a rollout: `math, example 3   reward 1.000   advantage -0.500   4 tokens, stop`."""
    advantage = "" if record.get("advantage") is None else f"   advantage {record['advantage']:+.3f}"
    reward = "no reward" if record.get("reward") is None else f"reward {record['reward']:.3f}"
    tokens = "" if record.get("num_tokens") is None else f"{record['num_tokens']} tokens, "
    head = f"{record.get('env')}, example {record.get('example_id')}"
    stop = record.get("stop") or "no stop condition"
    return f"{head}   {reward}{advantage}   {tokens}{IN_WORDS.get(stop, stop)}"


def more_facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Further facts of a rollout, as names and texts. Facts that were not recorded are left out."""
    found: list[tuple[str, str]] = []
    for name in ("rewards", "metrics"):
        if values := record.get(name):
            found.append((name, numbers(values) if isinstance(values, Mapping) else as_text(values)))
    played = []
    if record.get("group") is not None:
        played.append(f"group {record['group']}, member {record.get('member')}")
    if versions := record.get("versions"):
        played.append(f"policy version {', '.join(map(str, versions))}")
    if record.get("num_turns") is not None:
        played.append(f"{record['num_turns']} turn{'s' if record['num_turns'] != 1 else ''}")
    if record.get("seconds") is not None:
        seconds = record["seconds"]
        played.append(f"{seconds:.2f} s" if isinstance(seconds, int | float) else as_text(seconds))
    if record.get("truncated"):
        played.append("cut by a length limit")
    if played:
        found.append(("played", " · ".join(played)))
    if record.get("answer") not in (None, ""):
        found.append(("answer", as_text(record["answer"])))
    if record.get("left_out"):
        found.append(("left out", f"by {record['left_out']}"))
    if record.get("error"):
        found.append(("error", as_text(record["error"])))
    return found


def numbers(values: Mapping[str, Any]) -> str:
    """`exact 1 · format 0.25`."""
    return " · ".join(f"{name} {value:.4g}" if isinstance(value, int | float) else f"{name} {value}" for name, value in values.items())


def conversation(record: Mapping[str, Any]) -> list[Message]:
    """Prompt and completion, message by message."""
    return [*_messages(record.get("prompt"), sampled=False), *_messages(record.get("completion"), sampled=True)]


def _messages(messages: Any, sampled: bool) -> Iterator[Message]:
    if isinstance(messages, str):
        yield Message("", messages, sampled=sampled)
        return
    for message in messages if isinstance(messages, list) else [] if messages is None else [messages]:
        if not isinstance(message, Mapping):
            yield Message("", as_text(message), sampled=sampled)
            continue
        role = str(message.get("role"))
        spoken = sampled and role == "assistant"
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            yield Message(role, as_text(reasoning), "reasoning", spoken)
        content, calls = message.get("content"), message.get("tool_calls") or []
        if content or not (calls or reasoning):
            yield Message(role, as_text(content), sampled=spoken)
        for call in calls if isinstance(calls, list) else [calls]:
            yield Message(role, _call(call), "call", spoken)


def _call(call: Any) -> str:
    """`search(query="…")`, from either form in which calls are written down."""
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except ValueError:
            return call
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or "name" not in inner:
        return as_text(call)
    arguments = inner.get("arguments", "")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return f"{inner['name']}({arguments})"
    if isinstance(arguments, Mapping):
        return f"{inner['name']}({', '.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in arguments.items())})"
    return f"{inner['name']}({arguments})"


def as_text(content: Any) -> str:
    """A message's content: text, or a list of parts."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return "\n".join(str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]" for part in content)
    return json.dumps(content, ensure_ascii=False)


def plain(record: Mapping[str, Any]) -> str:
    """A rollout for a terminal that can only print."""
    where = f"step {record['step']}   " if record.get("step", -1) >= 0 else ""
    more = "".join(f"\n  {name}: {value}" for name, value in more_facts(record))
    said = [f"  {message.head}: {message.text}" if message.role else f"  {message.text}" for message in conversation(record)]
    return printable("\n".join([where + facts(record) + more, *said]))
