"""Colours of tokens by a number, for light and dark terminals and for the colour-blind.

A scale has few steps, each darker than the one before and with a foreground of its own, so it reads by brightness alone and on any
background. Without colours (`NO_COLOR`, or a terminal with fewer than 256) the steps are text attributes.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache

from rich.style import Style

# From light yellow to dark brown: brightness falls with every step.
_RAMP = (("#fff3bf", "#000000"), ("#fed976", "#000000"), ("#fd9a3e", "#000000"), ("#d9480f", "#ffffff"), ("#7f2704", "#ffffff"))
# Neighbours differ in brightness, and no two differ only between red and green.
_KINDS = (
    ("#f0e442", "#000000"),
    ("#0072b2", "#ffffff"),
    ("#e69f00", "#000000"),
    ("#004d40", "#ffffff"),
    ("#56b4e9", "#000000"),
    ("#882255", "#ffffff"),
)
_BELOW, _ABOVE = (("#0072b2", "#ffffff"), ("#e69f00", "#000000"))  # the two sides of zero
_ATTRIBUTES = ("underline", "bold", "bold underline", "reverse", "bold reverse")
PLAIN = Style.null()


@dataclass(frozen=True, slots=True)
class Scale:
    """How one quantity is coloured."""

    edges: tuple[float, ...]  # ascending; a value below the first has no colour
    labels: tuple[str, ...]  # one for each step from the first edge on


SCALES = {
    "log-probability": Scale(tuple(-math.log(p) for p in (0.9, 0.5, 0.2, 0.05, 0.01)), ("p < 0.9", "< 0.5", "< 0.2", "< 0.05", "< 0.01")),
    "entropy": Scale((0.1, 0.5, 1.0, 2.0, 3.0), ("≥ 0.1 nat", "≥ 0.5", "≥ 1", "≥ 2", "≥ 3")),
    "mismatch": Scale((0.01, 0.05, 0.1, 0.3, 1.0), ("≥ 0.01", "≥ 0.05", "≥ 0.1", "≥ 0.3", "≥ 1")),
}


def has_colours() -> bool:
    """Whether the terminal is to show colours."""
    return not os.environ.get("NO_COLOR")


@cache
def _style(pair: tuple[str, str], step: int) -> Style:
    background, foreground = pair
    return Style(bgcolor=background, color=foreground) if has_colours() else Style.parse(_ATTRIBUTES[step % len(_ATTRIBUTES)])


def on_scale(scale: Scale, value: float) -> Style:
    """The style of a value; none for NaN, or below the first edge."""
    step = sum(value >= edge for edge in scale.edges) - 1
    return _style(_RAMP[step], step) if step >= 0 else PLAIN


def of_kind(number: int) -> Style:
    """The style of a policy version; neighbours always differ."""
    return _style(_KINDS[number % len(_KINDS)], number)


def of_sign(value: float) -> Style:
    """The style of an advantage: one below zero, one above."""
    if math.isnan(value) or value == 0:
        return PLAIN
    return _style(_ABOVE if value > 0 else _BELOW, 3 if value > 0 else 0)


def legend(scale: Scale) -> list[tuple[str, Style]]:
    """The steps of a scale with their styles."""
    return [(f" {label} ", on_scale(scale, edge)) for label, edge in zip(scale.labels, scale.edges, strict=True)]
