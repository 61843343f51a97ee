"""The orchestrator's state through a file: finished groups, replacements, counters, and objects that a file cannot hold."""

from __future__ import annotations

import asyncio
import datetime
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from test_codec_records import same
from test_rollout_collector import FakeEnv, collector, indices, run
from traces import turns_of

from rlx.codec import CodecError, decode, encode
from rlx.rollout.state import CollectorState, OrchestratorState, PlayedGroup, played_group, unpacked
from rlx.trace import Trace
from rlx.types import Rollout, Task


def through_a_file(state: CollectorState) -> CollectorState:
    return decode(bytearray(encode(OrchestratorState(collector=state))), OrchestratorState).collector


@dataclass(frozen=True)
class Kept:
    SCHEMA: ClassVar[str] = "tests.Kept/1"
    group: PlayedGroup


class Picture:
    """An object that an environment may put into a message."""

    def __repr__(self) -> str:
        return "a picture"


def test_a_collector_goes_on_from_a_file_with_its_finished_groups_and_its_counters() -> None:
    async def begun() -> tuple[CollectorState, list[list[Rollout]]]:
        env = FakeEnv(lambda task, member, attempt: "error" if (task.index, attempt) == (2, 0) else 0.0)
        groups = collector(env, oversampling_factor=3, max_async_level=1)
        groups.left_out = lambda rollouts: "zero_advantage" if rollouts[0].task.index == 1 else None
        groups.set_version(0)
        await groups.collect()
        while groups.in_flight:
            await asyncio.sleep(0.001)
        groups.tally.failures[0] = replace(groups.tally.failures[0], completion=[{"content": Picture()}])
        state = through_a_file(groups.state())
        batch = await groups.collect()
        await groups.close()
        return state, batch

    state, expected = run(begun)
    assert len(state.finished) >= 4
    assert all(group.task.row == {"example_id": group.task.example_id} for group in state.finished), "the full row is stored once per group"
    assert all(rollout.task.row == {} for group in state.finished for rollout in group.rollouts)
    assert state.tally.failed == {"error": 2}
    assert state.tally.failures[0].completion == [{"content": "a picture"}]
    assert [group.rule for group in state.filtered] in ([], ["zero_advantage"])

    async def go_on() -> list[list[Rollout]]:
        groups = collector(FakeEnv(), oversampling_factor=3, max_async_level=1)
        groups.restore(state)
        assert (groups.taken, groups.tally.failed["error"], groups.tally.finished) == (1, 2, state.tally.finished)
        again = groups.state()
        assert [group.task for group in again.finished] == [group.task for group in state.finished]
        batch = await groups.collect()
        await groups.close()
        return batch

    went_on = run(go_on)
    assert indices(went_on) == indices(expected)
    assert same([[turns_of(one) for one in group] for group in went_on], [[turns_of(one) for one in group] for group in expected])
    assert all(one.task.row["example_id"] == one.task.example_id for group in went_on for one in group)


def test_what_people_read_is_kept_as_text_where_it_cannot_be_kept_and_rows_come_back_exactly() -> None:
    shown: Any = [{"role": "user", "content": [{"image": Picture()}, {"text": "what is this?"}]}, np.float32(1)]
    row = {"x": (1, [2]), "bytes": b"x", "when": datetime.date(2026, 11, 22), "nan": float("inf")}
    task = Task(env="e", example_id=0, index=0, row=row)
    rollout = Rollout(
        task=task, member=0, trace=Trace(), prompt=shown, completion=Picture(), reward=0.0, rewards={}, metrics={}, status="ok", stop=""
    )
    kept = Kept(group=played_group([rollout]))
    back = decode(encode(kept), Kept).group
    assert back.rollouts[0].prompt == [{"role": "user", "content": [{"image": "a picture"}, {"text": "what is this?"}]}, 1.0]
    assert (unpacked(back.task), back.rollouts[0].completion) == (task, "a picture")
    with pytest.raises(CodecError, match="Picture a picture cannot be stored"):
        played_group([replace(rollout, task=replace(task, row={"info": {"image": Picture()}}))])
