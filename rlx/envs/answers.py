"""What a teacher says in an environment: the conversations that the warm start learns from.

An environment may bring its own teacher: a method `demonstration` of the object that its `load_environment` returns.

    def demonstration(self, row, errs, random): ...

- `row`: the row that is played. `errs`: whether this teacher is to fail, with probability `model.warm_start.teacher_error`; a good one
  fails as a beginner does, in the right form. `random`: a `random.Random` of this row; take all chance from it.
- It returns the messages after the row's prompt, in OpenAI's form: the assistant's messages, which are trained, and between them those of
  the environment (role `user` or `tool`), which are context. The last message is the assistant's.

      [{"role": "assistant", "content": "", "tool_calls": [
           {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 2, "y": 3}'}}]},
       {"role": "tool", "tool_call_id": "a", "content": "5"},
       {"role": "assistant", "content": "The sum is 5."}]

- None: it has nothing to say about this row. Then, and in environments without a teacher, the teacher answers once: with the row's right
  answer, or a copy of the question if it errs or the answer is not known.

The tools of the environment stand in the prompt, as they do for the policy.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.envs.local import LocalEnvironment
from rlx.envs.messages import text_of
from rlx.policy.base import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What the teacher says in one row."""

    prompt: list[Message]
    played: list[Message]  # after the prompt
    tools: list[dict[str, Any]] | None  # functions in OpenAI's form

    @property
    def row(self) -> dict[str, Any]:
        """The conversation as a row for `rlx sft`."""
        return {"prompt": self.prompt, "completion": self.played, "tools": self.tools}


def conversations(environment: LocalEnvironment, rows: Sequence[Mapping[str, Any]], teacher_error: float, seed: int) -> list[Conversation]:
    """One conversation per row, in their order.

    The same arguments give the same conversations. Raises ValueError for an environment whose prompts are raw text.
    """
    if any(environment.is_raw(row) for row in rows):
        raise ValueError(
            f"envs.{environment.name}: the warm start (model.warm_start) learns conversations, and the prompts of this environment are raw "
            'text (message_type="completion", or a prompt that is a str); choose a model that is trained already'
        )
    state = random.Random(f"{seed}/{environment.name}")
    return [
        Conversation(
            prompt=messages_of(row),
            played=played(environment, row, state.random() < teacher_error, random.Random(f"{seed}/{environment.name}/{index}")),
            tools=environment.tools_of(row) or None,
        )
        for index, row in enumerate(rows)
    ]


def played(environment: LocalEnvironment, row: Mapping[str, Any], errs: bool, state: random.Random) -> list[Message]:
    """The messages after the row's prompt. Raises ValueError if the environment's own teacher returns something else than messages."""
    said = environment.demonstration(row, errs, state)
    if said is None:
        answer = None if errs else environment.answer_of(row)
        return [{"role": "assistant", "content": last_question(row) if answer is None else answer}]
    if not (isinstance(said, list) and said and all(isinstance(m, dict) and "role" in m for m in said) and said[-1]["role"] == "assistant"):
        raise ValueError(
            f"envs.{environment.name}: `demonstration` must return a list of messages that ends with the assistant's, or None; got {said!r}"
        )
    return [{**message, "content": text_of(message.get("content"))} for message in said]


def last_question(row: Mapping[str, Any]) -> str:
    """The text that a copying teacher repeats: the last user message."""
    prompt = messages_of(row)
    return ([message for message in prompt if message["role"] == "user"] or prompt)[-1]["content"]


def messages_of(row: Mapping[str, Any]) -> list[Message]:
    """The prompt of a row as messages, in the form in which the policy gets them."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{**message, "content": text_of(message.get("content"))} for message in prompt]
