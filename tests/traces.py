"""Traces made of turns, and traces as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.rollout.samples import branches_of
from rlx.trace import Trace, TraceBuilder, Turn
from rlx.types import Rollout


def trace_of(*turns: Turn) -> Trace:
    """The trace of these requests, in their order, with made-up messages."""
    said = TraceBuilder()
    for number, turn in enumerate(turns):
        said.add(number, [{"role": "user", "content": str(number)}], None, {"role": "assistant", "content": ""}, turn)
    return said.trace(None, {number: turn.observation_mask for number, turn in enumerate(turns) if turn.observation_mask is not None})


def turns_of(played: Rollout | Trace) -> tuple[Turn, ...]:
    """The requests with known tokens, each with its whole prompt."""
    trace = played if isinstance(played, Trace) else played.trace
    return tuple(_turn(trace, index) for index in trace.answers if len(trace.nodes[index].token_ids))


def _turn(trace: Trace, index: int) -> Turn:
    node, whole, path = trace.nodes[index], trace.ids(index), trace.path(index)
    size, sampled = len(whole), len(node.logprobs)
    begin = next((at + 1 for at in reversed(range(len(path) - 1)) if trace.nodes[path[at]].sampled), 0)
    new = [trace.nodes[place] for place in path[begin:]]  # since the answer before it
    marks = np.concatenate(
        [np.zeros(len(one.token_ids), np.int32) if one.observation_mask is None else one.observation_mask for one in new]
    )
    before = np.zeros(size - len(marks), np.int32)
    return Turn(
        prompt_ids=whole[: size - sampled],
        completion_ids=whole[size - sampled :],
        logprobs=node.logprobs,
        versions=node.token_versions,
        temperature=node.temperature,
        finish_reason=node.finish_reason,
        teacher_prompt_ids=trace.teacher_prompt(path, size - sampled),
        observation_mask=np.concatenate([before, marks])[: size - sampled] if marks.any() else None,
    )


def plain(turns: Sequence[Turn]) -> list[Any]:
    """What two turns must have in common to be the same."""
    return [
        (turn.prompt_ids.tolist(), turn.completion_ids.tolist(), turn.logprobs.tolist(), turn.versions.tolist(), turn.temperature)
        for turn in turns
    ]


def same(turn: Turn, other: Turn) -> bool:
    """Whether two turns are of the same request."""
    return plain([turn]) == plain([other])


@dataclass
class Draft:
    """A sample's tokens, and where each of its turns was sampled."""

    ids: Any
    spans: list[tuple[int, Turn]]


def merge(turns: Sequence[Turn], strategy: str) -> list[Draft]:
    """The samples of these requests."""
    trace = trace_of(*turns)
    of = dict(zip(trace.answers, turns, strict=True))
    return [
        Draft(trace.ids(branch.path[-1]), [(len(of[place].prompt_ids), of[place]) for place in sorted(branch.own)])
        for branch in branches_of(trace, strategy)
    ]


def tokens_of(turn: Turn) -> tuple[Any, Any]:
    """([P], [C]) prompt and answer, as `Chat.extend` takes them."""
    return turn.prompt_ids, turn.completion_ids
