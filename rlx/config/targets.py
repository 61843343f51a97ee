"""Open nodes: a dictionary with `_target_`, the dotted path of a function or class, and its keyword arguments.

The target's own signature determines which keys exist; there is no registry. Building a node imports the target's module,
and with it torch. Checking a node imports it only if the signature cannot be read from the source.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from typing import Any

from rlx.config.declared import OPTIM_RANGES
from rlx.config.errors import ConfigError
from rlx.config.near import suggest
from rlx.config.rules import declared
from rlx.config.schema import LossTerms, OptimTerms, split_terms
from rlx.config.signatures import locate, module_of, read_signature, signature_of
from rlx.config.tree import Builder, Origins, Problem, alternatives, closest, convert, show, types_of

TERMS: dict[str, type | None] = {"loss": LossTerms, "advantage": None, "optim": OptimTerms}
"""The open nodes of the configuration, with the keys that every target of a node shares."""


def instantiate(node: dict[str, Any], **extra: Any) -> Any:
    """Build a node, with `extra` arguments added.

    A class with all its arguments becomes an object. A function, or a class that still lacks arguments, becomes a `functools.partial`.
    The node must hold only the target's own keys: split off the shared ones with `schema.split_terms` first. Values that are nodes
    themselves are built first. Raises ConfigError when the target cannot be imported.
    """
    target = locate(node["_target_"])
    arguments = {
        name: instantiate(value) if isinstance(value, dict) and "_target_" in value else value
        for name, value in node.items()
        if name != "_target_"
    }
    bound = functools.partial(target, **arguments, **extra)
    return bound() if inspect.isclass(target) and not _lacks(target, {*arguments, *extra}) else bound


def _lacks(target: Callable[..., Any], given: set[str]) -> bool:
    required = (p for p in inspect.signature(target).parameters.values() if p.default is p.empty)
    return any(p.name not in given and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in required)


def nodes_of(cfg: Any) -> dict[str, type | None]:
    """The open nodes that a configuration has, each with the keys that all its targets share."""
    return {name: terms for name, terms in TERMS.items() if hasattr(cfg, name)}


def all_nodes_of(cfg: Any) -> dict[str, tuple[dict[str, Any], type | None]]:
    """Every open node by its key, with the shared keys of its targets: those of `nodes_of`, and those of single environments."""
    nodes: dict[str, tuple[dict[str, Any], type | None]] = {name: (getattr(cfg, name), terms) for name, terms in nodes_of(cfg).items()}
    for name, env in _envs_of(cfg).items():
        for group in ("loss", "advantage"):
            if group in nodes and getattr(env, group, None):
                nodes[f"envs.{name}.{group}"] = (getattr(env, group), TERMS[group])
    return nodes


def _envs_of(cfg: Any) -> dict[str, Any]:
    """The environments by name; empty for a command without them, and if `envs` itself is a problem, which has been reported."""
    envs = getattr(cfg, "envs", None)
    return envs if isinstance(envs, dict) else {}


def must_be_built(cfg: Any, origins: Origins) -> bool:
    """Whether the user set a value of an open node that only the target can check: no range is in the schema or declared.

    The tests build what ships. Building imports torch, which takes two seconds, and not every start should wait for that.
    """
    for name, (node, terms) in all_nodes_of(cfg).items():
        judged = {f.name for f in fields(terms)} if terms else set()
        judged |= OPTIM_RANGES.keys() if name == "optim" else declared(node).ranges.keys()
        inside = f"{name}."
        own = {key.removeprefix(inside).split(".")[0] for key in origins.of_key if key.startswith(inside) and key not in origins.shipped}
        own.discard("preset")
        if own - judged:
            return True
    return False


def check_targets(cfg: Any, origins: Origins) -> list[Problem]:
    """Compare the keys of every open node and the arguments of every environment with the signature of their target."""
    problems: list[Problem] = []
    for name, (whole, terms) in all_nodes_of(cfg).items():
        node, prefix = dict(whole), f"{name}."
        if terms is not None:
            builder = Builder(type(cfg), origins, hint=functools.partial(suggest, type(cfg)))
            shared = {f.name for f in fields(terms)}
            builder.build(terms, {key: value for key, value in node.items() if key in shared}, prefix)
            problems += builder.problems
            node = {key: value for key, value in node.items() if key not in shared}
        path = node.pop("_target_", None)
        if path is None:
            problems.append(Problem(f"{name} names no function: it has no `_target_`. Choose a preset: {name}=NAME.", (name,)))
            continue
        try:
            signature = signature_of(path)
        except ConfigError as error:
            problems.append(Problem(f"{origins.show(f'{name}._target_', path)} cannot be used: {error}", (name,)))
            continue
        problems += _check_arguments(prefix, node, path, signature, terms, origins)
    for name, env in _envs_of(cfg).items():
        module = module_of(env.id)
        signature_of_env = read_signature(module, "load_environment") if env.python is None else None
        if signature_of_env is not None:
            problems += _check_arguments(
                f"envs.{name}.args.",
                dict(env.args),
                f"{module}.load_environment of {env.id}",
                signature_of_env,
                None,
                origins,
                by_name=True,
            )
    return problems


def read_numbers(cfg: Any) -> None:
    """Turn texts of open nodes into numbers, in place, where the target or a shared key takes a number.

    A file that is read by YAML's own rules has text for 1e-5, without a point. Keys of the schema are read the same way (`tree.convert`).
    """
    for node, terms in all_nodes_of(cfg).values():
        if _holds_numbers(node):
            if terms is not None:
                _numbers_of_terms(node, terms)
            with contextlib.suppress(ConfigError):  # `check_targets` reports it
                _numbers_of_arguments(node, signature_of(str(node.get("_target_", ""))))
    for env in _envs_of(cfg).values():
        if env.python is None and _holds_numbers(env.args):
            _numbers_of_arguments(env.args, read_signature(module_of(env.id), "load_environment") or inspect.Signature())


def _holds_numbers(value: Any) -> bool:
    """Whether there is a text that Python reads as a number."""
    if isinstance(value, dict | list):
        return any(map(_holds_numbers, value.values() if isinstance(value, dict) else value))
    try:
        return isinstance(value, str) and not math.isnan(float(value))
    except ValueError:
        return False


def _numbers_of_terms(node: dict[str, Any], terms: type) -> None:
    for name, kind in types_of(terms).items():
        if is_dataclass(kind) and isinstance(node.get(name), dict):
            _numbers_of_terms(node[name], typing.cast(type, kind))
        elif name in node:
            node[name] = _as_numbers([kind], node[name])


def _numbers_of_arguments(node: dict[str, Any], signature: inspect.Signature) -> None:
    for name, parameter in signature.parameters.items():
        if name in node:
            node[name] = _as_numbers([parameter.annotation], node[name])


def _as_numbers(kinds: Sequence[Any], value: Any) -> Any:
    """`value` with numbers for its texts, where the types take numbers and no text. What is no number stays: the checks report it."""
    kinds = [one for kind in kinds for one in alternatives(kind)]
    if isinstance(value, list):
        return [_as_numbers([item for kind in kinds for item in _items_of(kind, place)], each) for place, each in enumerate(value)]
    if not isinstance(value, str) or any(kind in (str, Any) or value in typing.get_args(kind) for kind in kinds):
        return value
    for kind in kinds:
        if kind in (int, float):
            with contextlib.suppress(TypeError):
                return convert(kind, value)
    return value


def _items_of(kind: Any, place: int) -> tuple[Any, ...]:
    """The type of a list's value at `place`, if `kind` is a type of lists that says it. Any: it may be anything."""
    if kind is Any:
        return (Any,)
    inner = typing.get_args(kind) if typing.get_origin(kind) in (list, tuple) else ()
    return inner[:1] if typing.get_origin(kind) is list or Ellipsis in inner else inner[place : place + 1]


def _check_arguments(
    prefix: str, node: dict[str, Any], path: str, signature: inspect.Signature, terms: type | None, origins: Origins, by_name: bool = False
) -> list[Problem]:
    parameters = signature.parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    # Without `by_name`, the caller passes positional parameters without a default: the tokens of a loss, the parameters of an optimizer.
    valid = {
        name: p
        for name, p in parameters.items()
        if p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and (by_name or p.default is not p.empty))
    }
    target = path.rpartition(".")[2]
    problems = []
    if unknown := sorted(node.keys() - parameters.keys()):
        names = [*valid, *(f.name for f in fields(terms))] if terms else list(valid)
        near = [f"`{prefix}{found}`" for name in unknown for found in closest(name, names, 1)]
        text = f"unknown key{'s' * (len(unknown) > 1)} " + ", ".join(origins.show(prefix + name, node[name]) for name in unknown)
        text += f". Did you mean {' and '.join(near)}?" if near else "."
        text += f"\n{target} takes {', '.join(_describe(p) for p in valid.values()) or 'no keys of its own'}."
        text += f"\nKeys of every {prefix[:-1]}: {', '.join(_describe_term(f) for f in fields(terms))}." if terms else ""
        problems.append(Problem(text, tuple(prefix + name for name in unknown)))
    for name, p in valid.items():
        if name not in node:
            if p.default is p.empty:
                problems.append(Problem(f"`{prefix}{name}` has no value, but {target} needs one. Set {prefix}{name}=…", (prefix + name,)))
            continue
        try:
            convert(p.annotation, node[name])
        except TypeError as error:
            problems.append(Problem(f"`{prefix}{name}` must be {error}: {origins.show(prefix + name, node[name])}.", (prefix + name,)))
    return problems


def _describe(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={show(parameter.default)}"


def _describe_term(f: Any) -> str:
    if is_dataclass(f.default_factory):
        return "".join(f"{f.name}.{inner.name}={show(inner.default)}" for inner in fields(f.default_factory)[:1]) + " …"
    return f.name if f.default in (NO_DEFAULT, "???") else f"{f.name}={show(f.default)}"


__all__ = ["check_targets", "instantiate", "locate", "split_terms"]
