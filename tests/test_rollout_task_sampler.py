"""The order of tasks and the mix of environments."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

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
