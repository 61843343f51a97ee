"""Several objectives in one optimizer step: each environment's rollouts are trained by their own.

    micro-batch ─► tokens of objective 0 ─► Objective.loss ─┐
                └► tokens of objective 1 ─► Objective.loss ─┴► sum, divided by the counts of the whole batch

Objectives of one kind (`rlx.config.loss_traits`) share their counts: two environments with the same objective are trained like one with
both their prompts. Different kinds have counts of their own, so a distillation does not shrink because another environment's answers are
long. A step with one objective is that objective, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlx.losses.base import Objective
from rlx.losses.diagnostics import Stats
from rlx.losses.mismatch import ratio_bounds_below_mismatch
from rlx.losses.tokens import TokenBatch
from rlx.types import LossCounts, SampleLosses


class LossMix:
    """The objectives of a run, by their numbers."""

    def __init__(self, objectives: Sequence[Objective], by_env: Mapping[str, int] | None = None) -> None:
        """`by_env`: number of each environment's objective; environments that are not named have objective 0."""
        self.objectives, self.by_env = list(objectives), dict(by_env or {})

    @classmethod
    def of(cls, objective: Objective | LossMix) -> LossMix:
        """An objective as a mix of one."""
        return objective if isinstance(objective, LossMix) else cls([objective])

    @property
    def streams(self) -> frozenset[str]:
        """The optional per-token streams that an objective reads."""
        return frozenset().union(*(objective.streams for objective in self.objectives))

    @property
    def recomputes(self) -> bool:
        """Whether an objective compares with the trainer's own log-probabilities at the start of the step."""
        return any(objective.terms.proximal == "recompute" for objective in self.objectives)

    @property
    def adapts(self) -> bool:
        """Whether the weight of the KL term changes during training."""
        return self.objectives[0].terms.kl.target_kl is not None

    def loss_of(self, env: str) -> SampleLosses:
        """Which losses the samples of an environment have, for packing."""
        number = self.by_env.get(env, 0)
        objective = self.objectives[number]
        return SampleLosses(
            number=number,
            kind=objective.kind,
            has_kl=objective.controller.beta != 0,
            has_ce=objective.terms.ce_coef != 0,
            splits=objective.token_local,
        )

    def __call__(self, tokens: TokenBatch, counts: LossCounts) -> tuple[Tensor, Stats]:
        """This micro-batch's share of the global loss, and the diagnostics of all objectives together.

        `tokens.old_logp` are the trainer's own log-probabilities at the start of the step. An objective that compares with the engine
        takes the engine's instead. Raises the errors of `Objective.loss`.
        """
        losses, stats = [], Stats()
        for number, objective in enumerate(self.objectives):
            own = tokens
            if objective.terms.proximal == "inference":
                own = replace(own, old_logp=own.inference_logp)
            if len(self.objectives) > 1:
                assert tokens.objectives is not None
                own = own.pick((tokens.objectives == number)[tokens.rollout_ids])
            loss, more = objective.loss(own, counts)
            losses.append(loss)
            if len(self.objectives) > 1:
                more.sums[f"loss/{objective.label}/total"] = more.sums["loss/total"]
            stats.add(more)
        return (losses[0] if len(losses) == 1 else torch.stack(losses).sum()), stats

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """A warning for the user if an objective's bounds on sequences are tighter than the measured mismatch."""
        found = (ratio_bounds_below_mismatch(objective.function, objective.terms, metrics) for objective in self.objectives)
        return next((text for text in found if text is not None), None)

    def after_update(self, metrics: dict[str, float], *, changed: bool = True) -> None:
        """Report an optimizer step's measured KL. Only a single objective adapts its weight (a rule refuses it in a mix)."""
        self.objectives[0].after_update(metrics, changed=changed)

    def state_dict(self) -> dict[str, float]:
        """The state that changes during training."""
        return self.objectives[0].state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.objectives[0].load_state_dict(state)
