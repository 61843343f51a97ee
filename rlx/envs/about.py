"""Loads an environment and describes it for people: arguments, data, rewards, tools, what it needs. `rlx env info` shows it.

    python -m rlx.envs.about < {"envs": [{"key": "0", "name": "custom", "id": "rlx-math", "args": {}}]}

answers like `rlx.envs.probe`: `{"loading": "0"}`, then `{"key": "0", "about": {…}}` with the fields of `About`. The caller is
`rlx.preflight.probes`. An environment that cannot be loaded is described as far as its source allows.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from rlx.config.schema_rollout import EnvConfig
from rlx.config.signatures import locate, module_of
from rlx.envs.kinds import kind_of
from rlx.envs.probe import answer_requests, config_of, probe, why
from rlx.envs.probed import About, Entry

LONGEST = 400  # characters of a text that are shown
NAME = "custom"


def about(config: EnvConfig) -> About:
    """Load one environment and describe it. Never raises because of the environment. Call it on the main thread."""
    found = About()
    try:
        found = replace(found, kind=kind_of(config.id))
        found = {"v1": _v1, "classic": _classic}.get(found.kind, _own)(config, found)
        return found if found.needs else _checked(config, found)
    except KeyboardInterrupt:
        raise
    except _Known as stopped:
        return stopped.about
    except BaseException as error:
        return _with_problem(config, found, error)


class _Known(Exception):
    """What was found out before loading failed."""

    def __init__(self, about: About) -> None:
        super().__init__()
        self.about = about


def _with_problem(config: EnvConfig, found: About, error: BaseException) -> About:
    told = why(NAME, config.id, error)
    return replace(found, problem=told.problem, fix=told.fix)


def _checked(config: EnvConfig, found: About) -> About:
    """With what the check before a run says of it."""
    probed = probe(NAME, config)
    return replace(found, problem=probed.problem, fix=probed.fix, prompt_chars=probed.prompt_chars)


# classic


def _classic(config: EnvConfig, found: About) -> About:
    module = importlib.import_module(module_of(config.id))
    load = getattr(module, "load_environment", None)
    if load is None:
        return found
    documented = arguments_in(inspect.getdoc(load) or "")
    arguments = tuple(
        Entry(
            name=name if parameter.kind is not parameter.VAR_KEYWORD else f"**{name}",
            type=_type_of(parameter.annotation),
            default=None if parameter.default is parameter.empty else repr(parameter.default)[:LONGEST],
            doc=documented.get(name, ""),
        )
        for name, parameter in inspect.signature(load).parameters.items()
        if parameter.kind is not parameter.VAR_POSITIONAL
    )
    arguments = tuple(replace(one, default="…") if one.name.startswith("**") else one for one in arguments)
    found = replace(found, arguments=arguments, doc=paragraph(inspect.getdoc(module) or inspect.getdoc(load) or ""))
    try:
        return _loaded_classic(config, found)
    except Exception as error:
        raise _Known(_with_problem(config, found, error)) from error


def _loaded_classic(config: EnvConfig, found: About) -> About:
    from rlx.envs.load import load_one
    from rlx.envs.verifiers_v0 import leaves
    from rlx.envs.wire import Settings

    env = load_one(NAME, config, Settings({}))
    inner = env.env  # type: ignore[attr-defined]
    players = list({id(one): one for one in leaves(inner)}.values())
    holds_out = inner.eval_dataset_source is not None or inner.eval_dataset is not None
    return replace(
        found,
        type=", ".join(dict.fromkeys(_class_of(one) for one in players)),
        examples=len(env.rows),
        eval_examples=len(inner.get_eval_dataset()) if holds_out else None,
        rewards=tuple(dict.fromkeys(reward for one in players for reward in _rewards_of(one.rubric))),
        tools=_tools(env),
        scores_groups=env.scores_groups,
        prompt=_text_of(env.rows[0].get("prompt")) if len(env.rows) else "",
    )


def _class_of(env: Any) -> str:
    """An environment's class, and verifiers' own one that it extends."""
    own = type(env)
    known = next((base for base in own.__mro__ if base.__module__.startswith("verifiers")), own)
    return own.__name__ if known is own else f"{own.__name__} ({known.__name__})"


def _rewards_of(rubric: Any) -> Iterator[Entry]:
    functions, weights = rubric._get_reward_funcs(), rubric._get_reward_weights()
    for name, function, weight in zip(rubric._get_reward_func_names(), functions, weights, strict=True):
        yield Entry(name=name, doc=paragraph(inspect.getdoc(function) or ""), weight=float(weight))


def _tools(env: Any) -> tuple[Entry, ...]:
    functions = [tool["function"] for tool in env.tools]
    return tuple(Entry(name=str(one["name"]), doc=paragraph(str(one.get("description") or ""))) for one in functions)


# rlx's own kinds


def _own(config: EnvConfig, found: About) -> About:
    from rlx.envs.function import Tasks

    load_environment = importlib.import_module(config.id).load_environment
    documented = arguments_in(inspect.getdoc(Tasks) or "") | arguments_in(inspect.getdoc(load_environment) or "")
    own = dict(inspect.signature(load_environment).parameters)
    del own["tasks"]
    parameters = {**own, **inspect.signature(Tasks).parameters, "data": own["data"]}
    arguments = tuple(
        Entry(
            name=name,
            type=_type_of(parameter.annotation),
            default=None if parameter.default is parameter.empty else repr(parameter.default),
            doc=documented.get(name, ""),
        )
        for name, parameter in parameters.items()
    )
    found = replace(
        found,
        arguments=arguments,
        doc=paragraph(inspect.getdoc(load_environment) or ""),
        type={"function": "reward function", "program": "programs", "gateway": "programs elsewhere"}[found.kind],
    )
    if (path := config.args.get("reward")) is None:
        raise _Known(found)  # there is nothing to load yet
    return replace(found, rewards=(Entry(name=str(path), doc=paragraph(inspect.getdoc(locate(str(path))) or ""), weight=1.0),))


# v1


def _v1(config: EnvConfig, found: About) -> About:
    from verifiers.v1.utils.loaders import taskset_config_type

    from rlx.envs.verifiers_v1 import V1Environment, fit, loaded, tasks_of, trained_agents
    from rlx.envs.verifiers_v1_boxes import hooks

    where = f"envs.{NAME}"
    kind = taskset_config_type(config.id)
    base = {"id", "task"}
    arguments = tuple(
        Entry(
            name=f"taskset.{name}",
            type=_type_of(field.annotation),
            default=None if field.is_required() else repr(field.get_default(call_default_factory=True))[:LONGEST],
            doc=" ".join((field.description or _attribute_doc(kind, name)).split()),
        )
        for name, field in kind.model_fields.items()
        if name not in base
    )
    module = importlib.import_module(module_of(config.id))
    found = replace(found, arguments=arguments, doc=paragraph(inspect.getdoc(module) or ""))
    try:
        env, chosen = loaded(where, config)
        tasks = tasks_of(where, env, config.num_tasks)
        kinds = type(env.taskset).task_type()
        found = replace(
            found,
            type=type(env).__name__,
            doc=found.doc or paragraph(inspect.getdoc(importlib.import_module(type(env.taskset).__module__)) or ""),
            examples=len(tasks),
            rewards=tuple(_judgements(hooks(kinds))),
            agents=tuple(Entry(name=name) for name in env._agent_specs),
            prompt=_text_of(tasks[0].data.prompt),
        )
        try:
            fit(where, env, config, chosen, tasks[0])
        except ValueError as error:
            return replace(found, needs=(str(error).removeprefix(f"{where}: "),))
        trained = trained_agents(where, env, config.agents)
        agents = tuple(Entry(name=one.name, doc="trains" if one.name in trained else "does not train") for one in found.agents)
        return replace(found, agents=agents, tools=_tools(V1Environment(NAME, env, tasks, trained, config, 60.0)))
    except Exception as error:
        raise _Known(_with_problem(config, found, error)) from error


def _judgements(functions: list[Any]) -> Iterator[Entry]:
    for one in functions:
        if hasattr(one, "reward") or hasattr(one, "metric"):
            weight = float(getattr(one, "_vf_weight", 1.0)) if hasattr(one, "reward") else 0.0
            yield Entry(name=one.__name__, doc=paragraph(inspect.getdoc(one) or ""), weight=weight)


def _attribute_doc(kind: type, name: str) -> str:
    """The text below a field of a class, as pydantic's users write it."""
    for base in kind.__mro__:
        if name not in vars(base).get("__annotations__", ()):
            continue
        try:
            lines = inspect.getsource(base)
        except (OSError, TypeError):
            return ""
        found = re.search(rf'^\s+{re.escape(name)}\s*:[^\n]*\n\s+"""(.*?)"""', lines, re.MULTILINE | re.DOTALL)
        return paragraph(found[1]) if found else ""
    return ""


# texts


def paragraph(text: str) -> str:
    """The first paragraph of a docstring in one line."""
    said = " ".join(text.strip().split("\n\n")[0].split())
    return said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"


def arguments_in(doc: str) -> dict[str, str]:
    """What a docstring says of each argument, below `Args:` or `Parameters:`."""
    found: dict[str, str] = {}
    section = re.search(r"^(?:Args|Arguments|Parameters):\n(.*?)(?=^\S|\Z)", doc, re.MULTILINE | re.DOTALL)
    name = ""
    for line in section[1].splitlines() if section else ():
        begin = re.match(r"\s+\**(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line)
        deeper = name and len(line) - len(line.lstrip()) > 4
        if begin and not deeper:
            name = begin[1]
            found[name] = begin[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _type_of(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", None) or str(annotation)


def _text_of(prompt: Any) -> str:
    """A prompt in one line for each message."""
    if isinstance(prompt, list | tuple):
        shown = []
        for message in prompt:
            one = message if isinstance(message, Mapping) else message.model_dump()
            shown.append(f"{one.get('role')}: {' '.join(str(one.get('content')).split())[:LONGEST]}")
        return "\n".join(shown)
    return str(prompt or "")[:LONGEST]


def main() -> None:
    """Answer the request on the standard input."""

    def answer(entry: Mapping[str, Any]) -> dict[str, Any]:
        return {"key": entry["key"], "about": asdict(about(config_of(entry)))}

    answer_requests(answer)


if __name__ == "__main__":
    main()
