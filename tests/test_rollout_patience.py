"""Groups that would be too old for the next batch: how long a complete batch waits for them."""

from __future__ import annotations

import random

import pytest
from test_rollout_collector import FakeEnv, collector, indices, run, settled

from rlx.rollout.collector import Collector
from rlx.types import Rollout, Task


async def first_batch(groups: Collector, env: FakeEnv) -> list[list[Rollout]]:
    """The batch of step 0, without group 1, which still plays. The servers have version 1 afterwards."""
    batch = await groups.collect()
    assert indices(batch) == [0, 2, 3, 4]
    env.version = 1
    groups.set_version(1)
    return batch


def test_a_group_that_would_expire_is_waited_for_so_that_long_rollouts_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.rollout.collector.PATIENCE_FLOOR", 60.0)  # also on a machine that pauses
    rng = random.Random(0)
    lengths: dict[tuple[int, int], float] = {}

    def heavy_tail(task: Task, member: int, attempt: int) -> float:
        return lengths.setdefault((task.index, member), min(0.1, 0.002 * rng.paretovariate(0.8)))

    env = FakeEnv(heavy_tail, size=1000)
    groups = collector(env, max_async_level=1, group_size=4, max_steps=30)

    async def main() -> None:
        for step in range(30):
            await groups.collect()
            env.version = step + 1
            groups.set_version(step + 1)

    run(main)
    assert groups.tally.dropped == {}
    assert len(lengths) == 30 * 16, "every rollout that began is in a batch"


def test_a_group_that_hangs_does_not_hold_up_the_batch_and_is_dropped_counted_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.rollout.collector.PATIENCE_FLOOR", 0.1)
    env = FakeEnv(lambda task, member, attempt: 3600.0 if task.index == 1 else 0.0)
    groups = collector(env, max_async_level=1)

    async def main() -> None:
        first = await first_batch(groups, env)
        second = await groups.collect()
        assert 1 not in indices(second)
        assert groups.tally.dropped == {"off_policy": 2}
        await settled()
        assert 1 in env.ended, "the update to version 2 would still pause and continue its requests"
        env.version = 2
        groups.set_version(2)
        third = await groups.collect()
        assert len({*indices(first), *indices(second), *indices(third)}) == 12
        await groups.close()

    run(main)
