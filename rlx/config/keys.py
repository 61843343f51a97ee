"""What a configuration key is made of: its default, its one-line meaning, and what its value must satisfy. Knows no key."""

from __future__ import annotations

from dataclasses import field
from typing import Any

MISSING: Any = "???"  # hydra's mark of a value that must be given
HIDDEN: Any = "<secret>"  # stands for a secret value; hydra would let a default take the place of `???`


def key(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    secret: bool = False,
    terms: type | None = None,
) -> Any:
    """A configuration key with its one-line meaning and what its value must satisfy.

    `choices`: the values it may take; `low` and `high`: smallest and largest; `above`: must be greater.
    `secret`: the value is nowhere shown, sent or written but into a file of the run that only its owner can read.
    `terms`: of an open node, the dataclass of the keys that all its targets share.
    """
    metadata = {"doc": doc, "choices": choices, "low": low, "above": above, "high": high, "secret": secret, "terms": terms}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type) -> Any:
    """A nested section."""
    return field(default_factory=cls)
