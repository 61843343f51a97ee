"""What an advantage sees: rewards and lengths of whole groups. numpy alone.

An advantage is one function `f(groups: GroupScores, *, its own keys) -> advantages` over all groups of a batch, with one [G] array a
group as the result. One that remembers something from batch to batch is a class with `__call__(groups)`, which changes nothing,
`update(groups)`, called once with each batch after its use, `state_dict()` and `load_state_dict(state)`.
To add one: such a function or class, and a YAML in `conf/advantage/` whose `_target_` is its dotted name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Advantages = list[NDArray[np.float32]]  # [G] of every group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScores:
    """The groups of a batch, all four sequences in the same order."""

    rewards: Sequence[NDArray]  # [G] of every group, shaped
    lengths: Sequence[NDArray]  # [G] sampled tokens of every rollout, over all turns
    longest_turns: Sequence[NDArray]  # [G] sampled tokens of its longest turn, which is what sampling.max_tokens bounds
    envs: Sequence[str]  # environment of every group


Advantage = Callable[[GroupScores], Sequence[NDArray]]


@runtime_checkable
class Remembers(Protocol):
    """An advantage with a state."""

    def update(self, groups: GroupScores) -> None:
        """A batch was used."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, as plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
