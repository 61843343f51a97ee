"""The input of an advantage: rewards and lengths of whole groups. Uses numpy only.

An advantage is one function `f(groups: GroupScores, *, its own keys) -> advantages`. It sees all groups of a batch and returns one [G]
array per group. An advantage with state is a class. Its `__call__(groups)` changes nothing; `update(groups)` is called once with each
batch after use; `state_dict()` and `load_state_dict(state)` save and restore it.
To add one, write such a function or class, and a YAML in `conf/advantage/` whose `_target_` is its dotted name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Advantages = list[NDArray[np.float32]]  # [G] of every group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScores:
    """The groups of a batch. All sequences have the same order."""

    rewards: Sequence[NDArray]  # [G] of every group, after shaping
    lengths: Sequence[NDArray]  # [G] sampled tokens of each rollout, over all turns
    longest_turns: Sequence[NDArray]  # [G] sampled tokens of each rollout's longest turn, which sampling.max_tokens bounds
    envs: Sequence[str]  # environment of each group
    agents: Sequence[str | None] = ()  # the agent that each group trains, if its environment trains several; empty: none does

    def pick(self, places: Sequence[int]) -> GroupScores:
        """The groups at these places."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return GroupScores(**{name: [value[place] for place in places] if value else () for name, value in values.items()})

    @property
    def roles(self) -> list[str]:
        """What plays in each group: its environment, or `environment/agent` if the environment trains several agents."""
        agents = self.agents or [None] * len(self.envs)
        return [env if agent is None else f"{env}/{agent}" for env, agent in zip(self.envs, agents, strict=True)]


Advantage = Callable[[GroupScores], Sequence[NDArray]]
