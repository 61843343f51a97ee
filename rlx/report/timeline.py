"""A run's timeline: what each role did when, in the trace-event format that https://ui.perfetto.dev and chrome://tracing read.

    trainer       step 7: wait for the batch | forward and backward | optimizer | gather weights
    orchestrator  step 7: wait for rollouts | wait for weights        and how many rollouts are in flight
    servers       version 7 loads
    rollouts      sums 12.3 (group 12, member 3), on as many lanes as rollouts ran at once
    requests      those of the rollouts to the policy: a turn each

It is made of `metrics.jsonl`, `updates.jsonl` and `rollouts/`. The parts of a step are known by their lengths, not by their order.
"""

from __future__ import annotations

import contextlib
import gzip
import heapq
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import zstandard

from rlx.metrics import read_metrics
from rlx.paths import RunPaths, atomic
from rlx.rollout.record import read_rollouts

T = TypeVar("T")
NEWEST = 50  # steps whose rollouts are drawn: reading those of a long run takes minutes
TRACKS = ("trainer", "orchestrator", "servers", "rollouts", "requests")
PARTS = {  # of a step, in the order in which they are drawn
    "trainer": ("wait_batch", "forward_backward", "optimizer", "broadcast"),
    "orchestrator": ("wait_rollouts", "wait_weights"),
}


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took `seconds`, from a Unix time on."""

    began: float
    seconds: float
    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def write_timeline(paths: RunPaths) -> int:
    """Write the file; returns the number of its events, and writes nothing if there is none."""
    events = list(timeline(paths))
    if events:
        names = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in enumerate(TRACKS)]
        content = json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"}).encode()
        with atomic(paths.timeline) as temporary:
            temporary.write_bytes(gzip.compress(content, mtime=0))
    return len(events)


def timeline(paths: RunPaths) -> Iterator[dict[str, Any]]:
    """The events of a run. Records that are damaged, or of an earlier rlx, are left out."""
    steps = (record for record, _ in read_metrics(paths.metrics))
    for events in _each(_step, steps):
        yield from events
    lines = paths.updates.read_bytes().splitlines() if paths.updates.is_file() else []
    yield from _placed("servers", (span for span in _each(_update, lines) if math.isfinite(span.began + span.seconds)))
    rollouts: list[Span] = []
    requests: list[Span] = []
    for file in sorted(paths.rollouts.glob("step_*.jsonl.zst"))[-NEWEST:]:
        for rollout, turns in _each(_rollout, _readable(file)):
            if all(math.isfinite(span.began + span.seconds) for span in (rollout, *turns)):
                rollouts.append(rollout)
                requests += turns
    yield from _placed("rollouts", rollouts)
    yield from _placed("requests", requests)


def _each(read: Callable[[Any], T], records: Iterable[Any]) -> Iterator[T]:
    """What `read` makes of each record that it can read."""
    for record in records:
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError, OverflowError):
            yield read(record)


def _readable(file: Path) -> Iterator[Any]:
    with contextlib.suppress(OSError, ValueError, zstandard.ZstdError):
        yield from read_rollouts(file)


def _update(line: bytes) -> Span:
    record = json.loads(line)
    return Span(record["began"] + 0.0, record["seconds"] + 0.0, f"version {record['version']} loads")


def _rollout(record: Mapping[str, Any]) -> tuple[Span, list[Span]]:
    """A rollout and its requests to the policy."""
    name = f"{record['env']} {record['group']}.{record['member']}"
    facts = {key: record.get(key) for key in ("reward", "advantage", "stop", "num_tokens", "versions", "left_out", "error")}
    turns = [Span(at + 0.0, seconds + 0.0, f"{name} turn {turn}") for turn, (at, seconds) in enumerate(record["requests"])]
    return Span(record["began"] + 0.0, record["seconds"] + 0.0, name, facts), turns


def _step(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A step of the trainer or the orchestrator and, inside it, its parts one after the other."""
    source, seconds = record["source"], record["time/step"]
    at = began = record["time"] - seconds
    events = [_event(source, 0, Span(began, seconds, f"step {record['step']}"))]
    for part in PARTS[source]:
        seconds = record.get(f"time/{part}", 0.0)
        events.append(_event(source, 0, Span(at, seconds, part.replace("_", " "))))
        at += seconds
    if "perf/in_flight" in record:
        in_flight = {"in flight": record["perf/in_flight"]}
        events.append({"ph": "C", "name": "rollouts", "pid": TRACKS.index(source), "ts": 1e6 * record["time"], "args": in_flight})
    return events


def _placed(track: str, spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """Each span on the lowest lane that is free when it begins."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (end, lane)
    for span in sorted(spans, key=lambda span: span.began):
        while busy and busy[0][0] <= span.began:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (span.began + span.seconds, lane))
        yield _event(track, lane, span)


def _event(track: str, lane: int, span: Span) -> dict[str, Any]:
    """A slice; times in whole microseconds: as floats neighbours would overlap, and Perfetto leaves such slices out."""
    began = round(1e6 * span.began)
    ends = round(1e6 * (span.began + span.seconds))
    where = {"ph": "X", "pid": TRACKS.index(track), "tid": lane, "ts": began, "dur": ends - began}
    return {**where, "name": span.name, "args": dict(span.facts)}
