"""The index of a file of rollouts: what a list of rollouts shows, as columns, and where each rollout's line begins."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rlx.arrays import Bool, Float, Int, Long

NONE = -1  # for integers that a line does not have


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutIndex:
    """Columns of n rollouts, in the order of their lines."""

    begins: Long  # [n+1] bytes of the decompressed content before each line, and before the end
    names: tuple[str, ...]  # the texts that the next four columns point to
    env: Int  # [n] index into `names`, like the next three
    stop: Int  # [n]
    status: Int  # [n] ok, error, timeout or cancelled
    left_out: Int  # [n] the filter's rule; "" if no filter dropped the rollout
    example: Long  # [n]
    group: Long  # [n] -1: none
    member: Int  # [n] index in the group, or among the rollouts of an evaluated example
    reward: Float  # [n] NaN: none
    advantage: Float  # [n] NaN: it was not trained on
    tokens: Int  # [n] sampled
    turns: Int  # [n] -1: not recorded
    truncated: Bool  # [n]
    oldest: Int  # [n] the first and last policy version that sampled one of its tokens; -1: not recorded
    newest: Int  # [n]

    def __len__(self) -> int:
        return len(self.env)


class _Line(msgspec.Struct):
    """The fields of a line that an index needs, of our files and of results in verifiers' layout."""

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

    @property
    def length(self) -> int:
        if self.num_tokens is not None:
            return self.num_tokens
        found = (self.token_usage or {}).get("output_tokens")
        return NONE if found is None else int(found)  # null: the rollout had no answer, or its endpoint says no tokens


_DECODER = msgspec.json.Decoder(_Line)
COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("env", "stop", "status", "left_out"), np.int32),
    **dict.fromkeys(("example", "group"), np.int64),
    "member": np.int32,
    **dict.fromkeys(("reward", "advantage"), np.float32),
    **dict.fromkeys(("tokens", "turns"), np.int32),
    "truncated": np.bool_,
    **dict.fromkeys(("oldest", "newest"), np.int32),
}


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


def _line(line: bytes) -> _Line:
    """Raises ValueError, msgspec.ValidationError."""
    try:
        return _DECODER.decode(line)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, RecursionError):
        return msgspec.convert(decoded(line), _Line)


class Indexer:
    """Collects the index of a file while its lines pass by."""

    def __init__(self) -> None:
        self.begins = [0]
        self.lines = 0  # so far, with blank ones
        self._names: dict[str, int] = {}
        self._rows: list[tuple[Any, ...]] = []

    def add(self, line: bytes) -> None:
        """Add the next line, with its line break. Skips a blank one. Raises ValueError if it is no rollout."""
        self.lines += 1
        if not line.strip():
            self.begins[-1] += len(line)  # JSON allows blanks at the end: they belong to the line before
            return
        try:
            self._rows.append(self._row(_line(line)))
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise ValueError(f"line {self.lines} is no rollout: {error}") from error
        self.begins.append(self.begins[-1] + len(line))

    def _row(self, one: _Line) -> tuple[Any, ...]:
        """The values of COLUMNS."""
        if one.about is not None:
            one.example_id, one.num_tokens, one.stop = (one.about.get(name) for name in ("example_id", "num_tokens", "stop"))
        if one.example_id is None:
            raise ValueError("it has no `example_id`")
        status = one.status or ("ok" if one.error is None and not one.failed else "error")
        texts = (one.env, one.stop or one.stop_condition or "", status, one.left_out or "")
        return (
            *(self._names.setdefault(text, len(self._names)) for text in texts),
            one.example_id,
            NONE if one.group is None else one.group,
            next((number for number in (one.member, one.rollout) if number is not None), NONE),
            math.nan if one.reward is None else one.reward,
            math.nan if one.advantage is None else one.advantage,
            one.length,
            NONE if one.num_turns is None else one.num_turns,
            bool(one.truncated or one.is_truncated),
            min(one.versions, default=NONE),
            max(one.versions, default=NONE),
        )

    def done(self) -> RolloutIndex:
        """The index of the lines so far. Raises ValueError for a number that its column cannot hold."""
        columns = zip(*self._rows, strict=True) if self._rows else ((),) * len(COLUMNS)
        try:
            arrays: dict[str, Any] = {name: np.array(values, kind) for (name, kind), values in zip(COLUMNS.items(), columns, strict=True)}
        except OverflowError as error:
            raise ValueError(str(error)) from error
        return RolloutIndex(begins=np.array(self.begins, np.int64), names=tuple(self._names), **arrays)


def index_of(lines: Iterable[bytes]) -> RolloutIndex:
    """The index of lines, each with its line break. Raises ValueError for a line that is no rollout."""
    indexer = Indexer()
    for line in lines:
        indexer.add(line)
    return indexer.done()
