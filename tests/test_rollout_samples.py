"""From turns to training samples: every sampled token is trained exactly once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from traces import trace_of

from rlx.advantages.group import group_mean
from rlx.config.schema import Config, TrainedEnvConfig, TrainerConfig
from rlx.rollout.batch import make_batch, scores_of, step_metrics
from rlx.rollout.groups import RolloutCounters, checked
from rlx.rollout.samples import samples_of
from rlx.trace import Turn
from rlx.types import Group, Rollout, StepBatch, Task, TrainingSample

TASK = Task(env="e", example_id=0, index=5, row={})


def turn(prompt: list[int], completion: list[int], version: int = 0, offset: int = 0, temperature: float = 0.75) -> Turn:
    return Turn(
        prompt_ids=np.array(prompt, dtype=np.int32),
        completion_ids=np.array(completion, dtype=np.int32),
        logprobs=-np.arange(offset + 1, offset + 1 + len(completion), dtype=np.float32),
        versions=np.full(len(completion), version, dtype=np.int32),
        temperature=temperature,
        finish_reason="stop",
    )


def rollout(*turns: Turn, member: int = 0, truncated: bool = False) -> Rollout:
    return Rollout(
        task=TASK, member=member, trace=trace_of(*turns), prompt=[], completion=[], reward=0.0, rewards={}, metrics={},
        status="ok", stop="",
        is_truncated=truncated,
    )  # fmt: skip


def samples(*rollouts: Rollout, strategy: str = "interleaved", mask_overlong: bool = False) -> list[TrainingSample]:
    advantages = np.arange(1, len(rollouts) + 1, dtype=np.float32)
    group = Group(id=5, task=TASK, rollouts=rollouts, advantages=advantages)
    return samples_of(group, strategy=strategy, mask_overlong=mask_overlong)


def test_a_single_turn_is_prompt_and_completion() -> None:
    (sample,) = samples(rollout(turn([1, 2], [3, 4, 5], version=9)))
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.loss_mask.tolist() == [False, False, True, True, True]
    assert sample.inference_logprobs.tolist() == [0, 0, -1, -2, -3]
    assert sample.versions.tolist() == [-1, -1, 9, 9, 9]
    assert sample.advantages.tolist() == [0, 0, 1, 1, 1]
    assert (sample.group, sample.member, sample.env) == (5, 0, "e")
    assert sample.temperature.tolist() == [1, 1, 0.75, 0.75, 0.75]
    assert [str(a.dtype) for a in (sample.token_ids, sample.advantages, sample.versions)] == ["int32", "float32", "int32"]


def test_mini_batches_have_whole_groups_in_their_order() -> None:
    config = Config(envs={"e": TrainedEnvConfig(id="x")}, trainer=TrainerConfig(num_minibatches=2))
    groups = []
    for index in (3, 1, 2):
        task = replace(TASK, index=index)
        rollouts = tuple(replace(rollout(turn([1], [2, 3]), member=member), task=task) for member in range(2))
        groups.append(Group(id=index, task=task, rollouts=rollouts, advantages=np.ones(2, dtype=np.float32)))
    found = [[(sample.group, sample.member) for sample in part] for part in make_batch(0, groups, config).mini_batches]
    assert found == [[(3, 0), (3, 1), (1, 0), (1, 1)], [(2, 0), (2, 1)]]


def test_the_weights_of_an_environment_in_the_losses_reach_its_sampled_tokens_alone() -> None:
    weights = {"policy": 0.5, "ref_kl": 0.0}
    config = Config(envs={"e": TrainedEnvConfig(id="x", loss_weights=weights), "f": TrainedEnvConfig(id="y", loss_weights={"policy": 1.0})})
    groups = []
    for env in ("e", "f"):
        played = replace(rollout(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6])), task=replace(TASK, env=env))
        groups.append(Group(id=5, task=played.task, rollouts=(played,), advantages=np.ones(1, np.float32)))
    ((weighted, plain),) = make_batch(0, groups, config).mini_batches
    assert weighted.ref_kl_weights is not None
    assert weighted.policy_weights.tolist() == [0, 0, 0.5, 0.5, 0, 0.5]
    assert weighted.ref_kl_weights.tolist() == [0] * 6
    assert weighted.policy_weights.dtype == np.float32
    assert (plain.policy_weights, plain.ref_kl_weights, plain.ce_weights) == (None, None, None)


def test_a_turn_that_extends_the_one_before_joins_its_sample() -> None:
    (sample,) = samples(rollout(turn([1], [2, 3]), turn([1, 2, 3, 4], [5], version=1, offset=10, temperature=0.5)))
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert sample.loss_mask.tolist() == [False, True, True, False, True]
    assert sample.inference_logprobs.tolist() == [0, -1, -2, 0, -11]
    assert sample.versions.tolist() == [-1, 0, 0, -1, 1]
    assert sample.temperature.tolist() == [1, 0.75, 0.75, 1, 0.5]


def test_the_longest_matching_sample_is_extended_and_earlier_ones_stay_open() -> None:
    turns = [turn([1], [2]), turn([1, 2, 3], [4]), turn([9], [8]), turn([1, 2, 3, 4, 5], [6]), turn([9, 8, 7], [6])]
    first, second = samples(rollout(*turns))
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.loss_mask.tolist() == [False, True, False, True, False, True]
    assert second.token_ids.tolist() == [9, 8, 7, 6]


def test_rollouts_cut_by_a_length_limit_can_be_left_out() -> None:
    both = [rollout(turn([1], [2])), rollout(turn([1], [3]), member=1, truncated=True)]
    assert [sample.member for sample in samples(*both)] == [0, 1]
    assert [sample.member for sample in samples(*both, mask_overlong=True)] == [0]


def test_what_was_left_out_for_its_length_is_counted_in_tokens() -> None:
    both = tuple(replace(one, timing={"total": 1.0}) for one in (
        rollout(turn([1], [2, 4, 5])), rollout(turn([1], [3]), member=1, truncated=True)
    ))  # fmt: skip
    group = Group(id=5, task=TASK, rollouts=both, advantages=np.ones(2, dtype=np.float32))
    for masked, share in ((True, 0.25), (False, 0.0)):
        described = step_metrics([group], StepBatch(step=0, mini_batches=(tuple(samples(*both, mask_overlong=masked)),)), RolloutCounters())
        assert described["batch/overlong_frac"] == share
        assert described["batch/loss_tokens"] == 4 * (1 - share)


def test_names_that_an_environment_chooses_do_not_replace_metrics_of_rlx() -> None:
    own = {"reward": 0.5, "rewards": {"mean": 9.0, "exact": 2.0}, "metrics": {"share": 9.0, "trained_share": 9.0, "steps": 3.0}}
    played = replace(rollout(turn([1], [2])), timing={"total": 1.0}, **own)
    group = Group(id=5, task=TASK, rollouts=(played,), advantages=np.ones(1, dtype=np.float32))
    values = step_metrics([group], StepBatch(step=0, mini_batches=(tuple(samples(played)),)), RolloutCounters())
    assert (values["reward/e/mean"], values["env/e/share"], values["env/e/trained_share"]) == (0.5, 1.0, 1.0)
    assert (values["reward/e/exact"], values["env/e/steps"]) == (2.0, 3.0)


@pytest.mark.parametrize("reward", [1e39, -1e39, np.nan, np.inf])
def test_a_reward_beyond_float32_fails_its_rollout(reward: float):
    played = rollout(turn([1], [2]))
    assert checked(replace(played, reward=reward)).stop == "reward_not_finite"
    assert checked(replace(played, reward=float(np.finfo(np.float32).max))).status == "ok"


def test_a_rollout_without_a_turn_fails() -> None:
    assert checked(rollout()).stop == "no_turns"


def test_rewards_that_differ_in_float64_alone_have_advantages():
    group = [replace(rollout(), reward=1e9 + i) for i in (0, 1)]
    (advantages,) = group_mean(scores_of([group]))
    assert advantages.tolist() == [-0.5, 0.5]
