"""Records as bytes and back: every kind of field, and cut, damaged, foreign or newer files."""

from __future__ import annotations

import dataclasses
import datetime
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from traces import trace_of, turns_of

from rlx.arrays import Float, Int
from rlx.codec import MAGIC, CodecError, decode, encode
from rlx.data.source import FakeSource
from rlx.json_values import from_json, to_json
from rlx.trace import Trace, Turn
from rlx.types import STREAMS, Rollout, StepBatch, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    name: str
    values: Float
    maybe: Int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    SCHEMA: ClassVar[str] = "tests.Outer/3"

    number: int
    share: float
    kind: Literal["a", "b"]
    inner: Inner
    nested: tuple[tuple[Inner, ...], ...]
    by_name: dict[str, float]
    text: str | None
    plain: Any


PLAIN = {
    "nothing": None,
    "yes": True,
    "whole": 2**80,
    "fraction": 0.1,
    "infinite": -math.inf,
    "text": "naïve ☃",
    "bytes": b"\x00\xff",
    "tuple": (1, [2, (3,)], {}),
    "list": [[], ()],
    "when": datetime.datetime(2026, 11, 22, 9, 30, 1, 5, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
    "day": datetime.date(2026, 11, 22),
    "clock": datetime.time(9, 30),
    "long": datetime.timedelta(days=-1, microseconds=3),
    "$bytes": "no tag",
    "odd keys": {1: "one", (2, 3): None, "$tuple": 5},
    "numpy": np.float32(0.5),
}


def inner(name: str = "x", length: int = 3, maybe: bool = False) -> Inner:
    values = np.arange(length, dtype=np.float32) / 7
    return Inner(name=name, values=values, maybe=np.arange(length, dtype=np.int32) if maybe else None)


def outer(**changes: Any) -> Outer:
    fields: dict[str, Any] = {
        "number": -3,
        "share": 0.5,
        "kind": "b",
        "inner": inner("only", 0),
        "nested": ((), (inner("d"), inner("e", 5)), (inner("f", 2, maybe=True),)),
        "by_name": {"z": 0.5, "a": math.nan},
        "text": None,
        "plain": {"state": [1, 2.5, b"x"], 3: None},
    }
    return Outer(**fields | changes)


def same(a: Any, b: Any) -> bool:
    """Equal in type and content; NaN equals NaN, arrays by dtype, shape and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def test_every_kind_of_field_comes_back_as_it_was_in_arrays_that_torch_can_use() -> None:
    back = decode(encode(outer()), Outer)
    assert same(back, outer())
    assert back.nested[1][0].values.flags.writeable
    assert same(from_json(to_json(PLAIN)), PLAIN | {"numpy": 0.5})
    with pytest.raises(CodecError, match=r"set .3. cannot be stored"):
        to_json({"a": [1, {"b": (2, {3})}]})


def test_the_records_that_travel_come_back_with_their_streams() -> None:
    keys: dict[str, Any] = {"groups": 3, "members": 4, "prompt_tokens": (2, 9), "completion_tokens": (1, 400), "vocab_size": 50}
    with_streams = FakeSource(**keys, streams=tuple(STREAMS)).receive(7)
    without = FakeSource(**keys).receive(7)
    mixed = tuple(zip(*(batch.mini_batches[0] for batch in (with_streams, without)), strict=True))
    batch = StepBatch(step=7, mini_batches=(*mixed, (), tuple(dataclasses.replace(s, adapter=2) for s in mixed[0])))
    assert same(decode(encode(batch), StepBatch), batch)


def test_a_value_that_is_not_of_its_field_is_an_error() -> None:
    for change in ({"number": "3"}, {"kind": "c"}, {"inner": None}, {"inner": Inner(name="x", values=np.zeros(2))}):
        with pytest.raises(CodecError):
            decode(encode(outer(**change)), Outer)
    with pytest.raises(CodecError):
        encode(outer(plain=2**80))


# other files


def test_cut_damaged_and_foreign_bytes_are_refused() -> None:
    content = encode(outer())
    for cut in (content[:8], content[:20], content[:-1], content + b"\0"):
        with pytest.raises(CodecError, match="cut short or damaged"):
            decode(cut, Outer)
    for place in (14, len(content) // 2, len(content) - 10):
        damaged = bytearray(content)
        damaged[place] ^= 4
        with pytest.raises(CodecError, match="damaged"):
            decode(damaged, Outer)
    for foreign in (b"", b"X" + content[1:]):
        with pytest.raises(CodecError, match=r"are no tests\.Outer/3"):
            decode(foreign, Outer)
    with pytest.raises(CodecError, match="another version of rlx wrote this"):
        decode(MAGIC[:6] + b"01" + content[8:], Outer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """`Original` in another program: with another class name and more fields, which have defaults."""

    SCHEMA: ClassVar[str] = "tests.Inner/1"
    name: str
    values: Float
    maybe: Int | None = None
    later: tuple[int, ...] = (7,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Newer:
    SCHEMA: ClassVar[str] = "tests.Inner/2"
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    SCHEMA: ClassVar[str] = "tests.Inner/1"
    name: str
    values: Float


def test_the_schemas_name_decides_and_not_the_class() -> None:
    content = encode(Original(name="x", values=inner().values))
    back = decode(content, Renamed)
    assert (back.name, back.maybe, back.later) == ("x", None, (7,))
    with pytest.raises(CodecError, match=r"this is a tests\.Inner/1, but this rlx reads tests\.Inner/2"):
        decode(content, Newer)


def test_a_rollout_with_all_that_environments_put_into_it_comes_back() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Kept:
        SCHEMA: ClassVar[str] = "tests.Kept/1"
        rollouts: tuple[Rollout, ...]

    ints, floats = np.arange(3, dtype=np.int32), np.zeros(3, np.float32)
    turn = Turn(prompt_ids=ints, completion_ids=ints, logprobs=floats, versions=ints, temperature=1.0, finish_reason="stop")
    task = Task(env="e", example_id=3, index=7, row={"prompt": [{"role": "user", "content": "x"}], "answer": b"y", "nan": math.nan})
    scores: dict[str, Any] = {"reward": np.float32(0.5), "rewards": {"r": 1.0}, "metrics": {"m": np.int64(3)}, "timing": {"total": 0.25}}
    rollout = Rollout(task=task, member=1, trace=trace_of(turn, turn), prompt="p", completion=[{}], status="ok", stop="done", **scores)
    failed = dataclasses.replace(rollout, trace=Trace(), status="error", error="it broke")
    (back, also) = decode(encode(Kept(rollouts=(rollout, failed))), Kept).rollouts
    assert same(turns_of(back), turns_of(rollout))
    assert same(back.task, task)
    assert (back.reward, back.metrics, turns_of(also), also.error, also.arrival) == (0.5, {"m": 3.0}, (), "it broke", -1)
