"""The input of an advantage: rewards and lengths of whole groups. Uses numpy only.

An advantage is one function `f(groups: GroupScores, *, its own keys) -> advantages`. It sees all groups of a batch and returns one [G]
array per group. An advantage with state is a class. Its `__call__(groups)` changes nothing; `update(groups)` is called once with each
batch after use; `state_dict()` and `load_state_dict(state)` save and restore it.
To add one, write such a function or class, and a YAML in `conf/advantage/` whose `_target_` is its dotted name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Advantages = list[NDArray[np.float32]]  # [G] of every group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScores:
    """The groups of a batch. All four sequences have the same order."""

    rewards: Sequence[NDArray]  # [G] of every group, after shaping
    lengths: Sequence[NDArray]  # [G] sampled tokens of each rollout, over all turns
    longest_turns: Sequence[NDArray]  # [G] sampled tokens of each rollout's longest turn, which sampling.max_tokens bounds
    envs: Sequence[str]  # environment of each group

    def pick(self, places: Sequence[int]) -> GroupScores:
        """The groups at these places."""
        return GroupScores(**{f.name: [getattr(self, f.name)[place] for place in places] for f in fields(self)})


Advantage = Callable[[GroupScores], Sequence[NDArray]]


@runtime_checkable
class Remembers(Protocol):
    """An advantage with a state."""

    def update(self, groups: GroupScores) -> None:
        """Take in a batch after its use."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
