"""Single values to JSON and back, for the codec: typed values (int, float, bool, str, literals) and plain values of any type.

Plain values are None, bool, int, float, str, bytes, dates and times, and lists, tuples and dicts of plain values.
"""

from __future__ import annotations

import base64
import datetime
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np


def one_text(parts: Iterable[str]) -> str:
    """The parts of a message's content as one text, in data sets as in environments: with line breaks, as vLLM's chat route joins them."""
    return "\n".join(parts)


class CodecError(ValueError):
    """A record that cannot be written, or bytes that are not the wanted record. The message names the field, if there is one."""

    def __init__(self, problem: str, row: int = 0) -> None:
        """`row` is the index of the value in the column being written."""
        super().__init__(problem)
        self.problem, self.row, self.path = problem, row, ""

    def inside(self, part: str, row: int) -> CodecError:
        """The same error, one level further out. `part` is `.field` or `[index]`."""
        self.path, self.row = part + self.path, row
        self.args = (f"{self.path.lstrip('.')}: {self.problem}",)
        return self


def write_each(write: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """`write` of every value. A CodecError carries the value's index in its `row`."""
    body: list[Any] = []
    try:
        body.extend(map(write, values))
    except CodecError as error:
        error.row = len(body)
        raise
    return body


def _int(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        _refuse(value, int)


def _refuse(value: Any, kind: type) -> NoReturn:
    raise CodecError(f"{name_of(value)} is no {kind.__name__}") from None


def _float(value: Any) -> float:
    if not isinstance(value, (float, int, np.floating, np.integer)):
        _refuse(value, float)
    return float(value)


def _bool(value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        _refuse(value, bool)
    return bool(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        _refuse(value, str)
    return str(value)


SCALARS: dict[Any, Callable[[Any], Any]] = {int: _int, float: _float, bool: _bool, str: _str}
"""Converts a value of the annotated type to its JSON value. numpy scalars count as Python's."""


def one_of(choices: tuple[Any, ...], value: Any) -> Any:
    """Return the value if it is one of the choices; otherwise raise CodecError."""
    if value not in choices:
        raise CodecError(f"{value!r} is none of {', '.join(map(repr, choices))}")
    return value


_TAGGED: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "$bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "$datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "$date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "$time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "$timedelta": (datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda v: datetime.timedelta(*v)),
}
"""Plain values that JSON lacks, as `{tag: JSON value}`. Tuples, and dicts with other than plain str keys, use `$tuple` and `$dict`."""
_TAG_OF = {kind: (tag, write) for tag, (kind, write, _) in _TAGGED.items()}


def to_json(value: Any) -> Any:
    """A plain value as JSON. Raises CodecError for any other value, with its path."""
    kind = type(value)
    if value is None or kind in (str, bool, int, float):
        return value
    if kind is list:
        return _items(value)
    if kind is tuple:
        return {"$tuple": _items(value)}
    if kind is dict:
        if not all(type(key) is str and not key.startswith("$") for key in value):
            return {"$dict": _items([list(item) for item in value.items()])}
        body = {}
        for key, item in value.items():
            try:
                body[key] = to_json(item)
            except CodecError as error:
                raise error.inside(f"[{key!r}]", 0) from None
        return body
    if kind in _TAG_OF:
        tag, write = _TAG_OF[kind]
        return {tag: write(value)}
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return to_json(value.item())
    raise CodecError(
        f"{name_of(value)} cannot be stored: only None, bool, int, float, str, bytes, dates, times, and lists, tuples and dicts of them"
    )


def _items(values: Sequence[Any]) -> list:
    try:
        return write_each(to_json, values)
    except CodecError as error:
        raise error.inside(f"[{error.row}]", 0) from None


def from_json(body: Any) -> Any:
    """The plain value behind a `to_json` result."""
    if type(body) is list:
        return [from_json(value) for value in body]
    if type(body) is not dict:
        return body
    tag = next(iter(body), "")
    if not tag.startswith("$"):
        return {key: from_json(value) for key, value in body.items()}
    if tag == "$tuple":
        return tuple(from_json(body[tag]))
    if tag == "$dict":
        return dict(map(tuple, from_json(body[tag])))
    return _TAGGED[tag][2](body[tag])


def utf8(value: Any) -> Any:
    """A text, or lists and dicts of texts, with `?` for every lone surrogate: half of a pair, which neither UTF-8 nor a tokenizer knows.

    `json.loads` makes one of `"\\ud83d"`, and so does the JSON that a model writes.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [utf8(each) for each in value]
    return {utf8(key): utf8(each) for key, each in value.items()} if isinstance(value, dict) else value


def name_of(value: Any) -> str:
    """How an error names a value: by its type and text, or for an array by its dtype and shape."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '…'}"
