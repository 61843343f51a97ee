"""The steps between a model family's output matrix and its logits: a factor, a softcap, a bias.

They are read from the configuration under the families' own names (transformers 5). `rlx.models.load.check_packed_forward` compares the
result with the model's own logits. A family that is missing in these tables is therefore refused, not trained wrongly.
"""

from __future__ import annotations

from typing import Any

FACTORS = (
    "logit_scale",  # Cohere, Cohere 2
    "lm_head_multiplier",  # Falcon H1
    "output_multiplier",  # Muse
)
DIVISOR = "logits_scaling"  # Granite, Granite MoE and hybrid, MiniCPM 3
MULTIPLIED_BY_DIVISOR = ("hyperclovax",)  # families that multiply by DIVISOR
SOFTCAPS = (
    "final_logit_softcapping",  # Gemma 2, 3, 3n, 4, VaultGemma, nanochat
    "logits_soft_cap",  # RecurrentGemma
    "output_logit_soft_cap",  # xLSTM
)


def logit_scale(config: Any) -> float:
    """The factor on the raw products of a `PretrainedConfig`, applied before the softcap; 1 if there is none."""
    config = config.get_text_config()
    scale = 1.0
    for name in FACTORS:
        scale *= float(getattr(config, name, None) or 1.0)
    divisor = float(getattr(config, DIVISOR, None) or 1.0)
    return scale * divisor if config.model_type in MULTIPLIED_BY_DIVISOR else scale / divisor


def logit_softcap(config: Any) -> float | None:
    """The s of s·tanh(z/s); None if logits have no softcap."""
    config = config.get_text_config()
    for name in SOFTCAPS:
        value = getattr(config, name, None)
        if value:
            return float(value)
    return None
