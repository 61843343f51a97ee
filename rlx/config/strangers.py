"""What may execute: code that the command line names, or that a run of the caller's own names. Runs of others are data.

A run's configuration can make code run by a model's own code (`model.trust_remote_code`), an environment that rlx does not ship and its
reward function (`envs.X.id`, `args.reward`), its interpreter, programs and where they run (`python`, `harness`, `sandbox`, `box`), shell
lines of jobs (`slurm.setup`) and the target of a node (`loss._target_`). Of somebody else's run, commands that look read none of these, an
evaluation leaves them out, and `rlx replay` and forks refuse them. docs/trust.md
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlx.config.keys import MISSING
from rlx.config.nested import section_at
from rlx.config.pythons import shipped
from rlx.config.signatures import OWN_KINDS, module_of
from rlx.config.validate import show

OPEN = ("loss", "advantage", "optim")
JOBS = ("setup", "prefix", "container", "options")  # what a SLURM job's script runs, or is run by
HARMLESS = ("rlx.losses.", "rlx.advantages.", "rlx.train.", "torch.optim.")  # beginnings of targets that only compute


def is_mine(run: Path) -> bool:
    """Whether a run's configuration belongs to the caller, or to root."""
    file = run / "config.yaml"
    return (file if file.exists() else run).stat().st_uid in (os.geteuid(), 0)


def executing(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The keys of a run's configuration that would make code run which is not rlx's, and their values."""
    model, slurm = data.get("model") or {}, data.get("slurm") or {}
    if model.get("trust_remote_code"):
        yield ("model", "trust_remote_code"), True
    for key in JOBS:
        if slurm.get(key):
            yield ("slurm", key), slurm[key]
    for place in (("envs",), ("eval", "envs")):
        for name, env in section_at(data, place).items():
            for inner, value in _of_environment(env or {}):
                yield (*place, str(name), *inner), value
    for key in OPEN:
        yield from _targets((key,), data.get(key))
        for name, env in section_at(data, ["envs"]).items():
            yield from _targets(("envs", str(name), key), env.get(key))


def _of_environment(env: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    own, harness, box, reward = env.get("id"), env.get("harness") or {}, env.get("box") or {}, (env.get("args") or {}).get("reward")
    if own in OWN_KINDS and reward:
        yield ("args", "reward"), reward
    elif own not in (None, MISSING, *OWN_KINDS) and shipped(module_of(str(own))) is None:
        yield ("id",), own
    if "/" in str(env.get("python") or ""):  # else it is one of the caller's own, by its name
        yield ("python",), env["python"]
    if harness.get("command") or harness.get("install"):
        yield ("harness",), harness.get("command") or harness.get("install")
    if env.get("sandbox") == "none":
        yield ("sandbox",), "none"
    if box.get("image") or box.get("folders"):
        yield ("box",), box.get("image") or box.get("folders")


def _targets(place: tuple[str, ...], node: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The targets of a node, and of nodes among its arguments, that might do anything when they are called."""
    for name, value in node.items() if isinstance(node, Mapping) else ():
        if name == "_target_" and not str(value).startswith(HARMLESS):
            yield (*place, name), value
        yield from _targets((*place, str(name)), value)


def said(found: Mapping[tuple[str, ...], Any]) -> str:
    """Keys and values in words."""
    return ", ".join(f"{'.'.join(key)}={show(value)}" for key, value in found.items())
