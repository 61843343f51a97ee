"""What an environment is to the rest of rlx: one request, one answer.

`Environment.play` turns a task into scored rollouts. An environment that lives in this process is given its policy once, by whoever loads
it (`Local`); one in another process has it there. Both answer with the same records, and keep nothing between two requests.
Knows nothing of verifiers (`envs/verifiers_v0.py`) nor of groups, retries and batches (`rlx.rollout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rlx.config.schema import Config, EnvConfig
from rlx.policy.base import Policy
from rlx.types import Rollout, Task


class Environment(Protocol):
    """One environment of the mix."""

    name: str  # key of the `envs` section
    rows: Sequence[dict[str, Any]]  # the data set: `example_id`, `prompt`, `answer`, … always in the same order
    scores_groups: bool  # rewards compare the rollouts of a group: only a whole group can be played

    async def play(self, task: Task, members: Sequence[int], attempt: int) -> list[Rollout]:
        """Play and score these members of the group of `task`, at the same time; a rollout for each, in their order.

        Never raises for a failing episode: `status` and `error` say what happened. Where `scores_groups`, the members are a whole group,
        and one of them that fails leaves the others without rewards: these are `cancelled`.
        """
        ...

    async def close(self) -> None:
        """The run is over; put away what is held."""
        ...


class Local(Environment, Protocol):
    """An environment of this process."""

    policy: Policy | None  # who answers; set by whoever loads the environment, before the first `play`


def sampling_of(config: Config, env: EnvConfig) -> dict[str, Any]:
    """The sampling parameters of one environment by vLLM's names: the run's, with the environment's own in their place."""
    run = config.sampling
    return {
        "max_tokens": run.max_tokens if env.sampling.max_tokens is None else env.sampling.max_tokens,
        "temperature": run.temperature if env.sampling.temperature is None else env.sampling.temperature,
        "top_p": run.top_p,
        "top_k": run.top_k,
        "min_p": run.min_p,
        "min_tokens": run.min_tokens,
    }
