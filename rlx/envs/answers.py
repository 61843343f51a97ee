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

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def conversations(environment: Any, rows: Sequence[Mapping[str, Any]], teacher_error: float, seed: int) -> list[Conversation]:
    """One conversation per row, in their order. `environment`: as `rlx.envs.load.load_one` returns it, classic or v1.

    The same arguments give the same conversations. Raises ValueError for an environment whose prompts are raw text.
    """
    if any(is_raw(environment, row) for row in rows):
        raise ValueError(
            f"envs.{environment.name}: the warm start (model.warm_start) learns conversations, and the prompts of this environment are raw "
            'text (message_type="completion", or a prompt that is a str); choose a model that is trained already'
        )
    state = random.Random(f"{seed}/{environment.name}")
    return [
        Conversation(
            prompt=messages_of(row),
            played=played(environment, row, state.random() < teacher_error, random.Random(f"{seed}/{environment.name}/{index}")),
            tools=tools_of(environment, row),
        )
        for index, row in enumerate(rows)
    ]


def played(environment: Any, row: Mapping[str, Any], errs: bool, state: random.Random) -> list[Message]:
    """The messages after the row's prompt. Raises ValueError if the environment's own teacher returns something else than messages."""
    teacher = getattr(child_of(environment.env, row), "demonstration", None)
    said = teacher(row, errs, state) if teacher is not None else None
    if said is None:
        answer = None if errs else answer_text(environment, row)
        return [{"role": "assistant", "content": last_question(row) if answer is None else answer}]
    if not (isinstance(said, list) and said and all(isinstance(m, dict) and "role" in m for m in said) and said[-1]["role"] == "assistant"):
        raise ValueError(
            f"envs.{environment.name}: `demonstration` must return a list of messages that ends with the assistant's, or None; got {said!r}"
        )
    return [{**message, "content": text_of(message.get("content"))} for message in said]


def answer_text(environment: Any, row: Mapping[str, Any]) -> str | None:
    """The answer in the form that the environment's parser reads; None if the row has no answer.

    A reasoning-gym row holds the index of an entry, and the entry holds the answer. An XML parser needs its tags.
    """
    env = child_of(environment.env, row)
    if not _is_a(env, "Environment"):  # a v1 taskset, or a reward function over rows
        task = row.get("task")
        answer = (task if isinstance(task, Mapping) else row).get("answer")
        return answer if isinstance(answer, str) and answer else None
    answer = row.get("answer")
    if (entries := getattr(env, "rg_dataset", None)) is not None:  # vf.ReasoningGymEnv; other environments do not import reasoning-gym
        answer = entries[int(row["answer"])]["answer"]
    if not isinstance(answer, str) or not answer:
        return None
    parser = env.parser
    if _is_a(parser, "XMLParser") and len(parser.get_fields()) == 1:
        return parser.format(**{parser.get_fields()[0]: answer})
    return answer


def last_question(row: Mapping[str, Any]) -> str:
    """The text that a copying teacher repeats: the last user message, or the whole prompt if it is a `str`."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    questions = [message for message in prompt if message["role"] == "user"] or prompt
    content = questions[-1]["content"]
    return text_of(content)


def messages_of(row: Mapping[str, Any]) -> list[Message]:
    """The prompt of a row as messages, in the form in which the policy gets them."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{**message, "content": text_of(message.get("content"))} for message in prompt]


def is_raw(environment: Any, row: Mapping[str, Any]) -> bool:
    """Whether the policy is asked with raw text in this row, as `rlx.envs.verifiers_client` does it."""
    env, prompt = child_of(environment.env, row), row["prompt"]
    if not _is_a(env, "Environment"):  # a v1 taskset
        return False
    return env.message_type == "completion" or isinstance(prompt, str) or prompt[0]["role"] == "text"


def tools_of(environment: Any, row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The functions that the environment offers in this row, in OpenAI's form; None if there are none."""
    env = child_of(environment.env, row)
    if not _is_a(env, "Environment"):
        return [dict(tool) for tool in environment.tools] or None
    from rlx.envs.verifiers_client import function_of

    asked = info_of(row).get("tool_defs", env.tool_defs)
    return [function_of(tool) for tool in env._normalize_tool_defs(asked) or []] or None


def child_of(env: Any, row: Mapping[str, Any]) -> Any:
    """The environment that plays this row: in an EnvGroup the child that the row names, or its child in turn; otherwise `env`."""
    route = info_of(row).get("env_id") if _is_a(env, "EnvGroup") else None
    names = [route] if isinstance(route, str) else list(route or ())
    for name in names:
        assert _is_a(env, "EnvGroup"), (names, env.env_id)
        env = env.env_map[name]
    return env


def info_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The column `info` of a row; data sets may hold it as JSON."""
    info = row.get("info") or {}
    return json.loads(info) if isinstance(info, str) else info


def _is_a(thing: Any, kind: str) -> bool:
    """Whether it is of a class of classic verifiers. Verifiers 0.4 has none of them, and a reward function needs no verifiers."""
    found = getattr(sys.modules.get("verifiers"), kind, None)
    return found is not None and isinstance(thing, found)
