"""What differs between two configurations of a run, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlx.config.roots import ROOTS, root_of
from rlx.config.schema import CommandConfig
from rlx.config.secret import hidden
from rlx.config.tree import secret_keys

NOT_COMPARED = ("run", "dry_run", "clean", "resume")  # keys that do not change what a run computes
# Keys that may change when a run resumes in its own directory: how long, where and how it is observed, but not what it learns.
WHERE = ("launcher", "slurm", "hardware", "inference", "weight_broadcast")
MAY_CHANGE = (*NOT_COMPARED, *WHERE, "max_steps", "steps", "ckpt", "logger", "profile")
SECRET = {key for root in ROOTS for key in secret_keys(root.schema)}


def differing(there: Any, here: Any, key: str = "", between: str = "≠") -> Iterator[str]:
    """`key: VALUE ≠ VALUE` for each key of two trees that differs; a secret's values are not shown."""
    if isinstance(there, dict) and isinstance(here, dict):
        for name in dict.fromkeys([*there, *here]):
            yield from differing(there.get(name), here.get(name), f"{key}.{name}" if key else name, between)
    elif there != here:
        yield f"{key}: a different value (secret)" if key in SECRET else f"{key}: {there} {between} {here}"


def changed_keys(before: CommandConfig, cfg: CommandConfig) -> list[str]:
    """What resuming with `cfg` changes: `max_steps: 40 → 100`."""
    lines = differing(asdict(before), asdict(hidden(cfg)), between="→")
    return [line for line in lines if re.split("[.:]", line)[0] not in NOT_COMPARED]


def change_note(root: Path, changed: Sequence[str]) -> str:
    """The note about the result of `changed_keys`."""
    return (
        f"resuming with other values than before: {', '.join(changed)}\n"
        f"  to keep the run's own: --config-dir {root} --config-name config resume=latest"
    )


def differences(before: CommandConfig, cfg: CommandConfig) -> list[str]:
    """The keys in which a run's configuration differs from `cfg` and that may not change when it resumes. Secrets are not compared."""
    if type(before) is not type(cfg):
        return [f"it is a directory of rlx {root_of(before).command}"]
    free = (*MAY_CHANGE, *cfg.may_change)
    lines = differing(asdict(before), asdict(hidden(cfg)))
    return [line for line in lines if not any(re.match(rf"{re.escape(key)}[.:]", line) for key in free)]
