"""At max_async_level 0 the seed alone determines a batch, with several environments, failures, filters and any order of finishing."""

from __future__ import annotations

import asyncio
import random
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_orchestrator_run import StandInServers, config_of, metrics, play, reproducible
from test_rollout_collector import FakeEnv, collector, run
from test_rollout_filters import Scored

from rlx.codec import decode, encode
from rlx.config.schema import DifficultyFilter, TrainedEnvConfig
from rlx.policy.base import request_seed
from rlx.rollout.collector import Collector
from rlx.rollout.failures import ErrorRate, RolloutsFailed
from rlx.rollout.record import read_rollouts
from rlx.rollout.state import OrchestratorState
from rlx.rollout.task_sampler import TaskSampler, interleave_envs
from rlx.trace import Trace
from rlx.types import Rollout, Task

pytestmark = pytest.mark.slow

WEIGHTS = {"a": 3.0, "b": 1.0, "c": 2.0}


def outcome(task: Task, *more: int) -> int:
    """0 … 99, always the same for a task."""
    return zlib.crc32(repr((request_seed(0, task, *(*more, 0, 0)[:2], 0), *more)).encode()) % 100


class Uneven(Scored):
    """Every attempt first takes the time that `jitter` chooses, then fails or succeeds."""

    jitter: random.Random | None = None

    async def rollout(self, task: Task, *more: Any) -> Rollout:
        if self.jitter is not None:
            await asyncio.sleep(0.004 * self.jitter.random())
        return await super().rollout(task, *more)


def environments(jitter: random.Random | None) -> dict[str, Uneven]:
    def behave(task: Task, member: int, attempt: int) -> Any:
        return "error" if outcome(task, member, attempt) < 30 else 0.0

    def reward(task: Task, member: int) -> float:
        return float(outcome(task) >= 45)  # filters drop the other groups

    envs = {name: Uneven(reward, behave=behave, name=name, size=30) for name in WEIGHTS}
    for env in envs.values():
        env.jitter = jitter
    return envs


def make(envs: dict[str, Any], weights: dict[str, float] = WEIGHTS, **settings: Any) -> Collector:
    left_out = lambda rollouts: None if rollouts[0].reward else "zero"  # noqa: E731
    return collector(*envs.values(), left_out=left_out, weights=weights, **{"num_groups": 9, "group_size": 3, **settings})


def seen(groups: list[list[Rollout]]) -> list[tuple[str, int, int]]:
    return [(rollouts[0].task.env, rollouts[0].task.example_id, rollouts[0].task.index) for rollouts in groups]


def batches(jitter: random.Random | None, steps: int = 5, **settings: Any) -> list[Any]:
    async def main() -> list[Any]:
        envs, found = environments(jitter), []
        groups = make(envs, **settings)
        for step in range(steps):
            batch = await groups.collect()
            counts = (dict(groups.tally.failed), groups.tally.finished, sorted(groups.tally.dropped.items()))
            found.append((seen(batch), seen([rollouts for _, rollouts in groups.filtered]), counts))
            for env in envs.values():
                env.version = step + 1
            groups.set_version(step + 1)
        await groups.close()
        return found

    return run(main)


@pytest.mark.parametrize("settings", [{}, {"max_concurrent": 7}, {"max_rounds": 1}], ids=["free", "few at once", "few replaced"])
def test_batches_are_equal_whatever_ends_first_with_failures_and_filters_in_a_mix(settings: dict[str, int]) -> None:
    at_once = batches(None, max_retries=2, **settings)
    for seed in range(3):
        assert batches(random.Random(seed), max_retries=2, **settings) == at_once
    assert any(left_out for _, left_out, _ in at_once)
    assert at_once[-1][2][0]["error"] > 0
    sizes = [len(batch) for batch, _, _ in at_once]
    assert (min(sizes) < 9) == ("max_rounds" in settings), "only the third case reaches the limit on filtered groups"


def test_an_index_is_used_once_and_follows_from_the_environments_own_order() -> None:
    drawn = [index for batch, left_out, _ in batches(random.Random(0), max_retries=2) for _, _, index in (*batch, *left_out)]
    assert len(set(drawn)) == len(drawn)
    sequence = TaskSampler(environments(None), WEIGHTS, 0)  # type: ignore[arg-type]
    own = [sequence.next("b") for _ in range(4)]
    other = TaskSampler(environments(None), WEIGHTS, 0)  # type: ignore[arg-type]
    for name in "acca":
        other.next(name)
    assert [other.next("b") for _ in range(4)] == own


def test_a_batch_spreads_its_environments_evenly() -> None:
    tasks = [Task(env="a", example_id=0, index=2 * n, row={}) for n in (7, 9, 4, 20)] + [
        Task(env="b", example_id=0, index=n, row={}) for n in (1, 3)
    ]
    in_order = interleave_envs(tasks)
    assert "".join(task.env for task in in_order) == "abaaba"
    assert [task.index // 2 for task in in_order if task.env == "a"] == [4, 7, 9, 20]
    assert interleave_envs(tasks[::-1]) == in_order


async def test_an_environment_that_is_always_left_out_leaves_the_others_their_groups() -> None:
    envs: dict[str, Any] = {"a": Scored(lambda *_: 0.0, name="a"), "b": Scored(lambda *_: 1.0, name="b")}
    groups = make(envs, {"a": 1.0, "b": 1.0}, num_groups=8, max_rounds=2)

    for step in range(4):
        assert [env for env, _, _ in seen(await groups.collect())] == ["b"] * 4
        for env in envs.values():
            env.version = step + 1
        groups.set_version(step + 1)
    await groups.close()


def test_groups_in_flight_keep_their_place_in_a_run_with_another_mix_and_indices_stay_unique() -> None:
    slow = 3600.0
    first: dict[str, Any] = {name: FakeEnv(lambda task, *_: slow if task.index % 4 else 0.0, name=name, size=20) for name in "ab"}
    even = dict.fromkeys("abc", 1.0)

    async def begun() -> bytes:
        groups = make(first, even, group_size=1, max_async_level=1, num_groups=4)
        groups.filter_reason = lambda _: None
        groups.set_version(0)
        await asyncio.sleep(0.01)
        state = encode(OrchestratorState(collector=groups.state()))
        await groups.close()
        return state

    state = run(begun)
    size = {"a": 20, "b": 21, "c": 20}  # other data for b
    second: dict[str, Any] = {name: FakeEnv(name=name, size=size[name]) for name in "cab"}

    async def go_on() -> list[Any]:
        groups = make(second, even, group_size=1, num_groups=12)
        groups.filter_reason = lambda _: None
        groups.restore(decode(state, OrchestratorState).collector)
        groups.set_version(0)
        return await groups.collect()

    went_on = seen(run(go_on))
    assert len({index for _, _, index in went_on}) == 12
    own = [example for env, example, _ in went_on if env == "a"]
    expected = TaskSampler(first, even, 0)
    assert own == [expected.next("a").example_id for _ in own], "the groups of a that were in flight, in their order, then the next ones"


def test_a_run_over_a_troubled_mix_writes_the_same_metrics_and_rollouts_whatever_finishes_first(tmp_path: Path) -> None:
    envs = {
        "t": TrainedEnvConfig(id="rlx_test_trouble", args={"kind": "vf_error", "every": 2}, weight=1.0),
        "e": TrainedEnvConfig(id="rlx_reverse_text", args={"num_examples": 32}, weight=2.0),
    }
    settings: dict[str, Any] = {
        "max_steps": 2,
        "orchestrator__batch_size": 24,
        "orchestrator__max_retries": 20,
        "orchestrator__max_error_rate": 1.0,  # half of the examples fail
        "orchestrator__difficulty_filter": DifficultyFilter(zero_advantage=True, max_rounds=2),
    }
    runs = [play(tmp_path / name, config_of(envs=envs, **settings), StandInServers(error=0.5, jitter=0.01))[0] for name in "ab"]
    assert reproducible(runs[0]) == reproducible(runs[1])
    for step in range(2):
        lines = [
            [line | {"arrival": 0, "seconds": 0, "began": 0, "requests": 0} for line in read_rollouts(paths.rollouts_of(step))]
            for paths in runs
        ]
        assert lines[0] == lines[1]
    assert metrics(runs[0])[-1]["rollouts/failed_sandbox_error"] > 0
    assert any(record.get("filter/zero_advantage") for record in metrics(runs[0]))


def group(index: int, *errors: float, env: str = "e") -> list[Rollout]:
    task = Task(env=env, example_id=index, index=index, row={})
    return [
        Rollout(
            task=task, member=i, trace=Trace(), prompt="", completion="", reward=0.0, rewards={}, metrics={"reward_error": error},
            status="ok",
            stop="", error="exact raised KeyError: 'a'" if error else None,
        )
        for i, error in enumerate(errors)
    ]  # fmt: skip


def test_examples_that_cannot_be_scored_do_not_end_the_run_and_a_broken_environment_does() -> None:
    errors = ErrorRate(0.5)
    for step in range(100):
        errors.add("rare", group(step, 1, 0, 0, env="rare"))
        errors.add("e", [replace(one, status="timeout", stop="timeout") for one in group(step, 0)] + group(step, 0, 0), lambda: 0)
    for step in range(30):
        broken = [replace(one, status="error", stop="reward_raised") for one in group(step, 1, env="slow")]
        errors.add("slow", broken, lambda: 100)  # those that fail come first
        errors.add("often", [one for _ in range(9) for one in group(step, 1, env="often")] + group(step, 0, env="often"))
    never = [replace(one, status="timeout", stop="timeout", error="it hangs") for step in range(9) for one in group(step, 0, env="never")]
    errors.add("never", never[:8])
    with pytest.raises(RolloutsFailed, match=r"environment never: 9 of its latest 9 .*: 9 × timeout: it hangs"):
        errors.add("never", never[8:])
    everything = [one for step in range(70) for one in group(step, 1, env="b")]
    with pytest.raises(RolloutsFailed, match=r"environment b: 64 of its latest 64 .*max_error_rate=0.5; .*\): 64 × reward_raised: exact"):
        errors.add("b", everything)
