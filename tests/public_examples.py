"""A padded batch that every public implementation reads, and what each of them calls the objectives they share with rlx.

Plain torch, so that another environment (TRL's own) can import it. Shapes: B rollouts, T the longest, padding behind.
"""

from __future__ import annotations

import torch
from torch import Tensor

LENGTHS = (7, 3, 1, 6, 5)
MAX_LENGTH = 11
BETA, CAP = 0.04, 2.0
EXTRAS = ("", "kl", "tis", "delta")

# our preset: (their loss_type, their level, their ε_low, their ε_high). Their ε_high of cispo is the bound itself: ours plus 1.
SHARED = {
    "grpo": ("grpo", "token", 0.2, 0.2),
    "dr_grpo": ("dr_grpo", "token", 0.2, 0.2),
    "dapo": ("dapo", "token", 0.2, 0.28),
    "gspo": ("grpo", "sequence", 3e-4, 4e-4),
    "gspo_wide": ("grpo", "sequence", 0.1, 0.15),
    "cispo": ("cispo", "token", 0.2, 5.0),
    "cispo_tight": ("cispo", "token", 0.2, 1.1),
    "sapo": ("sapo", "token", 0.2, 0.2),
}


def takes(preset: str, extra: str) -> bool:
    """Whether an extra term means something for the objective: a two-sided clip only where there is a clip; token weights (which TRL and
    Liger put on tokens that carry their sequence's loss) only where tokens have losses of their own."""
    if extra == "tis" and preset.startswith("gspo"):
        return False
    return extra != "delta" or preset.startswith(("grpo", "dr_grpo", "dapo", "gspo"))


def make(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """logp, old, inference, ref [B, T] (zeros at padding), advantages [B], mask [B, T]."""
    generator = torch.Generator().manual_seed(3)
    size = (len(LENGTHS), max(LENGTHS))

    def normal() -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    mask = torch.arange(size[1]) < torch.tensor(LENGTHS)[:, None]
    logp = -normal().abs() - 0.2
    values = {
        "logp": logp,
        "old": logp - 0.4 * normal(),
        "inference": logp - 0.4 * normal(),
        "ref": logp - 0.4 * normal(),
    }
    values = {name: torch.where(mask, value, 0.0).to(dtype) for name, value in values.items()}
    return values | {"advantages": torch.tensor([1.0, -1.2, 0.7, -0.5, 0.0]).to(dtype), "mask": mask}
