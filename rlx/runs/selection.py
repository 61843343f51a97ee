"""Filters and sorts rows of rollouts: `reward<0.5 env=math step=10..20 !error`.

A filter is a list of conditions with spaces between; a rollout must meet all of them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

from rlx.config.errors import ConfigError
from rlx.runs.rollouts import RolloutRow

NUMBERS = ("step", "example", "group", "member", "reward", "advantage", "tokens", "turns", "version")
TEXTS = ("env", "set", "stop", "status", "rule")
FLAGS = ("error", "truncated", "trained")
SORTS = ("step", "set", "env", "example", "reward", "advantage", "tokens", "turns", "stop", "error")
HELP = (
    f"numbers: {', '.join(NUMBERS)}, as in reward<0.5, step=10..20, example=3,7; "
    f"texts: {', '.join(TEXTS)}, as in env=math, stop~length; yes or no: {', '.join(FLAGS)}, as in error, !truncated"
)
_CONDITION = re.compile(r"(!?)([a-z]+)(?:(<=|>=|!=|<|>|=|~)(.+))?")
_ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def select(rows: Iterable[RolloutRow], text: str) -> list[RolloutRow]:
    """Rows that meet all conditions, in their order. Raises ConfigError for a condition that cannot be understood."""
    conditions = [_condition(part) for part in text.split()]
    return [row for row in rows if all(meets(row) for meets in conditions)]


def _condition(condition: str) -> Callable[[RolloutRow], bool]:
    match = _CONDITION.fullmatch(condition)
    negated, name, sign, value = match.groups() if match else ("", "", None, "")
    meets: Callable[[Any], bool] | None = None
    if name in FLAGS and sign is None:
        meets = bool
    elif name in NUMBERS and sign is not None:
        meets = _number(sign, value)
    elif name in TEXTS and sign is not None:
        meets = _text(sign, value)
    if meets is None:
        raise ConfigError(f"{condition!r} is no condition. {HELP}")
    # What is not known meets nothing: a rollout without a reward is neither below a half nor unequal to it.
    return lambda row: ((found := getattr(row, name)) is not None and meets(found)) != bool(negated)


def _number(sign: str, value: str) -> Callable[[Any], bool] | None:
    try:
        if sign in _ORDER:
            limit = float(value)
            return lambda found: _ORDER[sign](found, limit)
        if sign == "~":
            return None
        parts = [part.partition("..") for part in value.split(",")]
        spans = [(float(low), float(high if dots else low)) for low, dots, high in parts]
    except ValueError:
        return None
    return lambda found: any(low <= found <= high for low, high in spans) == (sign == "=")


def _text(sign: str, value: str) -> Callable[[Any], bool] | None:
    if sign == "~":
        return lambda found: value.lower() in found.lower()
    return None if sign in _ORDER else lambda found: (found in value.split(",")) == (sign == "=")


def sort(rows: Iterable[RolloutRow], by: str, descending: bool = False) -> list[RolloutRow]:
    """The rows in the order of a column. Equal rows keep their order; rows without a value come last."""
    if by not in (*NUMBERS, *TEXTS, "error"):
        raise ConfigError(f"{by!r} is no column. Columns: {', '.join(SORTS)}")
    rows = list(rows)
    known = [row for row in rows if getattr(row, by) is not None]
    return sorted(known, key=operator.attrgetter(by), reverse=descending) + [row for row in rows if getattr(row, by) is None]


def one_of_each(rows: list[RolloutRow]) -> list[RolloutRow]:
    """The rows with the first of every example first: members of one group often say the same."""
    first = {(row.set, row.env, row.example): id(row) for row in reversed(rows)}
    return sorted(rows, key=lambda row: first[row.set, row.env, row.example] != id(row))


def newest_first(rows: Iterable[RolloutRow]) -> list[RolloutRow]:
    """The rows by step, the newest first."""
    return sort(rows, "step", descending=True)
