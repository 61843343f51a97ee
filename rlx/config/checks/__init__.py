"""The rules between configuration keys, one function per rule. `tree.py` checks types and single values.

`bench.py`: benchmarks; `data.py`: environments, batches, lengths; `chat.py`: chat formats; `engine.py`: vLLM's options; `evaluation.py`:
evaluations; `idle.py`: keys that do not apply in a kind of run; `lora.py`: adapters; `objective.py`: loss, advantage, optimizer,
reference; `parallel.py`: how the trainer's ranks divide the work; `teacher.py`: teachers; `run.py`: model, servers, machines,
directories; `cluster.py`: SLURM jobs and their containers; `playing.py`: endpoints and weights of commands that only play; `sft.py`:
supervised data; `secrets.py`: secrets in open keys; `shared.py`: shared trainers and their runs; `weights.py`: new weights on their way to
the servers; `workers.py`: environments' processes. A rule reads the configuration and at most some files and the driver, and yields its
problems. `@rule(keys…)` names the keys that it reads. A rule is skipped when one of these keys already has a
problem, or when the command's root lacks one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from rlx.config.checks import (  # noqa: F401  (importing them registers their rules)
    bench,
    chat,
    cluster,
    data,
    engine,
    evaluation,
    idle,
    lora,
    objective,
    parallel,
    playing,
    run,
    secrets,
    sft,
    shared,
    teacher,
    weights,
    workers,
)
from rlx.config.rules import RULES, Rule, applies
from rlx.config.tree import Origins, Problem


def check(cfg: Any, origins: Origins | None = None, wrong: tuple[str, ...] = (), without: Collection[Rule] = ()) -> list[Problem]:
    """The problems that the rules find in a configuration of any root.

    `wrong`: keys that already have a problem. `without`: rules that do not apply.
    """
    show = _Shown(cfg, origins or Origins())
    problems = []
    root: type = type(cfg)
    for keys, function in RULES:
        if function not in without and applies(keys, root) and not any(_overlap(key, bad) for key in keys for bad in wrong):
            problems += [Problem(text, keys) for text in function(cfg, show)]
    return problems


@dataclass(frozen=True)
class _Shown:
    """`rules.Show` of one configuration."""

    cfg: Any
    origins: Origins

    def __call__(self, key: str, /) -> str:
        value: object = self.cfg
        for part in key.split("."):
            if isinstance(value, dict) and part not in value:
                return self.origins.show(key, _shared_default(self.cfg, key))
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        return self.origins.show(key, value)

    def typed(self, key: str, /) -> bool:
        return key in self.origins.typed


def _shared_default(cfg: Any, key: str) -> Any:
    """The default of a key that an open node shares with all its targets: `loss.proximal`, `envs.math.loss.proximal`."""
    node, *parts = key.split(".")
    if node == "envs":
        _, node, *parts = parts
    cls: Any = next(f.metadata["terms"] for f in fields(cfg) if f.name == node)
    for part in parts:
        found = next(f for f in fields(cls) if f.name == part)
        cls = found.default_factory if found.default is dataclasses.MISSING else found.default
    return cls


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(b + ".") or b.startswith(a + ".")
