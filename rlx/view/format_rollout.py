"""One rollout as text: its facts, and its conversation with tools. Shared by the terminal browser and the plain commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlx.terminal import shown


def printable(text: str) -> str:
    """The text as `shown` leaves it, with spaces for tabs, so that its length is its width."""
    return shown(text).replace("\t", "    ")


@dataclass(frozen=True, slots=True)
class ShownMessage:
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
    return f"{head}   {reward}{advantage}   {tokens}{record.get('stop') or 'no stop condition'}"


def more_facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Further facts of a rollout, as names and texts. Facts that were not recorded are left out."""
    found = {name: _numbers(record.get(name)) for name in ("rewards", "metrics")}
    played = []
    if record.get("group") is not None:
        played.append(f"group {record['group']}, member {record.get('member')}")
    if record.get("versions"):
        played.append(f"policy version {', '.join(map(str, record['versions']))}")
    if record.get("num_turns") is not None:
        played.append(f"turns {record['num_turns']}")
    if record.get("seconds") is not None:
        played.append(_numbers({"seconds": record["seconds"]}))
    if record.get("truncated"):
        played.append("cut by a length limit")
    found |= {"sampled": " · ".join(played), "answer": as_text(record.get("answer"))}
    found |= {"left out by": as_text(record.get("left_out")), "error": as_text(record.get("error"))}
    return [(name, text) for name, text in found.items() if text]


def _numbers(values: Any) -> str:
    """`exact 1 · format 0.25`."""
    if not isinstance(values, Mapping):
        return as_text(values)
    return " · ".join(f"{name} {value:.4g}" if isinstance(value, int | float) else f"{name} {value}" for name, value in values.items())


def conversation(record: Mapping[str, Any]) -> list[ShownMessage]:
    """Prompt and completion, message by message."""
    return [*_messages(record.get("prompt"), sampled=False), *_messages(record.get("completion"), sampled=True)]


def _messages(messages: Any, sampled: bool) -> Iterator[ShownMessage]:
    if isinstance(messages, str):
        yield ShownMessage("", messages, sampled=sampled)
        return
    for message in messages if isinstance(messages, list) else [] if messages is None else [messages]:
        if not isinstance(message, Mapping):
            yield ShownMessage("", as_text(message), sampled=sampled)
            continue
        role = str(message.get("role"))
        by_policy = sampled and role == "assistant"
        if reasoning := message.get("reasoning_content") or message.get("reasoning"):
            yield ShownMessage(role, as_text(reasoning), "reasoning", by_policy)
        content, calls = message.get("content"), message.get("tool_calls") or []
        if content or not (calls or reasoning):
            yield ShownMessage(role, as_text(content), sampled=by_policy)
        for call in calls if isinstance(calls, list) else [calls]:
            yield ShownMessage(role, _call(call), "call", by_policy)


def _call(call: Any) -> str:
    """`search({"query": "…"})`, from either form in which calls are written down."""
    with contextlib.suppress(ValueError):
        call = json.loads(call) if isinstance(call, str) else call
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or "name" not in inner:
        return as_text(call)
    return f"{inner['name']}({as_text(inner.get('arguments'))})"


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
