"""A check that rounding alone does not clip sequences: compares an objective's sequence bounds with the trainer-engine mismatch.

A bound on the geometric mean of a sequence's ratios should limit what updates change. In 16 bit, trainer and engine differ by more than
a bound of a thousandth allows, so rounding alone clips sequences. The check reads what an objective declares, never its name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from rlx.config.loss_traits import ATTRIBUTE, Declared
from rlx.config.schema import LossTerms

MEASURED = "mismatch/seq_abs_logp_diff_mean"


def ratio_bounds_below_mismatch(function: Callable[..., Any], terms: LossTerms, metrics: Mapping[str, float]) -> str | None:
    """A warning for the user if the sequence bounds are tighter than the mismatch in `metrics`; otherwise None.

    `metrics` must come from an optimizer step on the same version that sampled the tokens, so that the mismatch is rounding alone.
    """
    declared: Declared = getattr(getattr(function, "func", function), ATTRIBUTE, Declared())
    if not declared.sequence_bounds or terms.proximal != "inference":
        return None
    low, high = declared.sequence_bounds
    values = {key: float(inspect.signature(function).parameters[key].default) for key in (low, high)}
    room = min(-math.log1p(-values[low]) if values[low] < 1 else math.inf, math.log1p(values[high]))
    if metrics[MEASURED] <= room:
        return None
    return (
        f"rounding alone clips sequences: before any update, trainer and engine differ by {metrics[MEASURED]:.2g} nats in the "
        f"mean over a sequence's tokens, but the bounds allow {room:.2g} (loss.{low}={values[low]:g}, loss.{high}={values[high]:g}). "
        "Set loss.proximal=recompute, whose ratios compare with the trainer itself, or wider bounds"
    )
