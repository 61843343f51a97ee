"""Nested dictionaries and their dotted keys, and the names under which keys are accepted besides their own."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.keys import MISSING

SYNONYMS = {  # another name that means the same → the key: names of other frameworks, and those that a key had or will have
    "orchestrator.group_size": "orchestrator.rollouts_per_example",
    "max_off_policy_steps": "max_async_level",
    "monitors.wandb": "logger.wandb",
    "hardware.colocate": "hardware.shared",
}


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


def own_name(key: str) -> str:
    """A key by its own name, if it or a section around it has a synonym."""
    found = (own + key.removeprefix(name) for name, own in SYNONYMS.items() if f"{key}.".startswith(f"{name}."))
    return next(found, key)


def use_own_names(values: dict[str, Any]) -> None:
    """Move values from synonyms to the keys themselves, in place. Raises ConfigError where both are given."""
    for name, key in SYNONYMS.items():
        *above, last = name.split(".")
        section = section_at(values, above)
        if last not in section:
            continue
        *around, own = key.split(".")
        if own in section_at(values, around):
            raise ConfigError(f"`{name}` and `{key}` are two names of one key.\n  fix: give it once")
        merge(values, nested(key, section.pop(last)))
        if above and not section:
            section_at(values, above[:-1]).pop(above[-1])
