"""Which task comes next: the mix of environments, and the examples of each."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from test_rollout_collector import FakeEnv, collector, run
from test_rollout_failures import through_a_file
from test_rollout_filters import Scored

from rlx.config.schema import BufferConfig
from rlx.rollout.collector import Collector
from rlx.rollout.example_sampler import CHUNK, ExampleSampler
from rlx.rollout.task_sampler import TaskSampler


def envs(**sizes: int) -> dict[str, Any]:
    return {name: SimpleNamespace(rows=[{"example_id": i} for i in range(size)]) for name, size in sizes.items()}


def draw(sequence: TaskSampler, count: int) -> list[tuple[str, int]]:
    return [(task.env, task.example_id) for task in (sequence.next() for _ in range(count))]


def test_one_seed_is_one_order_and_another_is_another() -> None:
    first = draw(TaskSampler(envs(a=50, b=30), {"a": 1, "b": 1}, seed=3), 200)
    assert first == draw(TaskSampler(envs(a=50, b=30), {"a": 1, "b": 1}, seed=3), 200)
    assert first != draw(TaskSampler(envs(a=50, b=30), {"a": 1, "b": 1}, seed=4), 200)


def test_an_epoch_uses_every_example_once_and_the_next_is_shuffled_anew() -> None:
    drawn = [example for _, example in draw(TaskSampler(envs(a=20), {"a": 1}, seed=0), 60)]
    epochs = [drawn[:20], drawn[20:40], drawn[40:]]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_realised_mix_is_close_to_the_weights_from_the_beginning() -> None:
    sequence = TaskSampler(envs(a=10, b=10, c=10), {"a": 3, "b": 1, "c": 0.5}, seed=0)
    seen: Counter[str] = Counter()
    for drawn in range(1, 200):
        seen[sequence.next().env] += 1
        for name, share in (("a", 3 / 4.5), ("b", 1 / 4.5), ("c", 0.5 / 4.5)):
            assert abs(seen[name] - drawn * share) <= 1.0 + 1e-9


def test_a_replacement_comes_from_the_same_environment_and_indices_never_repeat() -> None:
    sequence = TaskSampler(envs(a=10, b=10), {"a": 1, "b": 1}, seed=0)
    tasks = [sequence.next(), sequence.next("b"), sequence.next("b"), sequence.next()]
    assert [task.env for task in tasks[1:3]] == ["b", "b"]
    assert [task.index for task in tasks] == [0, 1, 3, 5], "b has the odd indices"


def test_an_environment_of_weight_0_is_not_played() -> None:
    assert {env for env, _ in draw(TaskSampler(envs(a=5, b=5), {"a": 1, "b": 0}, seed=0), 20)} == {"a"}


def test_a_mix_without_weight_or_examples_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no environment has a weight above 0"):
        TaskSampler(envs(a=5), {"a": 0}, seed=0)
    with pytest.raises(ValueError, match=r"envs\.b has no examples"):
        TaskSampler(envs(a=5, b=0), {"a": 1, "b": 1}, seed=0)


ROWS = [{"example_id": 100 + number, "info": {"level": number % 7}, "name": f"n{number:03}"} for number in range(40)]
POOLS = BufferConfig(easy_threshold=0.8, hard_threshold=0.2, easy_fraction=0.25, hard_fraction=0.25)


def drawn(examples: ExampleSampler, count: int) -> list[int]:
    return [examples.draw() for _ in range(count)]


def test_a_first_epoch_follows_its_column_and_the_next_is_shuffled() -> None:
    for column, sign in (("info.level", 1), ("-info.level", -1)):
        levels = [ROWS[row]["info"]["level"] for row in drawn(ExampleSampler("e", ROWS, 0, BufferConfig(), column), 80)]  # type: ignore[index]
        assert levels[:40] == sorted(levels[:40], key=lambda level: sign * level)
        assert levels[40:] != levels[:40]
    ties = drawn(ExampleSampler("e", ROWS, 0, BufferConfig(), "info.level"), 6)
    assert ties != sorted(ties), "examples of one level are shuffled"
    assert drawn(ExampleSampler("e", ROWS, 0, BufferConfig(), "name"), 40) == list(range(40))


def test_a_curriculum_that_the_examples_do_not_have_is_refused() -> None:
    odd: list[dict[str, Any]] = [{"example_id": 1, "x": float("nan")}, {"example_id": 1, "x": "b"}]
    for rows, column in ((ROWS, "info.age"), *(([{"example_id": 0, "x": 1.0}, one], "x") for one in odd)):
        with pytest.raises(ValueError, match=rf"envs\.e\.curriculum={column}: the examples cannot be sorted by this column"):
            ExampleSampler("e", rows, 0, BufferConfig(), column)


def test_examples_move_between_pools_and_are_drawn_by_their_shares() -> None:
    examples = ExampleSampler("e", ROWS, 0, POOLS)
    assert len(set(drawn(examples, 40))) == 40, "empty pools leave their turns to the normal one"
    for row in range(40):
        examples.played(row, 1.0 if row < 10 else 0.0 if row < 20 else 0.5)
    assert examples.counts() == {"normal": 20, "easy": 10, "hard": 10}
    rows = drawn(examples, 80)
    assert [sum(low <= row < low + 10 for row in rows) for low in (0, 10)] == [20, 20]
    assert sum(row >= 20 for row in rows) == 40
    assert sorted(row for row in rows if row < 10) == sorted([*range(10)] * 2), "every example of a pool once an epoch"
    examples.played(0, 0.5)
    assert examples.counts() == {"normal": 21, "easy": 9, "hard": 10}


def test_pools_do_not_mix_the_agents_of_a_game() -> None:
    env = FakeEnv()
    env.agents = ("left", "right")
    with pytest.raises(ValueError, match=r"(?s)envs\.e trains several agents in turn \(left, right\), and .*agents=\[left\]"):
        TaskSampler({"e": env}, {"e": 1.0}, 0, POOLS)  # type: ignore[dict-item]
    TaskSampler({"e": env}, {"e": 1.0}, 0, BufferConfig())  # type: ignore[dict-item]


def test_pools_that_took_everything_still_give_examples() -> None:
    examples = ExampleSampler("e", ROWS, 0, BufferConfig(easy_threshold=0.5))
    for row in range(40):
        examples.played(row, 1.0)
    assert examples.counts() == {"normal": 0, "easy": 40, "hard": 0}
    assert sorted(drawn(examples, 40)) == list(range(40))


def test_the_one_normal_example_of_many_is_found() -> None:
    rows = [{"example_id": number} for number in range(3 * CHUNK)]
    examples = ExampleSampler("e", rows, 0, BufferConfig(easy_threshold=0.5))
    for number in range(3 * CHUNK):
        if number != 7777:
            examples.played(number, 1.0)
    assert drawn(examples, 3) == [7777] * 3


def test_a_position_in_pools_goes_through_a_checkpoint() -> None:
    def begun() -> ExampleSampler:
        examples = ExampleSampler("e", ROWS, 0, POOLS)
        for row in drawn(examples, 33):
            examples.played(row, row / 40)
        return examples

    first, second = begun(), ExampleSampler("e", ROWS, 0, POOLS)
    state = first.state()
    after = drawn(first, 50)
    assert state.pools.sum() > 0, "the state is a copy"
    second.restore(state)
    assert second.counts() == begun().counts()
    assert drawn(second, 50) == after
    plain = ExampleSampler("e", ROWS, 0, BufferConfig())
    plain.restore(state)
    assert plain.counts() == {}


def make(jitter: random.Random | None, **settings: Any) -> tuple[dict[str, Any], Collector]:
    """Two environments with groups of 2 and 4, pools, failures and filters."""

    def behave(task: Any, member: int, attempt: int) -> Any:
        if jitter is not None and (task.example_id + member + attempt) % 5:
            return 0.003 * jitter.random()
        return "error" if (task.example_id + attempt) % 5 == 0 else 0.0

    def reward(task: Any, member: int) -> float:
        return (task.example_id % 4) / 3

    envs: dict[str, Any] = {name: Scored(reward, behave=behave, name=name, size=24) for name in "ab"}
    buffer = BufferConfig(easy_threshold=1.0, hard_threshold=0.0, hard_fraction=0.5)
    mix: dict[str, Any] = {"weights": {"a": 2.0, "b": 1.0}, "group_size": {"a": 2, "b": 4}, "num_groups": 6, "max_retries": 3}
    left_out = lambda rollouts: "zero" if rollouts[0].task.example_id % 6 == 0 else None  # noqa: E731
    return envs, collector(*envs.values(), left_out=left_out, buffer=buffer, **{**mix, **settings})


def played(jitter: random.Random | None, steps: int, given: tuple[dict[str, Any], Collector] | None = None) -> Any:
    async def main() -> Any:
        envs, groups = given or make(jitter)
        found: list[Any] = []
        for env in envs.values():
            env.version = groups.num_batches
        groups.set_version(groups.num_batches)
        for _ in range(steps):
            batch = await groups.collect()
            found.append(([(one[0].task.env, one[0].task.example_id, len(one)) for one in batch], groups.tasks.pool_sizes()))
            for env in envs.values():
                env.version = groups.num_batches
            groups.set_version(groups.num_batches)
        state = through_a_file(groups.state())
        await groups.close()
        return found, state

    return run(main)


def test_on_policy_batches_with_pools_and_two_group_sizes_depend_on_the_seed_alone_and_resume_exactly() -> None:
    at_once, _ = played(None, 8)
    assert [played(random.Random(seed), 8)[0] for seed in range(2)] == [at_once] * 2
    for batch, _ in at_once:
        assert [(env, size) for env, _, size in sorted(batch)] == sorted([("a", 2)] * 4 + [("b", 4)] * 2)
    assert at_once[-1][1]["buffer/a/hard"] > 0
    _, state = played(random.Random(5), 3)
    envs, resumed = make(None)
    resumed.restore(state)
    assert played(None, 5, (envs, resumed))[0] == at_once[3:]


async def test_the_largest_group_counts_against_the_rollouts_in_flight() -> None:
    envs: dict[str, Any] = {name: FakeEnv(lambda *_: 0.002, name=name) for name in "ab"}
    groups = collector(*envs.values(), num_groups=6, group_size={"a": 2, "b": 4}, max_steps=1, max_concurrent=7, max_retries=0)

    collecting = asyncio.ensure_future(groups.collect())
    most = 0
    while not collecting.done():
        await asyncio.sleep(0)
        most = max(most, sum(env.in_flight for env in envs.values()))
    assert sum(len(rollouts) for rollouts in collecting.result()) == 18
    assert most in (5, 6, 7)
