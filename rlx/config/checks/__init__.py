"""The rules between configuration keys. `validate.py` checks types and single values.

A rule is here if breaking it gives a wrong result without a word, or costs minutes on a cluster; what a library refuses at once, in its own
words, is not. Most are rows of tables (`rlx.config.rules`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rlx.config.checks import data, engine, hardware, objective, run, secrets, sizes  # noqa: F401
from rlx.config.rules import CHECKS, Check, Describe
from rlx.config.validate import Origins, Problem


def check(cfg: Any, origins: Origins | None = None, wrong: tuple[str, ...] = (), without: Collection[Check] = ()) -> list[Problem]:
    """The problems that the rules find in a configuration of any root.

    `wrong`: keys that already have a problem. `without`: rules that do not apply.
    """
    show = Describe(cfg, origins or Origins())
    problems: list[Problem] = []
    for cls, function in CHECKS:
        if isinstance(cfg, cls) and function not in without:
            try:
                problems += function(cfg, show)
            except (TypeError, AttributeError, KeyError, ValueError):
                if not wrong:  # else the rule read a value that has a problem of its own
                    raise
    return [each for each in problems if not any(_overlap(key, bad) for key in each.keys for bad in wrong)]


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(b + ".") or b.startswith(a + ".")
