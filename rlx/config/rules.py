"""How to write a rule between configuration keys. The rules are in `checks/`.

A `Rule` is a row of a table: the keys that break it, when, why, and the fix. A rule that needs more is a function under `@check_of(cls)`.
Both belong to a class of configurations: `PlayRoot`'s hold for `rlx eval`, which derives from it, and `Config`'s for `rlx train` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from rlx.config.loss_traits import Declared
from rlx.config.schema import KlTerms, LossTerms
from rlx.config.signatures import declared_by
from rlx.config.validate import Origins, Problem

C = TypeVar("C")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Describe:
    """What a rule may ask about a key of a configuration."""

    cfg: Any
    origins: Origins

    def __call__(self, key: str, /) -> str:
        """The key with its value and where that was set: `seq_len=64 (conf/model/tiny.yaml)`."""
        value: Any = self.cfg
        for part in key.split("."):
            if isinstance(value, dict):
                value = value.get(part, DEFAULTS.get(part))
            elif value is not None:  # an evaluation without an entry of its own, say
                value = getattr(value, part)
        return self.origins.show(key, value)

    def typed(self, key: str, /) -> bool:
        """Whether the command line or a variable set it, and not a file, which may hold keys for another choice."""
        return key in self.origins.typed


@dataclass(frozen=True, slots=True)
class Rule(Generic[S]):
    """One row. The texts are formatted with `s`, the subject: a configuration, or one environment or objective of it.

    Rule("seq_len model.context_length", lambda c: c.seq_len > c.model.context_length, "samples are longer than the model's context",
         "seq_len={s.model.context_length} or less")
    """

    keys: str
    when: Callable[[S], object]
    why: str
    fix: str


Check = Callable[[Any, Describe], Iterable[Problem]]
UNKNOWN = Declared(uses_ratio=False)  # violates no rule
CHECKS: list[tuple[type, Check]] = []
DEFAULTS = vars(LossTerms()) | vars(KlTerms())  # of the keys that every objective has


def check_of(cls: type) -> Callable[[Check], Check]:
    """Register a function that yields the problems of a configuration of this class."""

    def register(function: Check) -> Check:
        CHECKS.append((cls, function))
        return function

    return register


def problem(why: str, keys: Iterable[str], fix: str, of: Describe) -> Problem:
    """The one shape of a broken rule: what is wrong, the keys with their values and places, the fix."""
    keys = tuple(keys)
    return Problem(f"{why}: {', '.join(map(of, keys))}.\n  fix: {fix}", keys)


def table(cls: type[S], rules: Sequence[Rule[S]]) -> None:
    """Register rules about a configuration as a whole."""
    table_each(cls, lambda cfg: [cfg], rules)


def table_each(cls: type[C], subjects: Callable[[C], Iterable[S]], rules: Sequence[Rule[S]]) -> None:
    """Register rules about parts of a configuration, such as each of its environments."""
    CHECKS.extend((cls, partial(_broken, rule, subjects)) for rule in rules)


def _broken(rule: Rule[S], subjects: Callable[[C], Iterable[S]], cfg: C, of: Describe) -> Iterable[Problem]:
    for s in subjects(cfg):
        if rule.when(s):
            yield problem(rule.why.format(s=s), rule.keys.format(s=s).split(), rule.fix.format(s=s), of)


def target_name(node: dict) -> str:
    """Last part of a node's `_target_`."""
    return str(node.get("_target_", "")).rpartition(".")[2]


def declared(node: dict) -> Declared:
    """What a node's target declares about itself; `UNKNOWN` before the target is imported. `load.checked` imports it and asks again."""
    return declared_by(str(node.get("_target_", ""))) or UNKNOWN
