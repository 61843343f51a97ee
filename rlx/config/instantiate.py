"""Open nodes: a dictionary with `_target_`, the dotted path of a function or class, and its keyword arguments.

The target's own signature determines which keys exist; there is no registry. Building a node imports the target's module,
and with it torch. Checking a node imports it only if the signature cannot be read from the source.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.loss_traits import OPTIM_RANGES
from rlx.config.rules import declared
from rlx.config.schema import LossTerms, OptimTerms, split_terms
from rlx.config.signatures import locate, signature_of
from rlx.config.suggest import suggest
from rlx.config.validate import Builder, Origins, Problem, closest, convert

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
    own = [(f"envs.{name}.{group}", env, group) for name, env in getattr(cfg, "envs", {}).items() for group in ("loss", "advantage")]
    nodes = {name: (getattr(cfg, name), terms) for name, terms in nodes_of(cfg).items()}
    return nodes | {key: (node, TERMS[group]) for key, env, group in own if (node := getattr(env, group, None))}


def must_be_built(cfg: Any, origins: Origins) -> bool:
    """Whether the user set a value of an open node that only the target can check: no range is in the schema or declared.

    The tests build what ships. Building imports torch, which takes two seconds, and not every start should wait for that.
    """
    set_by_user = origins.of_key.keys() - origins.shipped
    for name, (node, terms) in all_nodes_of(cfg).items():
        ranges = OPTIM_RANGES if name == "optim" else declared(node).ranges
        judged = {"preset", *ranges, *(f.name for f in (fields(terms) if terms else ()))}
        if {key.split(".")[name.count(".") + 1] for key in set_by_user if key.startswith(f"{name}.")} - judged:
            return True
    return False


def check_targets(cfg: Any, origins: Origins) -> list[Problem]:
    """Compare the keys of every open node with the signature of its target."""
    problems: list[Problem] = []
    for name, (whole, terms) in all_nodes_of(cfg).items():
        node = dict(whole)
        shared = [f.name for f in fields(terms)] if terms is not None else []
        if terms is not None:
            builder = Builder(type(cfg), origins, strict=True, hint=functools.partial(suggest, type(cfg)))
            builder.build(terms, {key: node.pop(key) for key in shared if key in node}, f"{name}.")
            problems += builder.problems
        path = node.pop("_target_", None)
        if not isinstance(path, str):
            problems.append(Problem(f"{name} names no function: it has no `_target_`.\n  fix: a preset, {name}=NAME", (name,)))
            continue
        try:
            problems += _check_arguments(f"{name}.", node, path, signature_of(path), shared, origins)
        except ConfigError as error:
            problems.append(Problem(f"{origins.show(f'{name}._target_', path)} cannot be used: {error}", (name,)))
    return problems


def _check_arguments(
    prefix: str, node: dict[str, Any], path: str, signature: inspect.Signature, shared: Sequence[str], origins: Origins
) -> Iterator[Problem]:
    """`shared`: the keys of all targets of the node."""
    parameters = signature.parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    # The caller of a node's target passes what is positional without a default: the tokens of a loss, the parameters of an optimizer.
    valid = {
        name: p
        for name, p in parameters.items()
        if p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty)
    }
    names, target = [*valid, *shared], path.rpartition(".")[2]
    for name in sorted(node.keys() - parameters.keys()):
        near = "".join(f" Did you mean `{prefix}{each}`?" for each in closest(name, names, 1))
        shown = origins.show(prefix + name, node[name])
        yield Problem(f"unknown key {shown}.{near}\n  fix: {target} takes {', '.join(names) or 'no keys'}", (prefix + name,))
    for name, p in valid.items():
        key = prefix + name
        if name in node:
            try:
                convert(p.annotation, node[name], strict=True)
            except TypeError as error:
                yield Problem(f"`{key}` must be {error}: {origins.show(key, node[name])}.", (key,))
        elif p.default is p.empty:
            yield Problem(f"no value: {key}, which {target} needs.\n  fix: {key}=…", (key,))


__all__ = ["check_targets", "instantiate", "locate", "split_terms"]
