"""What a teacher says in environments: the rows of the warm start, made where each environment is installed.

    PYTHON rlx/envs/boot.py demonstrations < {"envs": [{"key": "math", "name": "math", "id": "rlx-math", …, "count": 64, "seed": 0}]}

answers on its standard output, one JSON object a line: `{"key": "math", "said": [{"prompt", "completion", "tools"}, …]}`, or a `problem`.

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
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import msgspec

from rlx.config.pythons import python_of
from rlx.config.schema import Config, EnvConfig, PlayRoot
from rlx.data.demonstrations import choose, counts_by_weight
from rlx.envs import boot
from rlx.envs.base import settings_of
from rlx.envs.kinds import kind_of, load_one
from rlx.envs.local import LocalEnvironment
from rlx.envs.messages import text_of
from rlx.envs.probe import answer_requests
from rlx.envs.wire import Settings
from rlx.policy.base import Message


class DemoConversation(msgspec.Struct, kw_only=True):
    """What the teacher says in one row."""

    prompt: list[Message]
    played: list[Message] = msgspec.field(name="completion")  # after the prompt
    tools: list[dict[str, Any]] | None  # functions in OpenAI's form

    @property
    def row(self) -> dict[str, Any]:
        """The conversation as a row for `rlx sft`."""
        return msgspec.to_builtins(self)


def demonstrations_of(config: PlayRoot, envs: Mapping[str, EnvConfig]) -> dict[str, list[DemoConversation]]:
    """The conversations by environment. Each of `envs` gets its share of `model.warm_start.num_examples`.

    Raises ValueError for an environment that has none, RuntimeError if a process fails; its own message is on the standard error then.
    """
    settings = config.model.warm_start
    assert settings is not None
    counts = counts_by_weight(settings.num_examples, {name: env.weight for name, env in envs.items()})
    asked: dict[str, list[dict[str, Any]]] = {}
    for name, env in envs.items():
        about = {field.name: msgspec.to_builtins(getattr(env, field.name)) for field in fields(EnvConfig) if field.name != "sampling"}
        if not isinstance(config, Config):
            about["split"] = "train"  # the model is the same for every command
        entry = {"key": name, "env": about, "settings": asdict(settings_of(config, env)), "count": counts[name]}
        if counts[name]:
            entry |= {"seed": settings.seed, "teacher_error": settings.teacher_error}
            asked.setdefault(python_of(env.id, env.python) or sys.executable, []).append(entry)
    found: dict[str, list[DemoConversation]] = {}
    for python, entries in asked.items():
        for reply in _ask(python, entries):
            if "problem" in reply:
                raise ValueError(reply["problem"])
            found[reply["key"]] = msgspec.convert(reply["said"], list[DemoConversation])
    return {name: found[name] for name in envs if name in found}


def _ask(python: str, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    command = [python, boot.__file__, "demonstrations"]
    env, request = boot.environment(another=python != sys.executable), json.dumps({"envs": entries})
    done = subprocess.run(command, env=env, input=request, stdout=subprocess.PIPE, text=True, check=False)
    found = [reply for reply in map(json.loads, done.stdout.splitlines()) if "key" in reply]
    if len(found) < len(entries):
        names = ", ".join(entry["key"] for entry in entries[len(found) :])
        raise RuntimeError(f"no demonstrations of {names} for the warm start: {python} ended with exit code {done.returncode}; see above")
    return found


def answer(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one entry of a request."""
    name, config = entry["key"], msgspec.convert(entry["env"], EnvConfig)
    try:
        environment = load_one(name, config, Settings(**entry["settings"]))
        if kind_of(config.id) != "classic" and not any(row.get("demonstration") or environment.answer_of(row) for row in environment.rows):
            raise ValueError(
                f"envs.{name}: the warm start (model.warm_start) learns from answers, and no row of {config.id} has a field `answer` with "
                "a text; choose a model that is trained already"
            )
        rows = choose(environment.rows, entry["count"], entry["seed"])
        said = conversations(environment, rows, entry["teacher_error"], entry["seed"])
    except ValueError as error:
        return {"key": entry["key"], "problem": str(error)}
    return {"key": entry["key"], "said": msgspec.to_builtins(said)}


def conversations(
    environment: LocalEnvironment, rows: Sequence[Mapping[str, Any]], teacher_error: float, seed: int
) -> list[DemoConversation]:
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
        DemoConversation(
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


def main() -> None:
    """Answer the request on the standard input."""
    answer_requests(answer)
