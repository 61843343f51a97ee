"""Filters and sorts a table of rollouts: `reward<0.5 env=math step=10..20 !error`.

A filter is a list of conditions with spaces between; a rollout must meet all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from rlx.runs.rollouts import NONE, Table

NUMBERS = {  # name in a filter -> column
    "step": "step",
    "example": "example",
    "group": "group",
    "member": "member",
    "reward": "reward",
    "advantage": "advantage",
    "tokens": "tokens",
    "turns": "turns",
    "version": "newest",
}
TEXTS = {"env": "env", "set": "set", "stop": "stop", "status": "status", "rule": "left_out"}
FLAGS: Mapping[str, Callable[[Table], NDArray[np.bool_]]] = {
    "error": lambda table: table.failed,
    "truncated": lambda table: table.columns["truncated"].astype(bool),
    "trained": lambda table: ~np.isnan(table.columns["advantage"]),
}
SORTS = ("step", "set", "env", "example", "reward", "advantage", "tokens", "turns", "stop", "error")
HELP = (
    f"numbers: {', '.join(NUMBERS)}, as in reward<0.5, step=10..20, example=3,7; "
    f"texts: {', '.join(TEXTS)}, as in env=math, stop~length; yes or no: {', '.join(FLAGS)}, as in error, !truncated"
)
_CONDITION = re.compile(r"(!?)([a-z]+)(?:(<=|>=|!=|<|>|=|~)(.+))?")


def select(table: Table, text: str) -> NDArray[np.int64]:
    """Rows that meet all conditions, in the order of the table. Raises ValueError for a condition that cannot be understood."""
    kept = np.ones(len(table), dtype=np.bool_)
    for condition in text.split():
        kept &= _meets(table, condition)
    return np.flatnonzero(kept)


def _meets(table: Table, condition: str) -> NDArray[np.bool_]:
    match = _CONDITION.fullmatch(condition)
    name = match[2] if match else ""
    if match is None or name not in {*NUMBERS, *TEXTS, *FLAGS}:
        raise ValueError(f"{condition!r} is no condition. {HELP}")
    negated, _, sign, value = match.groups()
    if name in FLAGS:
        if sign is not None:
            raise ValueError(f"{condition!r}: {name} takes no value; write {name} or !{name}")
        found = FLAGS[name](table)
    elif sign is None:
        raise ValueError(f"{condition!r} needs a value, such as {name}{'=math' if name in TEXTS else '=3'}")
    elif name in NUMBERS:
        found = _number(_known(table, name), condition, sign, value)
    else:
        found = _text(table.columns[TEXTS[name]], condition, sign, value)
    return ~found if negated else found


def _known(table: Table, name: str) -> NDArray:
    """A column of numbers, with NaN where a file does not say: an evaluation has no group, an endpoint's answer no tokens."""
    column = table.columns[NUMBERS[name]]
    if column.dtype.kind == "f" or name == "example":
        return column
    return np.where(column == NONE, np.nan, column)


def _number(column: NDArray, condition: str, sign: str, value: str) -> NDArray[np.bool_]:
    try:
        if sign in ("=", "!="):
            found = np.zeros(len(column), dtype=np.bool_)
            for part in value.split(","):
                low, dots, high = part.partition("..")
                # Rewards are stored as float32, so 0.1 must match its nearest float32.
                one = float(np.float32(low)) if column.dtype == np.float32 else float(low)
                found |= (column >= float(low)) & (column <= float(high)) if dots else column == one
            return ~found & ~np.isnan(column) if sign == "!=" else found
        limit = np.float32(value) if column.dtype == np.float32 else float(value)
    except ValueError:
        raise ValueError(f"{condition!r}: {value} is no number") from None
    compare = {"<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal}
    if sign not in compare:
        raise ValueError(f"{condition!r}: ~ is for texts ({', '.join(TEXTS)})")
    return compare[sign](column, limit)  # NaN (no reward, no advantage) meets none


def _text(column: NDArray, condition: str, sign: str, value: str) -> NDArray[np.bool_]:
    if sign == "~":
        return np.array([value.lower() in text.lower() for text in column], dtype=np.bool_)
    if sign not in ("=", "!="):
        raise ValueError(f"{condition!r}: texts ({', '.join(TEXTS)}) are compared with =, != or ~")
    return np.isin(column, value.split(",")) == (sign == "=")


def sort(table: Table, rows: NDArray[np.int64], by: str, descending: bool = False) -> NDArray[np.int64]:
    """The rows in the order of a column. Equal rows keep their order; rows without a value come last."""
    if by == "error":
        keys = table.failed[rows].astype(np.float64)
    elif by in TEXTS:
        keys = np.unique(table.columns[TEXTS[by]][rows], return_inverse=True)[1].astype(np.float64)
    elif by in NUMBERS:
        keys = _known(table, by)[rows].astype(np.float64)
    else:
        raise ValueError(f"{by!r} is no column. Columns: {', '.join(SORTS)}")
    keys = -keys if descending else keys
    return rows[np.argsort(keys, kind="stable")]  # numpy sorts NaN to the end


def one_of_each(table: Table, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows with the first of every example first: members of one group often say the same."""
    codes = np.stack([np.unique(table.columns[name][rows], return_inverse=True)[1] for name in ("set", "env", "example")])
    first = np.zeros(len(rows), dtype=np.bool_)
    first[np.unique(codes, axis=1, return_index=True)[1]] = True
    return np.concatenate([rows[first], rows[~first]])


def newest_first(table: Table, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows by step, the newest first."""
    return sort(table, rows, "step", descending=True)
