"""What a rollout's screen shows: the conversation, its tokens in colours, its tokens as numbers.

A document is a list of texts, one below the other, because texts that are not on the screen cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

import numpy as np
from rich.style import Style
from rich.text import Text

from rlx.arrays import Float
from rlx.runs.tokens import Tokens
from rlx.view.colours import PLAIN, SCALES, has_colours, legend, of_kind, of_sign, on_scale
from rlx.view.format_rollout import conversation, facts, more_facts, printable

BOLD, DIM, ITALIC = Style(bold=True), Style(dim=True), Style(italic=True)
_ROLE = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "cyan"}
BLOCK = 500  # parts of a text
Part = tuple[str, Style]
QUANTITIES = (*SCALES, "version", "advantage")


def headline(record: Mapping[str, Any]) -> Text:
    """The facts of a rollout."""
    parts: list[Part] = [(facts(record), BOLD)]
    for name, value in more_facts(record):
        parts += [(f"\n{name} ", DIM), (value, BOLD if name in ("error", "left out by") else PLAIN)]
    return _joined([*parts, ("\n", PLAIN)])


def spoken(record: Mapping[str, Any]) -> list[Text]:
    """The conversation, message by message."""
    found = []
    for message in conversation(record):
        colour = _ROLE.get(message.role) if has_colours() else None
        head = f"{'▌ ' if message.sampled else ''}{message.head or 'text'}\n"
        found.append(_joined([(head, Style(bold=True, color=colour)), (f"{message.text}\n", ITALIC if message.part else PLAIN)]))
    return found or [Text("nothing was said", DIM)]


def _joined(parts: Iterable[Part]) -> Text:
    return Text().append_tokens((printable(text), style) for text, style in parts)


def _blocks(parts: Iterable[Part]) -> list[Text]:
    """The parts as texts of some hundred, each of which ends where a line ends."""
    blocks: list[list[Part]] = [[]]
    for text, style in parts:
        if len(blocks[-1]) >= BLOCK and text.endswith("\n"):
            blocks[-1].append((text[:-1], style))
            blocks.append([])
        else:
            blocks[-1].append((text, style))
    return [_joined(block) for block in blocks]


def known(samples: Sequence[Tokens]) -> list[str]:
    """The quantities that were recorded."""
    return [name for name in QUANTITIES if all(values_of(one, name) is not None for one in samples)]


def values_of(one: Tokens, quantity: str) -> Float | None:
    """A quantity of each token [L]: surprise is the negative log-probability. None: it was not recorded."""
    recorded: dict[str, Any] = {
        "log-probability": -one.sample.inference_logprobs,
        "entropy": one.entropy,
        "mismatch": None if one.mismatch is None else np.abs(one.mismatch),
        "version": one.sample.versions,
        "advantage": one.sample.advantages,
    }
    return cast("Float | None", recorded[quantity])


def style_of(quantity: str, value: float) -> Style:
    """The style of a sampled token."""
    if quantity == "version":
        return of_kind(int(value))
    if quantity == "advantage":
        return of_sign(value)
    return on_scale(SCALES[quantity], value)


def key_to_colours(samples: Sequence[Tokens], quantity: str) -> Text:
    """The legend of a quantity."""
    what = {"log-probability": "sampled with", "mismatch": "|log-probability: trainer − engine|", "version": "policy version"}.get(
        quantity, quantity
    )
    if quantity == "version":
        versions = sorted({int(v) for one in samples for v in np.unique(one.sample.versions[one.sample.loss_mask])})
        steps = [(f" {v} ", of_kind(v)) for v in versions]
    elif quantity == "advantage":
        steps = [(" negative ", of_sign(-1)), (" positive ", of_sign(1))]
    else:
        steps = legend(SCALES[quantity])
    return Text(" ").join([Text(what), *(Text(label, style) for label, style in steps)])


def coloured(samples: Sequence[Tokens], texts: Sequence[Sequence[str]], quantity: str) -> list[Text]:
    """The tokens as text. Sampled tokens have the colour of their number, others are dim. `texts` [samples][L]."""
    parts: list[Part] = []
    for number, (one, pieces) in enumerate(zip(samples, texts, strict=True), 1):
        if len(samples) > 1:
            parts.append((f"\nsample {number} of {len(samples)}\n", BOLD))
        values = values_of(one, quantity)
        for i, (text, sampled) in enumerate(zip(pieces, one.sample.loss_mask.tolist(), strict=True)):
            style = DIM if not sampled else PLAIN if values is None else style_of(quantity, float(values[i]))
            parts.append((text.replace("\n", "↵\n") if sampled else text, style))
        parts.append(("\n", PLAIN))
    return _blocks(parts)


def numbered(samples: Sequence[Tokens], texts: Sequence[Sequence[str]]) -> list[Text]:
    """A line for each sampled token with all its numbers. Tokens that the policy did not sample are only counted."""
    names = ("id", "logprob", "p", "entropy", "mismatch", "version", "advantage", "temp")
    parts: list[Part] = []
    for one, pieces in zip(samples, texts, strict=True):
        sample = one.sample
        parts.append((f"place  {'token':<16}  " + "  ".join(f"{name:>7}" for name in names) + "\n", BOLD))
        columns: dict[str, tuple[Any, str]] = {
            "id": (sample.token_ids, ""),
            "logprob": (sample.inference_logprobs, ".3f"),
            "p": (np.exp(np.minimum(sample.inference_logprobs, 0)), ".3f"),
            "entropy": (one.entropy, ".3f"),
            "mismatch": (one.mismatch, "+.4f"),
            "version": (sample.versions, ""),
            "advantage": (sample.advantages, "+.3f"),
            "temp": (sample.temperature, "g"),
        }
        shown = [(max(len(name), 7), *columns[name]) for name in names]
        for sampled, run in groupby(range(len(pieces)), key=sample.loss_mask.tolist().__getitem__):
            if not sampled:
                parts.append((f"…      {len(list(run))} tokens that the policy did not sample\n", DIM))
                continue
            for i in run:
                token = repr(printable(pieces[i]))[1:-1].replace("\\n", "↵")
                values = ("-" if values is None else format(values[i], form) for _, values, form in shown)
                cells = (f"{value:>{width}}" for value, (width, *_) in zip(values, shown, strict=True))
                parts.append((f"{i:>5}  {token[:15] + '…' if len(token) > 16 else token:<16}  {'  '.join(cells)}\n", PLAIN))
    return _blocks(parts)
