"""Turns a batch of scored rollouts into groups with advantages, training samples and the metrics of the step.

Pure functions of records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlx.advantages.base import Advantage, GroupScores
from rlx.advantages.mix import AdvantageMix
from rlx.config.load import instantiate
from rlx.config.objectives import loss_of, scored_by
from rlx.config.schema import Config
from rlx.envs.base import sampling_of
from rlx.rollout.eval_results import means
from rlx.rollout.groups import comparison_groups, episodes
from rlx.rollout.samples import samples_of
from rlx.rollout.state import RolloutCounters
from rlx.types import Group, Rollout, StepBatch, TrainingSample


def advantages_of(config: Config) -> AdvantageMix:
    """The run's advantages: one, or several if environments have their own."""
    scored = scored_by(config)
    by_env = {env: number for number, (_, envs) in enumerate(scored) for env in envs}
    return AdvantageMix([instantiate(node) for node, _ in scored], by_env)


def scores_of(batch: Sequence[Sequence[Rollout]]) -> GroupScores:
    """The input of the advantage function for these groups. The parts of a group that are compared by themselves are groups here."""
    parts = [[rollouts[place] for place in places] for rollouts in batch for places in comparison_groups(rollouts)]
    return GroupScores(
        rewards=[np.array([rollout.reward for rollout in rollouts], dtype=np.float64) for rollouts in parts],
        lengths=[np.array([rollout.trace.num_sampled for rollout in rollouts], dtype=np.int32) for rollouts in parts],
        longest_turns=[np.array([rollout.trace.longest_answer for rollout in rollouts], dtype=np.int32) for rollouts in parts],
        envs=[rollouts[0].task.env for rollouts in parts],
        agents=[rollouts[0].agent for rollouts in parts],
    )


def max_tokens_of(config: Config) -> dict[str, int]:
    """The limit of new tokens in one turn, by environment."""
    return {name: int(sampling_of(config, env)["max_tokens"]) for name, env in config.envs.items()}


def make_groups(batch: Sequence[Sequence[Rollout]], scores: GroupScores, advantage: Advantage) -> list[Group]:
    """Groups with their advantages. Raises ValueError when an advantage is not finite."""
    values = iter(advantage(scores) if batch else ())
    groups: list[Group] = []
    for rollouts in batch:
        task, advantages = rollouts[0].task, np.zeros(len(rollouts), dtype=np.float32)
        for places in comparison_groups(rollouts):
            own = np.asarray(next(values), dtype=np.float32)
            if own.shape != (len(places),) or not np.isfinite(own).all():
                what = f"the advantages of {task.env}, example {task.example_id}, are {own}"
                raise ValueError(f"{what}: expected {len(places)} finite numbers")
            advantages[places] = own
        groups.append(Group(id=task.index, task=task, rollouts=tuple(rollouts), advantages=advantages))
    return groups


def make_batch(step: int, groups: Sequence[Group], config: Config) -> StepBatch:
    """The training samples, split into `trainer.num_minibatches` mini-batches of consecutive groups."""
    mini_batches = []
    for places in np.array_split(np.arange(len(groups)), config.trainer.num_minibatches):
        samples: list[TrainingSample] = []
        for group in (groups[place] for place in places):
            samples += samples_of(
                group,
                strategy=config.orchestrator.trajectory_strategy,
                mask_overlong=bool(loss_of(config, group.task.env).get("mask_overlong", False)),
                learn=config.envs[group.task.env].observation_ce_weights,
                weights=config.envs[group.task.env].loss_weights,
                taught=config.envs[group.task.env].sampled_by == "teacher",
            )
        mini_batches.append(tuple(samples))
    return StepBatch(step=step, mini_batches=tuple(mini_batches))


def step_metrics(
    groups: Sequence[Group],
    batch: StepBatch,
    tally: RolloutCounters,
    filtered: Sequence[tuple[str, Sequence[Rollout]]] = (),
    rules: Sequence[str] = (),
    taught: Mapping[str, float] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """The step's metrics that are computed from its rollouts (`rlx.metrics`, source orchestrator).

    `filtered`: rule and rollouts of each group that a filter dropped; they count in all metrics except `batch/…`.
    `rules`: the active filter rules. `taught`: the metrics of the teachers. `sizes`: rollouts of a whole group, by environment.
    """
    played = [list(group.rollouts) for group in groups] + [list(rollouts) for _, rollouts in filtered]
    rollouts = [rollout for group in played for rollout in group]
    samples = [sample for part in batch.mini_batches for sample in part]
    rewards = np.array([rollout.reward for rollout in rollouts])
    lengths = np.array([rollout.trace.num_sampled for rollout in rollouts])
    seconds = np.array([rollout.timing["total"] for rollout in rollouts])
    by_teacher = {sample.env for sample in samples if sample.ce_weights is not None and not sample.loss_mask.any()}  # a teacher played
    sampled = sum(rollout.trace.num_sampled for group in groups if group.task.env not in by_teacher for rollout in group.rollouts)
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)  # all sampled, but masked overlong rollouts and what was not scored
    unscored = (taught or {}).get("teacher/unscored_tokens", 0)
    values = dict(taught or {}) | {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "batch/groups": len(groups),
        "batch/rollouts": sum(len(group.rollouts) for group in groups),
        "batch/short_groups": sum(episodes(group.rollouts) < (sizes or {}).get(group.task.env, 0) for group in groups),
        "batch/samples": len(samples),
        "batch/loss_tokens": trained,
        "batch/overlong_frac": 1 - (trained + unscored) / sampled if sampled else 0.0,
        "batch/tokens": sum(len(sample.token_ids) for sample in samples),
        "batch/zero_advantage_frac": sum(not group.advantages.any() for group in groups) / max(len(groups), 1),
        "length/completion_mean": lengths.mean(),
        "length/completion_max": lengths.max(),
        "length/truncated_frac": np.mean([rollout.is_truncated for rollout in rollouts]),
        "time/rollout_mean": seconds.mean(),
        "time/rollout_max": seconds.max(),
    }
    for name in sorted({group[0].task.env for group in played}):
        own = [rollout for rollout in rollouts if rollout.task.env == name]
        values |= {f"reward/{name}/{key}": mean for key, mean in means([rollout.rewards for rollout in own]).items()}
        values |= {f"env/{name}/{key}": mean for key, mean in means([rollout.metrics for rollout in own]).items()}
        # Behind those of the environment, whose functions may have any name: these names mean what `rlx.metrics` says.
        values[f"env/{name}/share"] = sum(group[0].task.env == name for group in played) / len(played)
        values[f"env/{name}/trained_share"] = sum(group.task.env == name for group in groups) / max(len(groups), 1)
        values[f"reward/{name}/mean"] = np.mean([rollout.reward for rollout in own])
    values |= {f"filter/{rule}": sum(broken == rule for broken, _ in filtered) for rule in rules}
    values["rollouts/dropped_off_policy"] = 0
    values |= {f"rollouts/dropped_{cause}": count for cause, count in sorted(tally.dropped.items())}
    values |= {f"rollouts/failed_{cause}": count for cause, count in sorted(tally.failed.items())}
    return {name: float(value) for name, value in values.items()}
