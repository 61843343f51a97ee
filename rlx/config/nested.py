"""Nested dictionaries and their dotted keys."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlx.config.keys import MISSING


def merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Put nested values into a nested dictionary, in place. Sections are merged; any other value replaces, but `???` replaces none."""
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            merge(into[name], value)
        elif value != MISSING or name not in into:
            into[name] = copy.deepcopy(value)


def nested(key: str, value: Any) -> dict[str, Any]:
    """`{a: {b: value}}` for the key `a.b`; the value itself for an empty key."""
    for part in reversed(key.split(".") if key else []):
        value = {part: value}
    return value


def flatten(value: Any, prefix: str = "") -> Iterator[str]:
    """The dotted keys of all values that are no sections, or are empty ones."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flatten(inner, f"{prefix}.{name}" if prefix else str(name))
    elif prefix:
        yield prefix


def section_at(data: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The section that names lead to; an empty one if there is none."""
    inner: Any = data
    for name in names:
        inner = inner.get(name) if isinstance(inner, dict) else None
    return inner if isinstance(inner, dict) else {}
