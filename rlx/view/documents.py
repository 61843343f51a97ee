"""What a rollout's screen shows, as lines for a width: the conversation, its tokens in colours, its tokens as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style

from rlx.runs.tokens import Tokens
from rlx.view.colours import ENTROPY, MISMATCH, PLAIN, SURPRISE, WEIGHT, Scale, has_colours, legend, of_kind, of_sign, on_scale
from rlx.view.flow import Piece, flow, words
from rlx.view.lines import conversation, facts, more_facts, printable

Lines = list[list[Segment]]

BOLD, DIM, ITALIC = Style(bold=True), Style(dim=True), Style(italic=True)
_ROLE = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "cyan"}
REPLAY = "replay "  # before the name of a replay
_SCALES = {"log-probability": SURPRISE, "entropy": ENTROPY, "mismatch": MISMATCH}
QUANTITIES = ("log-probability", "entropy", "mismatch", "version", "advantage", "none")


def headline(record: Mapping[str, Any], width: int) -> Lines:
    """The facts of a rollout."""
    lines = flow(words(facts(record), BOLD), width)
    for name, value in more_facts(record):
        lines += flow([(f"{name} ", DIM), *words(value, BOLD if name in ("error", "left out") else PLAIN)], width)
    return lines


def spoken(record: Mapping[str, Any], width: int) -> Lines:
    """The conversation, message by message."""
    lines: Lines = []
    for message in conversation(record):
        if lines:
            lines.append([])
        colour = _ROLE.get(message.role) if has_colours() else None
        mark = "▌ " if message.sampled else "  "
        lines.append([Segment(f"{mark}{printable(message.head) or 'text'}", Style(bold=True, color=colour))])
        lines += flow(words(message.text, ITALIC if message.part else PLAIN), width, indent=2)
    return lines or [[Segment("nothing was said", DIM)]]


def known(samples: Sequence[Tokens]) -> list[str]:
    """The quantities that were recorded."""
    lacking = set()
    if any(one.entropy is None for one in samples):
        lacking.add("entropy")
    if any(one.mismatch is None for one in samples):
        lacking.add("mismatch")
    return [*(name for name in QUANTITIES if name not in lacking), *(REPLAY + name for name in _replays(samples))]


def _replays(samples: Sequence[Tokens]) -> list[str]:
    return list(dict.fromkeys(name for one in samples for name in one.replays))


def _scale(quantity: str) -> Scale | None:
    return WEIGHT if quantity.startswith(REPLAY) else _SCALES.get(quantity)


def values_of(one: Tokens, quantity: str) -> NDArray[np.float32]:
    """A quantity of each token [L]; NaN where it is unknown. Surprise is the negative log-probability; of a replay, it is |Δ weight|."""
    if replay := one.replays.get(quantity.removeprefix(REPLAY)):
        return np.abs(replay.other - replay.recorded)
    if quantity == "entropy" and one.entropy is not None:
        return one.entropy
    if quantity == "mismatch" and one.mismatch is not None:
        return np.abs(one.mismatch)
    return {"log-probability": -one.logprobs, "version": one.versions, "advantage": one.advantages}.get(
        quantity, np.full(len(one), np.nan)
    ).astype(np.float32)


def style_of(quantity: str, value: float) -> Style:
    """The style of a sampled token."""
    if quantity == "none" or math.isnan(value):
        return PLAIN
    if quantity == "version":
        return of_kind(int(value))
    if quantity == "advantage":
        return of_sign(value)
    scale = _scale(quantity)
    assert scale is not None, quantity
    return on_scale(scale, value)


def key_to_colours(samples: Sequence[Tokens], quantity: str) -> list[Piece]:
    """The legend of a quantity."""
    scale = _scale(quantity)
    if scale is not None:
        what = {"log-probability": "sampled with", "mismatch": "|log-probability: trainer − engine|"}.get(quantity, quantity)
        if quantity.startswith(REPLAY):
            name = quantity.removeprefix(REPLAY)
            norms = dict.fromkeys("{:.4g} → {:.4g}".format(*one.replays[name].norms) for one in samples if name in one.replays)
            what = f"|weight under {name} − under the run's objective|, gradient norm {', '.join(norms)}"
        return [(f"{what} ", PLAIN), *((piece, style) for label, style in legend(scale) for piece, style in ((label, style), (" ", PLAIN)))]
    if quantity == "version":
        versions = sorted({int(v) for one in samples for v in np.unique(one.versions[one.sampled])})
        return [("policy version ", PLAIN), *(part for v in versions for part in ((f" {v} ", of_kind(v)), (" ", PLAIN)))]
    if quantity == "advantage":
        return [("advantage ", PLAIN), (" negative ", of_sign(-1)), (" ", PLAIN), (" positive ", of_sign(1))]
    return [("no colours", PLAIN)]


def coloured(samples: Sequence[Tokens], pieces: Sequence[Sequence[str]], quantity: str, width: int) -> Lines:
    """The tokens as text. Sampled tokens have the colour of their number, others are dim. `pieces` [samples][L]: their texts."""
    lines: Lines = []
    for number, (one, texts) in enumerate(zip(samples, pieces, strict=True)):
        if len(samples) > 1:
            lines += [*([[]] if lines else []), [Segment(f"sample {number + 1} of {len(samples)}", BOLD)]]
        values = values_of(one, quantity)
        cached: dict[float, Style] = {}
        flowing: list[Piece] = []
        for text, sampled, value in zip(texts, one.sampled.tolist(), values.tolist(), strict=True):
            style = cached.setdefault(value, style_of(quantity, value)) if sampled else DIM
            flowing.append((printable(text).replace("\n", "↵\n" if sampled else "\n"), style))
        lines += flow(flowing, width)
    return lines


def numbered(samples: Sequence[Tokens], pieces: Sequence[Sequence[str]], width: int) -> Lines:
    """A line for each sampled token with all its numbers. Tokens that the policy did not sample are only counted."""
    names = ["token", "id", "logprob", "p", "entropy", "mismatch", "version", "advantage", "temp"]
    names = [name for name in names if name in {*known(samples), "token", "id", "logprob", "p", "temp"}]
    replays = _replays(samples)
    names += [*(["w"] if replays else []), *(f"w {name}" for name in replays)]
    lines: Lines = []
    for one, texts in zip(samples, pieces, strict=True):
        lines.append([Segment("place  " + "  ".join(_cell(name, name) for name in names), BOLD)])
        mismatch = one.mismatch
        for sampled, run in groupby(range(len(one)), key=lambda i: bool(one.sampled[i])):
            if not sampled:
                lines.append([Segment(f"…      {len(list(run))} tokens that the policy did not sample", DIM)])
                continue
            for i in run:
                shown = {
                    "token": repr(printable(texts[i]))[1:-1].replace("\\n", "↵"),
                    "id": str(one.ids[i]),
                    "logprob": f"{one.logprobs[i]:.3f}",
                    "p": f"{math.exp(min(float(one.logprobs[i]), 0.0)):.3f}",
                    "entropy": "" if one.entropy is None else f"{one.entropy[i]:.3f}",
                    "mismatch": "" if mismatch is None else f"{mismatch[i]:+.4f}",
                    "version": str(one.versions[i]),
                    "advantage": f"{one.advantages[i]:+.3f}",
                    "temp": f"{one.temperature[i]:g}",
                    **{f"w {name}": f"{replay.other[i]:+.4f}" for name, replay in one.replays.items()},
                    "w": next((f"{replay.recorded[i]:+.4f}" for replay in one.replays.values()), ""),
                }
                lines.append([Segment(f"{i:>5}  " + "  ".join(_cell(name, shown.get(name, "")) for name in names))])
        lines.append([])
    return lines


def _cell(name: str, text: str) -> str:
    if name == "token":
        return f"{text[:15] + '…' if len(text) > 16 else text:<16}"
    return f"{text:>{max(len(name), 7)}}"
