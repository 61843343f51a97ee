"""Nested dictionaries and their dotted keys, and the names under which keys are accepted besides their own."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlx.config.errors import ConfigError
from rlx.config.keys import MISSING

RENAMED = {  # the name that a key had in the release before → the key; `*` is any name
    "hardware.shared": "hardware.colocate",
    "trainer.shared": "trainer.shared_trainer_dir",
    "trainer.wait_for_others": "trainer.batch_wait",
    "launcher.last_lines": "launcher.log_tail_lines",
    "model.strips_thinking": "model.template_drops_thinking",
    "model.divides_heads": "model.supports_tp",
    "envs.*.played_by": "envs.*.sampled_by",
    "envs.*.learn": "envs.*.observation_ce_weights",
    "envs.*.reward_raises": "envs.*.on_reward_error",
    "eval.envs.*.reward_raises": "eval.envs.*.on_reward_error",
    "eval.share": "eval.capacity_fraction",
    "teacher.unscored": "teacher.on_timeout",
    "data.refused": "data.on_bad_row",
    "data.overflow": "data.on_too_long",
    "prefer": "select_by",
    "exactly": "require_all",
}
SYNONYMS = RENAMED | {  # names of other frameworks that mean the same → the key
    "orchestrator.group_size": "orchestrator.rollouts_per_example",
    "max_off_policy_steps": "max_async_level",
    "monitors.wandb": "logger.wandb",
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


def own_name(key: str, synonyms: Mapping[str, str] = SYNONYMS) -> str:
    """A key by its own name, if it or a section around it has a synonym."""
    parts = key.split(".")
    for name, own in synonyms.items():
        known = name.split(".")
        if len(known) <= len(parts) and all(one in ("*", part) for one, part in zip(known, parts, strict=False)):
            stars = iter(part for one, part in zip(known, parts, strict=False) if one == "*")
            return ".".join([*(next(stars) if one == "*" else one for one in own.split(".")), *parts[len(known) :]])
    return key


def renamed(keys: Iterable[str]) -> list[str]:
    """A line for each key that is written by the name that it had in the release before."""
    return [f"`{key}` is called `{own_name(key, RENAMED)}` now" for key in dict.fromkeys(keys) if own_name(key, RENAMED) != key]


def with_own_names(key: str, value: Any) -> tuple[str, Any]:
    """A key and its value, which may be a section, by their own names."""
    key, whole = own_name(key), nested(own_name(key), value)
    use_own_names(whole)
    *above, last = key.split(".")
    return key, section_at(whole, above).get(last, value) if isinstance(value, dict) else value


def use_own_names(values: dict[str, Any]) -> None:
    """Move values from synonyms to the keys themselves, in place. Raises ConfigError where both are given."""
    for pattern, target in SYNONYMS.items():
        head, star, _ = pattern.partition(".*.")
        for each in list(section_at(values, head.split("."))) if star else [""]:
            above, around = ([each if part == "*" else part for part in name.split(".")] for name in (pattern, target))
            last, own = above.pop(), around.pop()
            section = section_at(values, above)
            if last not in section:
                continue
            if own in section_at(values, around):
                name, key = ".".join(map(str, [*above, last])), ".".join(map(str, [*around, own]))
                raise ConfigError(f"`{name}` and `{key}` are two names of one key.\n  fix: give it once")
            moved = {own: section.pop(last)}
            for part in reversed(around):
                moved = {part: moved}
            merge(values, moved)
            if above and not section:
                section_at(values, above[:-1]).pop(above[-1])
