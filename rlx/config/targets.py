"""Open nodes: a dictionary with `_target_`, the dotted path of a function or class, and its keyword arguments.

The target's own signature says which keys exist; there is no registry. Checking or building a node imports the target's module,
and with it torch. Knows no target by name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.schema import Config, LossTerms, OptimTerms, split_terms
from rlx.config.tree import Builder, Origins, Problem, closest, convert, show

TERMS: dict[str, type | None] = {"loss": LossTerms, "advantage": None, "optim": OptimTerms}
"""The open nodes of the configuration, with the keys that every target of a node shares."""

SPECIAL = ("_target_", "_partial_")


def locate(path: str) -> Callable[..., Any]:
    """The function or class at a dotted path. Raises ConfigError."""
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"`_target_`: {path} cannot be imported: {error}.") from error
    if not callable(target := getattr(module, name, None)):
        near = closest(name, [n for n in vars(module) if not n.startswith("_")])
        raise ConfigError(f"`_target_`: {module_name} has no function or class {name}." + (f" Did you mean {near[0]}?" if near else ""))
    return target


def instantiate(node: dict[str, Any], **extra: Any) -> Any:
    """What a node describes, with `extra` arguments added: an object for a class, a `functools.partial` for a function.

    The node must hold the target's own keys only; take the shared ones off with `schema.split_terms`. `_partial_` set to true or
    false overrides the choice between calling and binding. Values that are nodes themselves are built first.
    Raises ConfigError when the target cannot be imported.
    """
    target = locate(node["_target_"])
    arguments = {
        name: instantiate(value) if isinstance(value, dict) and "_target_" in value else value
        for name, value in node.items()
        if name not in SPECIAL
    }
    bind = functools.partial(target, **arguments, **extra)
    return bind if node.get("_partial_", not inspect.isclass(target)) else bind()


def check_targets(cfg: Config, origins: Origins) -> list[Problem]:
    """Import the target of every open node and compare the node's keys with its signature."""
    problems: list[Problem] = []
    for name, terms in TERMS.items():
        node, prefix = dict(getattr(cfg, name)), f"{name}."
        if terms is not None:
            builder = Builder(Config, origins)
            shared = {f.name for f in fields(terms)}
            builder.build(terms, {key: value for key, value in node.items() if key in shared}, prefix)
            problems += builder.problems
            node = {key: value for key, value in node.items() if key not in shared}
        try:
            target = locate(node["_target_"])
        except ConfigError as error:
            problems.append(Problem(f"{name}: {error} ({origins.find(prefix + '_target_') or 'default'})", (name,)))
            continue
        problems += _check_arguments(prefix, node, target, terms, origins)
    return problems


def _check_arguments(prefix: str, node: dict[str, Any], target: Callable[..., Any], terms: type | None, origins: Origins) -> list[Problem]:
    parameters = inspect.signature(target).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    # Positional parameters without a default are the caller's: the tokens of a loss, the parameters of an optimizer.
    valid = {
        name: p
        for name, p in parameters.items()
        if p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty)
    }
    problems = []
    for name in sorted(node.keys() - valid.keys() - set(SPECIAL)):
        near = closest(name, [*valid, *(f.name for f in fields(terms))] if terms else list(valid))
        hint = f" Did you mean `{prefix}{near[0]}`?" if near else ""
        listed = ", ".join(_describe(p) for p in valid.values()) or "no keys of its own"
        also = f"\nAll of {prefix[:-1]} share: {', '.join(_describe_term(f) for f in fields(terms))}." if terms else ""
        text = f"unknown key {origins.show(prefix + name, node[name])}.{hint}\n{target.__name__} takes {listed}.{also}"
        problems.append(Problem(text, (prefix + name,)))
    for name, p in valid.items():
        if name not in node:
            if p.default is p.empty:
                problems.append(
                    Problem(f"`{prefix}{name}` has no value: {target.__name__} needs it. Set {prefix}{name}=…", (prefix + name,))
                )
            continue
        try:
            convert(hints.get(name, Any), node[name])
        except TypeError as error:
            problems.append(Problem(f"`{prefix}{name}` must be {error}: {origins.show(prefix + name, node[name])}.", (prefix + name,)))
    return problems


def _describe(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={show(parameter.default)}"


def _describe_term(f: Any) -> str:
    return f.name if f.default in (NO_DEFAULT, "???") else f"{f.name}={show(f.default)}"


__all__ = ["check_targets", "instantiate", "locate", "split_terms"]
