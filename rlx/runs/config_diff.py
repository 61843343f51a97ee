"""What differs between two trees of values, such as two configurations of a run, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlx.config.roots import ROOTS, root_of
from rlx.config.schema import CommandConfig
from rlx.config.secret import redacted
from rlx.config.validate import secret_keys

NOT_COMPARED = ("run", "dry_run", "clean", "resume")  # keys that do not change what a run computes
# Keys that may change when a run resumes in its own directory: how long, where and how it is observed, but not what it learns.
WHERE = ("launcher", "slurm", "hardware", "inference", "weight_broadcast")
MAY_CHANGE = (*NOT_COMPARED, *WHERE, "max_steps", "data.epochs", "steps", "ckpt", "logger", "profile")
SECRET = {key for root in ROOTS for key in secret_keys(root.schema)}
ABSENT = "absent"  # a key that one of the trees lacks; null says the same


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested mapping, by dotted name."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def differing(there: Any, here: Any, free: tuple[str, ...] = (), between: str = "≠", key: str = "") -> Iterator[str]:
    """`key: VALUE ≠ VALUE` for each key of two trees that differs and is not in `free`; a secret's values are not shown."""
    if key in free or there == here or (there, here) in ((None, ABSENT), (ABSENT, None)):
        return
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for name in dict.fromkeys([*there, *here]):
            yield from differing(there.get(name, ABSENT), here.get(name, ABSENT), free, between, f"{key}.{name}" if key else name)
    else:
        yield f"{key}: a different value (secret)" if key in SECRET else f"{key}: {there} {between} {here}"


def changed_keys(before: CommandConfig, cfg: CommandConfig) -> list[str]:
    """What resuming with `cfg` changes: `max_steps: 40 → 100`."""
    return list(differing(asdict(before), asdict(redacted(cfg)), NOT_COMPARED, between="→"))


def change_note(root: Path, changed: list[str]) -> str:
    """The note about the result of `changed_keys`."""
    return (
        f"resuming with other values than before: {', '.join(changed)}\n"
        f"  to keep the run's own: --config-dir {root} --config-name config resume=latest"
    )


def differences(before: CommandConfig, cfg: CommandConfig) -> list[str]:
    """The keys in which a run's configuration differs from `cfg` and that may not change when it resumes. Secrets are not compared."""
    if type(before) is not type(cfg):
        return [f"it is a directory of rlx {root_of(before).command}"]
    return list(differing(asdict(before), asdict(redacted(cfg)), (*MAY_CHANGE, *cfg.may_change)))
