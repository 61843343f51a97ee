"""What every configuration key has: a default, a one-line meaning, and conditions on its value. The keys are in `schema.py`."""

from __future__ import annotations

from dataclasses import field
from typing import Any

MISSING: Any = "???"  # hydra's mark for a value that must be given
HIDDEN: Any = "<secret>"  # replaces a secret value; not `???`, because hydra would replace that by a default


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
    """A configuration key with its one-line meaning and the conditions on its value.

    `choices`: the allowed values; `low` and `high`: the smallest and the largest; `above`: the value must be greater.
    `secret`: the value is never shown or sent, and written only into a file of the run that nobody but its owner can read.
    `terms`: for an open node, the dataclass of the keys that all its targets share.
    """
    metadata = {"doc": doc, "choices": choices, "low": low, "above": above, "high": high, "secret": secret, "terms": terms}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type) -> Any:
    """A nested section."""
    return field(default_factory=cls)
