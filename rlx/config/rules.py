"""How to write a rule between configuration keys: a function under `@rule(keys…)`. The rules are in `checks/`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from rlx.config.declared import Declared
from rlx.config.roots import has_key
from rlx.config.signatures import declared_by


class Show(Protocol):
    """What a rule may ask about a key."""

    def __call__(self, key: str, /) -> str:
        """The key with its value and where that was set: `seq_len=64 (conf/model/tiny.yaml)`."""

    def typed(self, key: str, /) -> bool:
        """Whether the command line or a variable set it, and not a file, which may hold keys for another choice."""


Rule = Callable[[Any, Show], Iterator[str]]  # the configuration of any root that has the keys
UNKNOWN = Declared(uses_ratio=False)  # violates no rule
OWN_LOSS = "envs.*.loss"  # a rule that reads it is about environments that are trained on
RULES: list[tuple[tuple[str, ...], Rule]] = []


def rule(*keys: str) -> Callable[[Rule], Rule]:
    """Register a rule together with the keys it reads."""

    def register(function: Rule) -> Rule:
        RULES.append((keys, function))
        return function

    return register


@functools.cache
def applies(keys: tuple[str, ...], root: type) -> bool:
    """Whether a root has all the keys that a rule reads."""
    return all(has_key(root, key) for key in keys)


def target_name(node: dict) -> str:
    """Last part of a node's `_target_`."""
    return str(node.get("_target_", "")).rpartition(".")[2]


def declared(node: dict) -> Declared:
    """What a node's target declares about itself; `UNKNOWN` before the target is imported. `load.checked` imports it and asks again."""
    return declared_by(str(node.get("_target_", ""))) or UNKNOWN
