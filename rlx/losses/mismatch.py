"""Whether an objective's bounds on sequences are wider than what separates trainer and engine before anything is learned.

A bound on the geometric mean of a sequence's ratios is meant for what updates change. In 16 bit, trainer and engine differ by more than
bounds of a thousandth, and sequences are clipped by rounding alone. Knows what an objective declares, and no objective by name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from rlx.config.declared import ATTRIBUTE, Declared
from rlx.config.schema import LossTerms

MEASURED = "mismatch/seq_abs_logp_diff_mean"


def too_tight(function: Callable[..., Any], terms: LossTerms, metrics: Mapping[str, float]) -> str | None:
    """What to tell the user where the bounds on sequences are tighter than the mismatch, which `metrics` measured; else None.

    `metrics` must be those of an optimizer step from the very version that sampled its tokens, so that nothing but rounding is in them.
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
        f"sequences are clipped by rounding alone: before any update, trainer and engine differ by {metrics[MEASURED]:.2g} nats in the "
        f"mean over a sequence's tokens, and the bounds leave {room:.2g} (loss.{low}={values[low]:g}, loss.{high}={values[high]:g}). "
        "Take loss.proximal=recompute, whose ratios are against the trainer itself, or wider bounds"
    )
