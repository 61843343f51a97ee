"""What may execute: code that the command line names, or that a run of the caller's own names. Runs of others are data.

A run's configuration can make code run by a model's own code (`model.trust_remote_code`), an environment's interpreter (`envs.X.python`),
its programs and where they run (`envs.X.harness`, `sandbox`, `box`) and the target of a node (`loss._target_`). Of somebody else's run,
commands that look read none of these, an evaluation leaves them out, and `rlx replay` refuses them. docs/trust.md
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlx.config.validate import show

OPEN = ("loss", "advantage", "optim")
HARMLESS = ("rlx.losses.", "rlx.advantages.", "rlx.train.", "torch.optim.")  # beginnings of targets that only compute


def is_mine(run: Path) -> bool:
    """Whether a run's configuration belongs to the caller, or to root."""
    return (run / "config.yaml").stat().st_uid in (os.geteuid(), 0)


def executing(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The keys of a run's configuration that would make code run which is not rlx's, and their values."""
    model, envs = data.get("model") or {}, data.get("envs") or {}
    if model.get("trust_remote_code"):
        yield ("model", "trust_remote_code"), True
    for name, env in envs.items():
        if "/" in str(env.get("python") or ""):  # else it is one of the caller's own, by its name
            yield ("envs", str(name), "python"), env["python"]
        harness, box = env.get("harness") or {}, env.get("box") or {}
        if harness.get("command") or harness.get("install"):
            yield ("envs", str(name), "harness"), harness.get("command") or harness.get("install")
        if env.get("sandbox") == "none":
            yield ("envs", str(name), "sandbox"), "none"
        if box.get("image") or box.get("folders"):
            yield ("envs", str(name), "box"), box.get("image") or box.get("folders")
    for key in OPEN:
        yield from _targets((key,), data.get(key))
        for name, env in envs.items():
            yield from _targets(("envs", str(name), key), env.get(key))


def _targets(place: tuple[str, ...], node: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The targets of a node, and of nodes among its arguments, that might do anything when they are called."""
    for name, value in node.items() if isinstance(node, Mapping) else ():
        if name == "_target_" and not str(value).startswith(HARMLESS):
            yield (*place, name), value
        yield from _targets((*place, str(name)), value)


def said(found: Mapping[tuple[str, ...], Any]) -> str:
    """Keys and values in words."""
    return ", ".join(f"{'.'.join(key)}={show(value)}" for key, value in found.items())
