"""How a rule between configuration keys is written down: a function under `@rule(keys…)`. The rules are in `checks….py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlx.config.schema import Config

Show = Callable[[str], str]
Rule = Callable[[Config, Show], Iterator[str]]
RULES: list[tuple[tuple[str, ...], Rule]] = []


def rule(*keys: str) -> Callable[[Rule], Rule]:
    """Register a rule together with the keys it needs."""

    def register(function: Rule) -> Rule:
        RULES.append((keys, function))
        return function

    return register


def target_name(node: dict) -> str:
    """Last part of a node's `_target_`."""
    return str(node.get("_target_", "")).rpartition(".")[2]
