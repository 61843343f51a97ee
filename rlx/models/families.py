"""What the families of transformers' models have of their own: where layers and head are, what follows the head, what stays in float32.

Between the output matrix and the logits may be a factor, a softcap or a bias. They are read from the configuration under the families'
own names (transformers 5). `rlx.models.load.check_packed_forward` compares the result with the model's own logits. A family that is
missing in these tables is therefore refused, not trained wrongly.

Some parameters and buffers are always in float32 (`_keep_in_fp32_modules_strict`): state spaces take exponentials of them, routers add
them to scores. transformers keeps them so when it reads a checkpoint; a model that is built on the meta device has one dtype, and FSDP
casts a whole unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlx.models.lora import PARAMETERS

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


def fp32_parameters(hf: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a model that computes in `dtype` and keeps these in float32, by name. None if `dtype` is float32."""
    patterns = [re.compile(part.replace("*", ".*")) for part in hf._get_dtype_plan(dtype)]
    for named in (hf.named_parameters(), hf.named_buffers()) if patterns else ():
        for name, tensor in named:
            if tensor.is_floating_point() and not name.endswith(PARAMETERS) and any(pattern.search(name) for pattern in patterns):
                yield name, tensor


def keep_exact(hf: Any) -> None:
    """Give them float32 in a model of another dtype that has no values yet."""
    for name, tensor in list(fp32_parameters(hf, hf.dtype)):
        module, _, leaf = name.rpartition(".")
        if isinstance(tensor, torch.nn.Parameter):
            tensor.data = tensor.data.float()  # in place, so that tied ones stay tied
        else:
            setattr(hf.get_submodule(module), leaf, tensor.float())


def backbone(hf: Any) -> Any:
    """The module of a transformers `…ForCausalLM` that computes hidden states.

    It is `base_model`. A class that is a part of a model for several modalities may have there the name of a module that only the whole
    has (Llama 4): it is its own `base_model`, and computes logits. Its layers are in `model`. Raises ValueError if that is missing, too.
    """
    if hf.base_model is not hf:
        return hf.base_model
    if not hasattr(hf, "model"):
        raise ValueError(
            f"{type(hf).__name__} cannot be trained: its layers are in none of the modules `{hf.base_model_prefix}` and `model`, and below "
            "its head nothing else is known to compute hidden states"
        )
    return hf.model
