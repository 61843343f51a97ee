"""Describes an environment for people: arguments, rewards, tools, agents. `rlx env info` shows it."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from rlx.config.signatures import OWN_KINDS, module_of
from rlx.envs.probe_cache import ProbedItem

MAX_CHARS = 400  # characters of a text that are shown


def source(env_id: str, kind: str) -> dict[str, Any]:
    """What an environment's module says, as fields of `Probed`."""
    arguments: Iterable[ProbedItem]
    if kind == "v1":
        from verifiers.v1.utils.loaders import taskset_config_type

        taskset = taskset_config_type(env_id)
        module, arguments = sys.modules[taskset.__module__], _fields(taskset)
    else:
        module = importlib.import_module(env_id if env_id in OWN_KINDS else module_of(env_id))
        arguments = {entry.name: entry for entry in _arguments(module)}.values()
    return {"doc": paragraph(inspect.getdoc(module) or ""), "arguments": tuple(arguments)}


def loaded(kind: str, env: Any) -> dict[str, Any]:
    """What a loaded environment says, as fields of `Probed`."""
    functions = [tool["function"] for tool in env.tools]
    tools = tuple(ProbedItem(name=str(one["name"]), doc=paragraph(str(one.get("description") or ""))) for one in functions)
    found = {"examples": len(env.rows), "tools": tools, "scores_groups": env.scores_groups, "prompt": _prompt(env.rows)}
    return found | {"v1": _v1, "classic": _classic}.get(kind, lambda env: {})(env)


def _arguments(module: Any) -> Iterator[ProbedItem]:
    """Those of `load_environment`, and of the records that it passes its further arguments to, in rlx's own kinds."""
    takers = [module.load_environment, *([module.Tasks] if hasattr(module, "Tasks") else [])]
    for taker in takers:
        documented = arguments_in(inspect.getdoc(taker) or "")
        for name, parameter in inspect.signature(taker).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and len(takers) > 1:
                continue
            default = None if parameter.default is parameter.empty else repr(parameter.default)[:MAX_CHARS]
            yield ProbedItem(name=name, type=_type_of(parameter.annotation), default=default, doc=documented.get(name, ""))


def _fields(taskset: Any) -> Iterator[ProbedItem]:
    """Those of a v1 taskset."""
    for name, field in taskset.model_fields.items():
        if name not in ("id", "task"):
            default = None if field.is_required() else repr(field.get_default(call_default_factory=True))[:MAX_CHARS]
            yield ProbedItem(name=f"taskset.{name}", type=_type_of(field.annotation), default=default, doc=field.description or "")


def _classic(env: Any) -> dict[str, Any]:
    from rlx.envs.verifiers_v0 import leaves

    players = list({id(one): one for one in leaves(env.env)}.values())
    rewards = dict.fromkeys(reward for one in players for reward in _rewards_of(one.rubric))
    return {"type": ", ".join(dict.fromkeys(type(one).__name__ for one in players)), "rewards": tuple(rewards)}


def _rewards_of(rubric: Any) -> Iterator[ProbedItem]:
    functions, weights = rubric._get_reward_funcs(), rubric._get_reward_weights()
    for name, function, weight in zip(rubric._get_reward_func_names(), functions, weights, strict=True):
        yield ProbedItem(name=name, doc=paragraph(inspect.getdoc(function) or ""), weight=float(weight))


def _v1(env: Any) -> dict[str, Any]:
    from rlx.envs.verifiers_v1_boxes import hooks

    rewards = []
    for one in hooks(type(env.env.taskset).task_type()):
        if hasattr(one, "reward") or hasattr(one, "metric"):
            weight = float(getattr(one, "_vf_weight", 1.0)) if hasattr(one, "reward") else 0.0
            rewards.append(ProbedItem(name=one.__name__, doc=paragraph(inspect.getdoc(one) or ""), weight=weight))
    agents = tuple(ProbedItem(name=name, doc="trains" if name in env.agents else "does not train") for name in env.env._agent_specs)
    return {"type": type(env.env).__name__, "rewards": tuple(rewards), "agents": agents}


# texts


def paragraph(text: str) -> str:
    """The first paragraph of a docstring in one line."""
    return " ".join(text.strip().split("\n\n")[0].split())[:MAX_CHARS]


def arguments_in(doc: str) -> dict[str, str]:
    """What a docstring says of each argument, below `Args:` or `Parameters:`."""
    section = re.search(r"^(?:Args|Arguments|Parameters):\n(.*?)(?=^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    one = r"^ {4}\**(\w+)(?:\s*\([^)]*\))?:(.*(?:\n {5,}.*)*)"
    return {name: " ".join(said.split()) for name, said in re.findall(one, section[1] if section else "", re.MULTILINE)}


def _type_of(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", None) or str(annotation)


def _prompt(rows: Any) -> str:
    """The first example's prompt, in one line for each message."""
    prompt = rows[0].get("prompt") or ""
    if isinstance(prompt, str):
        return prompt[:MAX_CHARS]
    return "\n".join(f"{one.get('role')}: {' '.join(str(one.get('content')).split())[:MAX_CHARS]}" for one in prompt)
