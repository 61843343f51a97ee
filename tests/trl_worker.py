"""TRL's loss on the shared example. The Python of TRL's own environment runs it: `trl_worker.py OUT`.

The loss is a method of a trainer that needs a model, a data set and an accelerator. The formula uses none of these, so the method is called
on a stand-in that has only the settings it reads. Log-probabilities are inputs and are not computed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from public_examples import BETA, CAP, EXTRAS, MAX_LENGTH, SHARED, make, takes
from trl.trainer.grpo_trainer import GRPOTrainer


class Accelerator:
    """A stand-in for one process."""

    num_processes = 1

    def gather(self, value: Any) -> Any:
        return value

    def reduce(self, value: Any, reduction: str) -> Any:
        return value


def compute(preset: str, extra: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, its gradient with respect to the log-probabilities [B, T])."""
    loss_type, level, low, high = SHARED[preset]
    batch = make()
    logp = batch["logp"].clone().requires_grad_()
    mask = batch["mask"].long()
    settings = SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=BETA if extra == "kl" else 0.0,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        max_completion_length=MAX_LENGTH,
        use_vllm=extra == "tis",
        vllm_importance_sampling_correction=extra == "tis",
        model=SimpleNamespace(training=False),
        accelerator=Accelerator(),
        current_gradient_accumulation_steps=1,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=False,
        _metrics={"eval": defaultdict(list), "train": defaultdict(list)},
        args=SimpleNamespace(
            use_bias_correction_kl=False,
            delta=CAP if extra == "delta" else None,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
    )
    inputs = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old"],
        "ref_per_token_logps": batch["ref"],
        "importance_sampling_ratio": (batch["old"] - batch["inference"]).exp().clamp(max=CAP),
        "num_items_in_batch": mask.sum(),
    }
    loss = GRPOTrainer._compute_loss(settings, None, inputs)
    (gradient,) = torch.autograd.grad(loss, logp)
    return loss.detach(), gradient


if __name__ == "__main__":
    torch.save({(p, e): compute(p, e) for p in SHARED for e in EXTRAS if takes(p, e)}, sys.argv[1])
