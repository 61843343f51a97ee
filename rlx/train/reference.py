"""The model that a KL term or a distillation compares with: the initial policy, frozen, or a teacher of another name.

Scores the same micro-batches as the policy and is sharded like it. Knows nothing of objectives and files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlx.models.policy import PolicyModel


class Reference:
    """A frozen model, brought up to the policy every so many steps where that is asked for."""

    def __init__(self, model: PolicyModel, *, sync_interval: int | None = None, alpha: float = 1.0, teacher: bool = False) -> None:
        """`sync_interval` in steps, null: never; `alpha`: weight of the policy when they are mixed, 1 copies it.

        `teacher`: it is a model of another name, not the initial policy.
        """
        self.model, self.sync_interval, self.alpha, self.teacher = model, sync_interval, alpha, teacher
        model.requires_grad_(False)

    def check_vocabulary(self, policy: PolicyModel) -> None:
        """Raises ValueError when the policy has token ids that this model does not."""
        own, wanted = (len(m.hf.get_input_embeddings().weight) for m in (self.model, policy))
        if own < wanted:
            raise ValueError(f"the reference model (ref.name) has {own} token ids and the policy {wanted}; it must know all of them")

    def scored(self) -> None:
        """Nothing more is scored for now. A sharded model holds its root's parameters whole until backward, and here none comes."""
        reshard = getattr(self.model, "reshard", None)
        if reshard is not None:
            reshard()

    @torch.no_grad()
    def after_step(self, step: int, policy: PolicyModel) -> bool:
        """After step `step` (0, 1, …): θ_ref ← α·θ + (1 − α)·θ_ref when it is time (arXiv 2404.09656, there after every τ steps)."""
        if self.sync_interval is None or (step + 1) % self.sync_interval:
            return False
        for own, new in zip(self.model.parameters(), policy.parameters(), strict=True):
            _local(own).lerp_(_local(new).to(own.dtype), self.alpha)
        return True


def _local(parameter: Tensor) -> Tensor:
    """This rank's shard; both models are sharded alike."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
