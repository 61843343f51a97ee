"""Loads an environment and describes it for people: arguments, data, rewards, tools. `rlx env info` shows it.

    python -m rlx.envs.about < {"envs": [{"key": "0", "name": "custom", "id": "rlx-math", "args": {}}]}

answers like `rlx.envs.probe`: `{"loading": "0"}`, then `{"key": "0", "about": {…}}` with the fields of `About`. The caller is
`rlx.preflight.probes`. An environment that cannot be loaded is described as far as its source allows.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from rlx.config.schema_rollout import EnvConfig
from rlx.config.signatures import OWN_KINDS, module_of
from rlx.envs.kinds import kind_of
from rlx.envs.probe import answer_requests, config_of, look
from rlx.envs.probed import About, Entry

LONGEST = 400  # characters of a text that are shown
NAME = "custom"


def about(config: EnvConfig) -> About:
    """Load one environment and describe it. Never raises because of the environment. Call it on the main thread."""
    found = About()
    if config.id not in OWN_KINDS:  # there is nothing to load without their arguments
        probed, env = look(NAME, config)
        found = About(problem=probed.problem, fix=probed.fix, prompt_chars=probed.prompt_chars)
        if env is not None:
            found = replace(found, **(_v1(env) if probed.kind.startswith("v1") else _classic(env)))
            functions = [tool["function"] for tool in env.tools]
            tools = tuple(Entry(name=str(one["name"]), doc=paragraph(str(one.get("description") or ""))) for one in functions)
            found = replace(found, examples=len(env.rows), tools=tools, scores_groups=env.scores_groups, prompt=_prompt(env.rows))
    with contextlib.suppress(Exception):  # what is wrong with it is said already
        kind = kind_of(config.id)
        module = importlib.import_module(module_of(config.id) if config.id not in OWN_KINDS else config.id)
        arguments = tuple(_fields(config.id) if kind == "v1" else _arguments(module))
        found = replace(found, kind=kind, doc=paragraph(inspect.getdoc(module) or ""), arguments=arguments)
    return found


def _arguments(module: Any) -> Iterator[Entry]:
    """Those of `load_environment`, and of the records that it passes its further arguments to, in rlx's own kinds."""
    takers = [module.load_environment, *([module.Tasks] if hasattr(module, "Tasks") else [])]
    for taker in takers:
        documented = arguments_in(inspect.getdoc(taker) or "")
        for name, parameter in inspect.signature(taker).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and len(takers) > 1:
                continue
            default = None if parameter.default is parameter.empty else repr(parameter.default)[:LONGEST]
            yield Entry(name=name, type=_type_of(parameter.annotation), default=default, doc=documented.get(name, ""))


def _fields(env_id: str) -> Iterator[Entry]:
    """Those of a v1 taskset."""
    from verifiers.v1.utils.loaders import taskset_config_type

    for name, field in taskset_config_type(env_id).model_fields.items():
        if name not in ("id", "task"):
            default = None if field.is_required() else repr(field.get_default(call_default_factory=True))[:LONGEST]
            yield Entry(name=f"taskset.{name}", type=_type_of(field.annotation), default=default, doc=field.description or "")


def _classic(env: Any) -> dict[str, Any]:
    from rlx.envs.verifiers_v0 import leaves

    players = list({id(one): one for one in leaves(env.env)}.values())
    holds_out = env.env.eval_dataset_source is not None or env.env.eval_dataset is not None
    return {
        "type": ", ".join(dict.fromkeys(type(one).__name__ for one in players)),
        "eval_examples": len(env.env.get_eval_dataset()) if holds_out else None,
        "rewards": tuple(dict.fromkeys(reward for one in players for reward in _rewards_of(one.rubric))),
    }


def _rewards_of(rubric: Any) -> Iterator[Entry]:
    functions, weights = rubric._get_reward_funcs(), rubric._get_reward_weights()
    for name, function, weight in zip(rubric._get_reward_func_names(), functions, weights, strict=True):
        yield Entry(name=name, doc=paragraph(inspect.getdoc(function) or ""), weight=float(weight))


def _v1(env: Any) -> dict[str, Any]:
    from rlx.envs.verifiers_v1_needs import hooks

    judges = [one for one in hooks(type(env.env.taskset).task_type()) if hasattr(one, "reward") or hasattr(one, "metric")]
    weights = [float(getattr(one, "_vf_weight", 1.0)) if hasattr(one, "reward") else 0.0 for one in judges]
    trains = {name: "trains" if name in env.agents else "does not train" for name in env.env._agent_specs}
    return {
        "type": type(env.env).__name__,
        "rewards": tuple(
            Entry(name=one.__name__, doc=paragraph(inspect.getdoc(one) or ""), weight=weight)
            for one, weight in zip(judges, weights, strict=True)
        ),
        "agents": tuple(Entry(name=name, doc=doc) for name, doc in trains.items()),
    }


# texts


def paragraph(text: str) -> str:
    """The first paragraph of a docstring in one line."""
    return " ".join(text.strip().split("\n\n")[0].split())[:LONGEST]


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
        return prompt[:LONGEST]
    return "\n".join(f"{one.get('role')}: {' '.join(str(one.get('content')).split())[:LONGEST]}" for one in prompt)


def main() -> None:
    """Answer the request on the standard input."""

    def answer(entry: Mapping[str, Any]) -> dict[str, Any]:
        return {"key": entry["key"], "about": asdict(about(config_of(entry)))}

    answer_requests(answer)


if __name__ == "__main__":
    main()
