"""The part of a causal language model below its head."""

from __future__ import annotations

from typing import Any


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
