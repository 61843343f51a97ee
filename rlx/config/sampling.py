"""Which sampling parameters change the distribution that tokens come from. Pure, for rules and for every request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WITHOUT_BIAS = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "min_tokens": 0}
"""Values of the keys of `sampling` that change nothing."""


def biases(sampling: Mapping[str, Any]) -> list[str]:
    """The parameters that make the engine sample from another distribution than the policy's own, which the trainer scores with.

    The temperature is not among them, unless it is 0. Neither are limits and stops: they end an answer, but do not change its tokens.
    """
    sampling = {name: value for name, value in sampling.items() if value is not None}
    off = {
        "temperature": sampling.get("temperature") == 0,
        "top_p": sampling.get("top_p", 1) < 1,
        "top_k": sampling.get("top_k", -1) > 0,
        "min_p": sampling.get("min_p", 0) > 0,
        "min_tokens": sampling.get("min_tokens", 0) > 0,  # forbids the tokens that end the answer
        "repetition_penalty": sampling.get("repetition_penalty", 1) != 1,
        "presence_penalty": sampling.get("presence_penalty", 0) != 0,
        "frequency_penalty": sampling.get("frequency_penalty", 0) != 0,
        "logit_bias": any(sampling.get("logit_bias", {}).values()),
    }
    return [name for name, is_off in off.items() if is_off]
