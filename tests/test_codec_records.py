"""Records as bytes and back: every kind of field, errors that name the field, and cut, damaged, foreign or newer files."""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
import struct
import types
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from traces import trace_of, turns_of
from typing_extensions import TypeAliasType

from rlx.arrays import Float, Int
from rlx.codec import CodecError, _column, decode, encode
from rlx.data.source import FakeSource
from rlx.trace import Trace, Turn
from rlx.types import STREAMS, Rollout, StepBatch, Task, TrainingSample


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
    flag: bool
    kind: Literal["a", "b"]
    inner: Inner
    many: tuple[Inner, ...]
    nested: tuple[tuple[Inner, ...], ...]
    listed: list[int]
    by_name: dict[str, float]
    text: str | None
    plain: Any
    rows: tuple[dict[str, Any], ...] = ()


PLAIN = {
    "nothing": None,
    "yes": True,
    "whole": 2**80,
    "fraction": 0.1,
    "infinite": -math.inf,
    "text": "naïve ☃ \ud800",
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
        "share": 1,
        "flag": False,
        "kind": "b",
        "inner": inner("only", 0),
        "many": (inner("a", 4), inner("b", 1, maybe=True), inner("c", 2)),
        "nested": ((), (inner("d"), inner("e", 5)), (inner("f", 2, maybe=True),)),
        "listed": [3, 1, 2],
        "by_name": {"z": 0.5, "a": math.nan},
        "text": None,
        "plain": PLAIN,
        "rows": ({"x": 1}, {"y": math.nan, "z": None}),
    }
    return Outer(**fields | changes)


def there_and_back(record: Any) -> Any:
    return decode(bytearray(b"".join(encode(record))), type(record))


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


def test_every_kind_of_field_comes_back_as_it_was() -> None:
    back = there_and_back(outer())
    assert same(back.plain, PLAIN | {"numpy": 0.5})
    assert same(dataclasses.replace(back, plain=None), outer(plain=None, share=1.0))
    assert same(there_and_back(outer(many=(), nested=(), rows=(), text="t", by_name={}, plain=[])).nested, ())


def test_an_array_type_that_is_an_alias_with_a_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy 2.5 makes `NDArray` such an alias, and `NDArray[np.int32]` names it instead of `np.ndarray`."""
    alias = TypeAliasType("alias", Any)
    monkeypatch.setattr("rlx.codec.NDArray", alias)
    written: list[Any] = []
    _column(types.GenericAlias(alias, (np.int32,))).write([np.arange(3, dtype=np.int32)], written)  # type: ignore[arg-type]
    assert b"".join(bytes(piece) for piece in written)[:12] == np.arange(3, dtype=np.int32).tobytes()


def test_the_records_that_travel_come_back_with_their_streams() -> None:
    keys: dict[str, Any] = {"groups": 3, "members": 4, "prompt_tokens": (2, 9), "completion_tokens": (1, 400), "vocab_size": 50}
    with_streams = FakeSource(**keys, streams=tuple(STREAMS)).receive(7)
    without = FakeSource(**keys).receive(7)
    mixed = tuple(zip(*(batch.mini_batches[0] for batch in (with_streams, without)), strict=True))
    batch = StepBatch(step=7, mini_batches=(*mixed, (), tuple(dataclasses.replace(s, adapter=2) for s in mixed[0])))
    assert same(there_and_back(batch), batch)


def test_arrays_are_writable_views_of_the_one_buffer() -> None:
    content = bytearray(b"".join(encode(outer())))
    back = decode(content, Outer)
    for one in (back.inner, *back.many, *back.nested[1]):
        assert one.values.flags.writeable
    before = bytes(content)
    back.many[0].values[:] = 123.0
    assert sum(a != b for a, b in zip(before, content, strict=True)) > 0, "arrays must share the buffer's memory"
    assert not decode(before, Outer).many[0].values.flags.writeable, "arrays on bytes must be read-only"


def test_every_array_begins_at_a_multiple_of_64_bytes() -> None:
    content = bytearray(b"".join(encode(outer())))
    base = np.frombuffer(content, np.uint8).ctypes.data
    back = decode(content, Outer)
    assert [(column.values.ctypes.data - base) % 64 for column in (back.many[0], back.nested[1][0])] == [0, 0]


@pytest.mark.parametrize("values", [[0.0, -0.0], [math.nan, math.inf], [1.0, 1.0]])
def test_arrays_of_few_runs_take_no_room_and_come_back_bit_for_bit(values: list[float]) -> None:
    long = np.repeat(np.array(values, np.float32), [70_000, 30_000])
    long.view(np.uint32)[5:9] = 0x7FC00001  # a NaN with other bits
    record = outer(many=(inner(), Inner(name="long", values=long), inner()))
    content = b"".join(encode(record))
    assert len(content) < 10_000
    assert same(decode(bytearray(content), Outer).many[1].values, long)
    assert decode(bytearray(content), Outer).many[1].values.flags.writeable


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"number": "3"}, "number: str '3' is no int"),
        ({"share": None}, "share: NoneType None is no float"),
        ({"flag": 1}, "flag: int 1 is no bool"),
        ({"kind": "c"}, "kind: 'c' is none of 'a', 'b'"),
        ({"listed": [1, 2.5]}, "listed[1]: float 2.5 is no int"),
        ({"listed": (1,)}, "listed: tuple (1,) is no list"),
        ({"by_name": {"a": 1.0, "b": "x"}}, "by_name['b']: str 'x' is no float"),
        ({"by_name": {1: 1.0}}, "by_name: dict {1: 1.0} is no dict with str keys"),
        ({"inner": None}, "inner: NoneType None is no Inner"),
        ({"nested": ((), (inner(), dataclasses.replace(inner(), name=3)))}, "nested[1][1].name: int 3 is no str"),
        ({"many": (inner(), Inner(name="x", values=np.zeros(2)))}, "many[1].values: an array of float64 [2] is no array of float32 [n]"),
        ({"many": (inner(), inner(), dataclasses.replace(inner(), maybe=[1]))}, "many[2].maybe: list [1] is no array of int32 [n]"),
        ({"plain": {"a": [1, {"b": (2, {3})}]}}, "plain['a'][1]['b'][1]: set {3} cannot be stored"),
        ({"rows": ({}, {"image": object})}, "rows[1]['image']: type <class 'object'> cannot be stored"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_an_error_that_names_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CodecError, match=f"^{re.escape(message)}"):
        encode(outer(**change))


def test_an_annotation_that_the_codec_does_not_know_is_an_error_at_once() -> None:
    @dataclass(frozen=True)
    class Odd:
        SCHEMA: ClassVar[str] = "tests.Odd/1"
        value: complex

    with pytest.raises(TypeError, match=r"does not know the annotation .*complex"):
        encode(Odd(1j))


# other files


def test_cut_damaged_and_foreign_bytes_are_refused() -> None:
    content = b"".join(encode(outer()))
    for cut in (b"", content[:20], content[:100], content[:-1]):
        with pytest.raises(CodecError, match=r"(bytes are no tests\.Outer/3|bytes were read): the file was cut short"):
            decode(cut, Outer)
    with pytest.raises(CodecError, match="something was appended to it"):
        decode(content + b"\0", Outer)
    for place in (40, len(content) // 2, len(content) - 100):
        damaged = bytearray(content)
        damaged[place] ^= 4
        with pytest.raises(CodecError, match="damaged after they were written"):
            decode(damaged, Outer)
    with pytest.raises(CodecError, match=r"begins with b'RLXREC', not b'XLXREC': this is no tests\.Outer/3"):
        decode(b"X" + content[1:], Outer)
    with pytest.raises(CodecError, match=r"this has layout b'02', but this rlx reads b'01': another version of rlx wrote it"):
        decode(content[:6] + b"02" + content[8:], Outer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """`Inner` in another program: with another class name and one more field, which has a default."""

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
    content = bytearray(b"".join(encode(Original(name="x", values=inner().values))))
    back = decode(content, Renamed)
    assert (back.name, back.maybe, back.later) == ("x", None, (7,))
    with pytest.raises(CodecError, match=r"this is a tests\.Inner/1, written by an earlier rlx, but this one reads tests\.Inner/2"):
        decode(content, Newer)
    with pytest.raises(CodecError, match=r"this is a tests\.Inner/2, written by a newer rlx, but this one reads tests\.Inner/1"):
        decode(b"".join(encode(Newer(name="x"))), Original)
    with pytest.raises(CodecError, match=r"this is a tests\.Inner/1, but a tests\.Outer/3 was requested"):
        decode(content, Outer)
    more = b"".join(encode(Renamed(name="x", values=inner().values)))
    with pytest.raises(CodecError, match=r"this rlx does not know the fields of this tests\.Inner/1: 'later'; another version"):
        decode(more, Original)


def test_the_header_is_plain_json_behind_a_prefix_that_any_program_can_read() -> None:
    content = b"".join(encode(Newer(name="x")))
    magic, container, header, size, _ = struct.unpack_from("<6s2sQQI4x", content)
    assert (magic, container, size) == (b"RLXREC", b"01", len(content))
    assert content[32 : 32 + header] == b'{"schema":"tests.Inner/2","record":{"name":["x"]}}'


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
    (back, also) = there_and_back(Kept(rollouts=(rollout, failed))).rollouts
    assert same(turns_of(back), turns_of(rollout))
    assert same(back.task, task)
    assert (back.reward, back.metrics, turns_of(also), also.error, also.arrival) == (0.5, {"m": 3.0}, (), "it broke", -1)


def test_a_sample_costs_about_eight_bytes_a_token() -> None:
    keys: dict[str, Any] = {"groups": 8, "members": 8, "prompt_tokens": (200, 200), "completion_tokens": (1000, 1400), "vocab_size": 50}
    batch = FakeSource(**keys).receive(0)
    samples: tuple[TrainingSample, ...] = batch.mini_batches[0]
    tokens = sum(len(sample.token_ids) for sample in samples)
    assert sum(map(len, encode(batch))) < 8.2 * tokens
