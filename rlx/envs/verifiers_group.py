"""Which of verifiers' environments plays a row: the environment itself, or a member of an `EnvGroup`, which may be a group again.

As in verifiers, a row of a group is played and scored by its member, with the member's tools, rewards and group rewards.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import verifiers as vf
from verifiers.rubrics.rubric import Rubric

from rlx.envs.verifiers_hooks import hook
from rlx.policy.sampling_params import KNOWN, PENALTIES, servers_names

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Player:
    """An environment that plays episodes."""

    env: vf.Environment
    sampling: dict[str, Any]  # of its requests, by vLLM's names
    rewards: frozenset[str]  # names of the functions that count in the reward; the others are metrics
    scores_groups: bool  # rewards compare the rollouts of a group
    raw: bool  # prompts are raw text


def leaves(env: vf.Environment) -> Iterator[vf.Environment]:
    """The environments that play: `env`, or the members of a group, and of the groups in it."""
    if isinstance(env, vf.EnvGroup):
        for child in env.envs:
            yield from leaves(child)
    else:
        yield env


def players_of(name: str, env: vf.Environment, sampling: Mapping[str, Any]) -> dict[int, Player]:
    """The players by the `id` of their environments, which are changed in place (`verifiers_hooks`). `sampling`: the run's."""
    return {id(leaf): _player(name, env, leaf, sampling) for leaf in leaves(env)}


def _player(name: str, env: vf.Environment, leaf: vf.Environment, sampling: Mapping[str, Any]) -> Player:
    # verifiers' run_rollout ignores the environment's own sampling parameters (stop strings, for example), so they are added here.
    # Keys that the run sets win.
    own = servers_names(env.sampling_args) | servers_names(leaf.sampling_args)
    ignored = {key: value for key, value in own.items() if key not in KNOWN or key in PENALTIES}
    if ignored:
        log.warning("envs.%s asks for sampling parameters that training does not use; they are ignored: %s", name, ignored)
    for key in sorted(own.keys() & sampling.keys() - ignored.keys()):
        if own[key] != sampling[key]:
            said = "the environment %s asks for %s=%s, but the configuration's is %s, which is used (sampling.%s, also in its own section)"
            log.warning(said, name, key, own[key], sampling[key], key)
    _check_rubrics(name, leaf.rubric)
    names, weights = leaf.rubric._get_reward_func_names(), leaf.rubric._get_reward_weights()
    hook(leaf)
    return Player(
        env=leaf,
        sampling={key: value for key, value in {**own, **sampling}.items() if key not in ignored},
        rewards=frozenset(name for name, weight in zip(names, weights, strict=True) if weight != 0),
        scores_groups=leaf.requires_group_rollouts,
        raw=leaf.message_type == "completion",
    )


def _check_rubrics(name: str, rubric: Rubric) -> None:
    """Raises ValueError for a rubric that verifiers would refuse to score with, at the end of every episode."""
    if type(rubric) is vf.RubricGroup:
        for child in rubric.rubrics:
            _check_rubrics(name, child)
    elif not rubric.funcs and type(rubric).score_rollout is Rubric.score_rollout:
        raise ValueError(
            f"envs.{name}: its rubric ({type(rubric).__name__}) has no reward function, so verifiers cannot score an episode. "
            "Give the environment a reward function (Rubric.add_reward_func)."
        )


def routed(env: vf.Environment, row: Mapping[str, Any]) -> tuple[vf.Environment, dict[str, Any]]:
    """The environment that plays this row, and the row as that environment knows it."""
    own = without_old_task(row)
    while isinstance(env, vf.EnvGroup):
        name, own, _ = env._route_child_input(own)
        env = env.get_env_for_name(name)
    return env, own


def without_old_task(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without a `task` column that is a plain name.

    Environments of earlier verifiers named their rows so. Today's verifiers reads the column as a whole task and refuses such rows.
    """
    task = row.get("task")
    if isinstance(task, str) and not _is_record(task):
        return {key: value for key, value in row.items() if key != "task"}
    return dict(row)


def _is_record(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
