"""The rules between configuration keys, one function a rule. Types and single values are checked in `tree.py`.

`data.py`: what is learnt from; `objective.py`: loss, advantage, optimizer, reference; `run.py`: model, servers, machines, directories.
A rule reads the configuration, asks the machine at most for what a file or the driver says, and yields its problems.
`@rule(keys…)` names the keys that it reads: it is not asked when one of them has a problem already, nor where the command's root has not
got one. Knows nothing of hydra or torch.
"""

from __future__ import annotations

from typing import Any

from rlx.config.checks import data, objective, run  # noqa: F401  (their rules are registered)
from rlx.config.rules import RULES, applies
from rlx.config.tree import Origins, Problem


def check(cfg: Any, origins: Origins | None = None, wrong: tuple[str, ...] = ()) -> list[Problem]:
    """Every rule's problem with a configuration of any root. `wrong`: keys that have a problem already."""
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
