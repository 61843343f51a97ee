"""The orchestrator's state through a file: finished groups, replacements, counters, and objects that a file cannot hold."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
from test_codec_records import same
from test_rollout_collector import FakeEnv, collector, indices, run
from traces import turns_of

from rlx.codec import decode, encode
from rlx.rollout.state import CollectorState, OrchestratorState
from rlx.types import Rollout


def through_a_file(state: CollectorState) -> CollectorState:
    return decode(bytearray(encode(OrchestratorState(collector=state))), OrchestratorState).collector


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
        shown = {"prompt": np.float32(1), "completion": [{"content": Picture()}]}
        groups.tally.failures[0] = replace(groups.tally.failures[0], **shown)
        state = through_a_file(groups.state())
        batch = await groups.collect()
        await groups.close()
        return state, batch

    state, expected = run(begun)
    assert len(state.finished) >= 4
    assert all(rollout.task.row == {} for group in state.finished for rollout in group.rollouts)
    assert state.tally.failed == {"error": 2}
    assert (state.tally.failures[0].prompt, state.tally.failures[0].completion) == (1.0, [{"content": "a picture"}])
    assert [group.rule for group in state.filtered] in ([], ["zero_advantage"])

    async def go_on() -> list[list[Rollout]]:
        groups = collector(FakeEnv(), oversampling_factor=3, max_async_level=1)
        groups.restore(state)
        assert (groups.taken, groups.tally.failed["error"], groups.tally.finished) == (1, 2, state.tally.finished)
        again = groups.state()
        assert [group.rollouts[0].task for group in again.finished] == [group.rollouts[0].task for group in state.finished]
        batch = await groups.collect()
        await groups.close()
        return batch

    went_on = run(go_on)
    assert indices(went_on) == indices(expected)
    assert same([[turns_of(one) for one in group] for group in went_on], [[turns_of(one) for one in group] for group in expected])
    assert all(one.task.row["example_id"] == one.task.example_id for group in went_on for one in group)
