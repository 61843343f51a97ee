"""Several advantages in one batch: each environment's groups are scored by their own, as if they were the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.advantages.base import Advantage, GroupScores
from rlx.config.loss_traits import declared_in


class AdvantageMix:
    """An advantage like any other; with a state if one of its advantages has one."""

    def __init__(self, advantages: Sequence[Advantage], by_env: Mapping[str, int]) -> None:
        """`by_env`: number of each environment's advantage."""
        self.advantages, self.by_env = list(advantages), dict(by_env)
        self._remembering: dict[int, Any] = {number: one for number, one in enumerate(advantages) if hasattr(one, "state_dict")}

    def __call__(self, groups: GroupScores) -> Sequence[NDArray]:
        """[G] of every group."""
        found: dict[int, NDArray] = {}
        for number, advantage in enumerate(self.advantages):
            if own := self._places(groups, number):
                found |= dict(zip(own, _of(advantage, groups.pick(own)), strict=True))
        return [found[place] for place in range(len(groups.envs))]

    def update(self, groups: GroupScores) -> None:
        """Show each advantage its groups of a batch, after their use."""
        for number, advantage in self._remembering.items():
            if own := self._places(groups, number):
                advantage.update(groups.pick(own))

    def state_dict(self) -> Any:
        """The states of the advantages that have one, by number; None if none has."""
        return {str(number): one.state_dict() for number, one in self._remembering.items()} or None

    def load_state_dict(self, state: Any) -> None:
        """Restore a `state_dict` that is not None."""
        for number, one in self._remembering.items():
            if str(number) in state:
                one.load_state_dict(state[str(number)])

    def _places(self, groups: GroupScores, number: int) -> list[int]:
        return [place for place, env in enumerate(groups.envs) if self.by_env.get(env, 0) == number]


def _of(advantage: Advantage, groups: GroupScores) -> Sequence[NDArray]:
    """[G] of every group. Where groups are compared, a rollout that has nobody to be compared with (`Rollout.baseline_key`) gets 0."""
    many = [place for place, rewards in enumerate(groups.rewards) if len(rewards) > 1]
    if not declared_in(advantage).compares_group or len(many) == len(groups.rewards):
        return advantage(groups)
    found: list[NDArray] = [np.zeros(len(rewards), dtype=np.float32) for rewards in groups.rewards]
    for place, values in zip(many, advantage(groups.pick(many)) if many else (), strict=True):
        found[place] = values
    return found
