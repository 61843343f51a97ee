"""What a teacher says in the environments of a run: the rows of its warm start, made where each environment is installed.

    PYTHON rlx/envs/boot.py demonstrations < {"envs": [{"key": "math", "name": "math", "id": "rlx-math", …, "count": 64, "seed": 0}]}

answers on its standard output, one JSON object a line: `{"key": "math", "said": [{"prompt", "completion", "tools"}, …]}`, or a `problem`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import msgspec

from rlx.config.pythons import python_of
from rlx.config.schema import Config, EnvConfig, PlayRoot
from rlx.data.demonstrations import choose, counts_by_weight
from rlx.envs import boot
from rlx.envs.answers import Conversation, conversations
from rlx.envs.kinds import kind_of
from rlx.envs.load import load_one, settings_of
from rlx.envs.probe import answer_requests
from rlx.envs.wire import Settings


def demonstrations_of(config: PlayRoot, envs: Mapping[str, EnvConfig]) -> dict[str, list[Conversation]]:
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
        entry = {"key": name, "name": name, "env": about, "settings": asdict(settings_of(config, env)), "count": counts[name]}
        if counts[name]:
            entry |= {"seed": settings.seed, "teacher_error": settings.teacher_error}
            asked.setdefault(python_of(env.id, env.python) or sys.executable, []).append(entry)
    answers = {answer["key"]: answer for python, entries in asked.items() for answer in _ask(python, entries)}
    if problems := [answer["problem"] for answer in answers.values() if "problem" in answer]:
        raise ValueError(problems[0])
    return {
        name: [Conversation(prompt=one["prompt"], played=one["completion"], tools=one["tools"]) for one in answers[name]["said"]]
        for name in envs
        if name in answers
    }


def _ask(python: str, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    command = [python, boot.__file__, "demonstrations"]
    env, request = boot.environment(another=python != sys.executable), json.dumps({"envs": entries})
    done = subprocess.run(command, env=env, input=request, stdout=subprocess.PIPE, text=True, check=False)
    found = [answer for answer in map(json.loads, done.stdout.splitlines()) if "key" in answer]
    if len(found) < len(entries):
        names = ", ".join(entry["name"] for entry in entries[len(found) :])
        raise RuntimeError(f"no demonstrations of {names} for the warm start: {python} ended with exit code {done.returncode}; see above")
    return found


def answer(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one entry of a request."""
    name, config = entry["name"], msgspec.convert(entry["env"], EnvConfig)
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
    return {"key": entry["key"], "said": [conversation.row for conversation in said]}


def main() -> None:
    """Answer the request on the standard input."""
    answer_requests(answer)
