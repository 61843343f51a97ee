"""The rules between configuration keys, one function per rule. `tree.py` checks types and single values.

`data.py`: environments, batches, lengths; `chat.py`: chat formats; `evaluation.py`: evaluations; `objective.py`: loss, advantage,
optimizer, reference; `run.py`: model, servers, machines, directories; `workers.py`: environments' processes. A rule reads the
configuration and at most some files and the driver, and yields its problems. `@rule(keys…)` names the keys that it reads. A rule is
skipped when one of these keys already has a problem, or when the command's root lacks one.
"""

from __future__ import annotations

from typing import Any

from rlx.config.checks import chat, data, evaluation, objective, run, workers  # noqa: F401  (importing them registers their rules)
from rlx.config.rules import RULES, applies
from rlx.config.tree import Origins, Problem


def check(cfg: Any, origins: Origins | None = None, wrong: tuple[str, ...] = ()) -> list[Problem]:
    """The problems that the rules find in a configuration of any root. `wrong`: keys that already have a problem."""
    origins = origins or Origins()

    def show_key(key: str) -> str:
        value: object = cfg
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        return origins.show(key, value)

    problems = []
    for keys, function in RULES:
        if applies(keys, type(cfg)) and not any(_overlap(key, bad) for key in keys for bad in wrong):
            problems += [Problem(text, keys) for text in function(cfg, show_key)]
    return problems


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(b + ".") or b.startswith(a + ".")
