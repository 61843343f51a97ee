"""The interface of an environment: one request, one answer.

`Environment.play` turns a task into scored rollouts. The loader of an environment in this process sets its policy once (`Local`); an
environment in another process has its policy there. Both answer with the same records and keep no state between two requests.
Those of this process share `envs/local.py`; retries and batches belong to `rlx.rollout`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

from rlx.config.schema import Config, EnvConfig, PlayRoot
from rlx.envs.wire import Settings
from rlx.policy.base import Episode, Policy
from rlx.trace import Trace
from rlx.types import Rollout, Status, Task

RAISED = "reward_raised"  # cause of a rollout that has no reward because a reward function raised
REWARD_ERROR = "reward_error"  # metric: 1 if a reward function of the rollout raised


class Environment(Protocol):
    """One environment of the mix."""

    name: str  # key of the `envs` section
    rows: Sequence[dict[str, Any]]  # the data set that its key `split` names: `example_id`, `prompt`, `answer`, … in a fixed order
    tools: Sequence[Mapping[str, Any]]  # the functions that it is known to offer before a rollout, in OpenAI's form
    scores_groups: bool  # rewards compare the rollouts of a group, so only a whole group can be played
    agents: Sequence[str]  # those that train, if it has several; empty: one policy plays it

    async def play(self, task: Task, members: Sequence[int], attempt: int) -> list[Rollout]:
        """Play and score these members of the group of `task` concurrently. Returns one rollout for each, in the order of `members`.

        A failing episode does not raise: its rollout has `status` and `error`. With `scores_groups`, the members are a whole group;
        if one fails, the others have no rewards and are `cancelled`. Members that are `ok` beside a failed one need not be played again.
        """
        ...

    async def close(self) -> None:
        """Release all resources at the end of the run."""
        ...


class Local(Environment, Protocol):
    """An environment of this process."""

    policy: Policy | None  # answers the requests; the loader sets it before the first `play`


def filled(policy: Policy | None) -> str:
    """What ended a rollout whose first prompt leaves no room for an answer."""
    if policy is not None and policy.context_length:
        return f"the prompt fills the context of {policy.context_length} tokens; raise seq_len"
    return "the prompt fills the context of the endpoint's model"


def failed(task: Task, member: int, episode: Episode | None, status: Status, stop: str, error: str, timing: dict[str, Any]) -> Rollout:
    """The rollout of an episode that failed, with its turns and answers so far. `episode`: None if there was none."""
    if episode is not None and episode.timed_out:  # whatever the environment made of the policy's error
        status, stop, error = "timeout", "timeout", episode.timed_out
    trace = Trace() if episode is None else episode.trace
    return Rollout(
        task=task,
        member=member,
        trace=trace,
        prompt=task.row.get("prompt"),
        completion=[trace.nodes[index].message for index in trace.answers],
        reward=0.0,
        rewards={},
        metrics={},
        status=status,
        stop=stop,
        error=error,
        timing=timing,
    )


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """The values without NaN and infinity, which JSON cannot hold: they would make every mean NaN, and a line of metrics unreadable."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def with_raised_reward(rollout: Rollout, error: str, rule: str) -> Rollout:
    """The rollout in which a reward function raised, under the rule of `envs.NAME.on_reward_error`. Every kind of environment asks here.

    `rollout`: with the rewards that there are. `error`: the function and what it raised, for people.
    By default the rollout has failed: its reward is not known, and 0 would be trained on as if it had been earned.
    """
    metrics = {**rollout.metrics, REWARD_ERROR: 1.0}
    if rule == "zero":
        return replace(rollout, metrics=metrics, error=error)
    return replace(rollout, metrics=metrics, error=error, status="error", stop=RAISED, reward=0.0)


def sampling_of(config: PlayRoot, env: EnvConfig) -> dict[str, Any]:
    """The sampling parameters of one environment, by vLLM's names. The environment's own values override those of the run."""
    own = {field.name: getattr(env.sampling, field.name) for field in fields(env.sampling)}
    chosen = {name: getattr(config.sampling, name) if value is None else value for name, value in own.items()}
    if (
        isinstance(config, Config)
        and config.bench_target == "rl"
        and config.bench_length == "fixed"
        and getattr(env, "sampled_by", "policy") == "policy"
    ):
        chosen["min_tokens"] = chosen["max_tokens"]
    return chosen


def settings_of(config: PlayRoot, env: EnvConfig) -> Settings:
    """What the environment needs to know of the run."""
    timeout = config.orchestrator.rollout_timeout if env.rollout_timeout is None else env.rollout_timeout
    return Settings(sampling_of(config, env), timeout, config.concurrency, env.on_timeout == "zero")
