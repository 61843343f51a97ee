"""The rules between configuration keys. `tree.py` checks types and single values.

A rule is here if breaking it gives a wrong result without a word, or costs minutes on a cluster; what a library refuses at once, in its own
words, is not. Most are rows of tables (`rlx.config.rules`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rlx.config.checks import data, engine, hardware, objective, run, secrets  # noqa: F401
from rlx.config.rules import CHECKS, Check
from rlx.config.schema import KlTerms, LossTerms
from rlx.config.tree import Origins, Problem

DEFAULTS = vars(LossTerms()) | vars(KlTerms())  # of the keys that every objective has


def check(cfg: Any, origins: Origins | None = None, wrong: tuple[str, ...] = (), without: Collection[Check] = ()) -> list[Problem]:
    """The problems that the rules find in a configuration of any root.

    `wrong`: keys that already have a problem. `without`: rules that do not apply.
    """
    show = _Shown(cfg, origins or Origins())
    problems: list[Problem] = []
    for cls, function in CHECKS:
        if isinstance(cfg, cls) and function not in without:
            try:
                problems += function(cfg, show)
            except (TypeError, AttributeError, KeyError, ValueError):
                if not wrong:  # else the rule read a value that has a problem of its own
                    raise
    return [each for each in problems if not any(_overlap(key, bad) for key in each.keys for bad in wrong)]


@dataclass(frozen=True)
class _Shown:
    """`rules.Show` of one configuration."""

    cfg: Any
    origins: Origins

    def __call__(self, key: str, /) -> str:
        value: Any = self.cfg
        for part in key.split("."):
            if isinstance(value, dict):
                value = value.get(part, DEFAULTS.get(part))
            elif value is not None:  # an evaluation without an entry of its own, say
                value = getattr(value, part)
        return self.origins.show(key, value)

    def typed(self, key: str, /) -> bool:
        return key in self.origins.typed


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(b + ".") or b.startswith(a + ".")
