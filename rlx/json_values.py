"""Plain values as JSON and back: None, bool, int, float, str, bytes, dates and times, and lists, tuples and dicts of plain values.

Rows of data sets travel and are stored so, because an environment must get back exactly what it gave.
"""

from __future__ import annotations

import base64
import datetime
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


def one_text(parts: Iterable[str]) -> str:
    """The parts of a message's content as one text, in data sets as in environments: with line breaks, as vLLM's chat route joins them."""
    return "\n".join(parts)


class CodecError(ValueError):
    """A value or record that cannot be written, or bytes that are not the wanted record."""


_TAGGED: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "$bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "$datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "$date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "$time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "$timedelta": (datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda v: datetime.timedelta(*v)),
    "$tuple": (tuple, lambda value: list(map(to_json, value)), lambda body: tuple(map(from_json, body))),
}
"""Plain values that JSON lacks, as `{tag: JSON value}`. Dicts with other than plain str keys use `$dict`."""
_TAG_OF = {kind: (tag, write) for tag, (kind, write, _) in _TAGGED.items()}


def to_json(value: Any) -> Any:
    """A plain value as JSON. Raises CodecError for any other value."""
    kind = type(value)
    if value is None or kind in (str, bool, int, float):
        return value
    if kind is list:
        return list(map(to_json, value))
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {"$dict": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if kind in _TAG_OF:
        tag, write = _TAG_OF[kind]
        return {tag: write(value)}
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return to_json(value.item())
    raise CodecError(
        f"{kind.__name__} {value!r:.60} cannot be stored: only None, bool, int, float, str, bytes, dates, times, and lists, tuples and "
        "dicts of them"
    )


def from_json(body: Any) -> Any:
    """The plain value behind a `to_json` result."""
    if type(body) is list:
        return list(map(from_json, body))
    if type(body) is not dict:
        return body
    tag = next(iter(body), "")
    if not tag.startswith("$"):
        return {key: from_json(value) for key, value in body.items()}
    if tag == "$dict":
        return {from_json(key): from_json(value) for key, value in body[tag]}
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
