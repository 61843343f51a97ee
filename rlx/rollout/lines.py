"""Lines of rollouts as columns of numbers and texts, for lists: ours (`rlx.rollout.record`) and those of results in verifiers' layout."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

NONE = -1  # for integers that a line does not have
TEXTS = ("env", "stop", "status", "left_out")  # status: ok, error, timeout or cancelled; left_out: the filter's rule
NUMBERS: dict[str, type] = {
    "example": np.int64,
    "group": np.int64,
    "member": np.int64,  # index in the group, or among the rollouts of an evaluated example
    "reward": np.float32,  # NaN: none
    "advantage": np.float32,  # NaN: it was not trained on
    "tokens": np.int64,  # sampled
    "turns": np.int64,
    "truncated": np.bool_,
    "oldest": np.int64,  # the first and last policy version that sampled one of its tokens
    "newest": np.int64,
}


class _Line(msgspec.Struct):
    """The fields of a line that the table shows, of our files and of results in verifiers' layout."""

    example_id: int | None = None
    env: str = ""
    group: int | None = None
    member: int | None = None
    rollout: int | None = None  # results: its number among those of the example
    reward: float | None = None
    advantage: float | None = None
    num_tokens: int | None = None
    token_usage: dict[str, Any] | None = None  # results
    num_turns: int | None = None
    stop: str | None = None
    stop_condition: str | None = None  # results
    status: str | None = None
    left_out: str | None = None
    truncated: bool | None = None
    is_truncated: bool | None = None  # results
    error: Any = None
    versions: list[int] = []
    failed: bool = False  # a synthesis
    about: dict[str, Any] | None = None  # a synthesis: `rlx.rollout.selection.Candidate.about`

    def row(self) -> tuple[Any, ...]:
        """The values of the table's columns, `TEXTS` and then `NUMBERS`. Raises ValueError if it is no rollout."""
        about = self.about or {}
        example = about.get("example_id", self.example_id)
        if example is None:
            raise ValueError("it has no `example_id`")
        tokens = _first(about.get("num_tokens"), self.num_tokens, (self.token_usage or {}).get("output_tokens"))
        return (
            self.env,
            about.get("stop") or self.stop or self.stop_condition or "",
            self.status or ("ok" if self.error is None and not self.failed else "error"),
            self.left_out or "",
            example,
            _first(self.group),
            _first(self.member, self.rollout),
            float("nan") if self.reward is None else self.reward,
            float("nan") if self.advantage is None else self.advantage,
            tokens,
            _first(self.num_turns),
            bool(self.truncated or self.is_truncated),
            min(self.versions, default=NONE),
            max(self.versions, default=NONE),
        )


def _first(*values: int | None) -> int:
    """The first number that is there."""
    return next((value for value in values if value is not None), NONE)


_DECODER = msgspec.json.Decoder(_Line)


def decoded(line: bytes) -> Any:
    """A line as Python's json reads it: others write its NaN and Infinity, which JSON does not have. Raises ValueError."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        try:
            return json.loads(line)
        except ValueError:
            raise error from None
    except RecursionError:
        raise ValueError("a value in it is nested too deeply to be read") from None


def columns_of_lines(lines: Iterable[bytes]) -> dict[str, NDArray]:
    """The columns `TEXTS` and `NUMBERS` of lines with their line breaks, each [n]; and `line`, its number, `begin` and `end`, its place.

    Skips blank lines. Raises ValueError for a line that is no rollout.
    """
    rows: list[tuple[Any, ...]] = []
    begin = 0
    for number, line in enumerate(lines, 1):
        end = begin + len(line)
        if line.strip():
            try:
                rows.append((*_parsed(line).row(), len(rows), begin, end))
            except (msgspec.MsgspecError, TypeError, ValueError) as error:
                raise ValueError(f"line {number} is no rollout: {error}") from error
        begin = end
    kinds = dict.fromkeys(TEXTS, np.object_) | NUMBERS | dict.fromkeys(("line", "begin", "end"), np.int64)
    columns = zip(*rows, strict=True) if rows else [()] * len(kinds)
    return {name: np.array(values, dtype=kind) for (name, kind), values in zip(kinds.items(), columns, strict=True)}


def _parsed(line: bytes) -> _Line:
    """Raises ValueError, msgspec.ValidationError."""
    try:
        return _DECODER.decode(line)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError):
        return msgspec.convert(decoded(line), _Line)
