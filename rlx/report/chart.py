"""Charts of a report: curves with intervals as data for plotly (`page.js` draws them), and a table of values that needs no script.

Knows neither runs nor metrics. Colours are numbers; `page.css` defines them for light and dark. Every line also has its own dashes, so that
colour is never the only difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLOURS = 8  # lines after these are grey
MOST_POINTS = 1000  # of a line: more than a card has pixels for
ROWS = 8  # of the table under a chart
LOG_FROM = 30.0  # the axis is logarithmic if the largest value exceeds the median by this factor

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve: P points, and an interval around them where it is known."""

    label: str
    x: Array  # [P] increasing
    y: Array  # [P] NaN: no value, a gap
    low: Array | None = None  # [P] NaN: no interval
    high: Array | None = None
    runs: NDArray[np.int64] | None = None  # [P] how many runs the point is the mean of
    whole: int | None = None  # from this point on some runs are missing, and the line is drawn faint; None: nowhere
    colour: int = 0
    marks: bool = False  # a dot and an interval at each point: the points are measurements far apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Several lines over the same axis."""

    title: str
    lines: Sequence[Curve]
    about: str = ""  # what is shown, in one sentence
    x_label: str = "step"
    from_zero: bool = False  # the axis begins at 0
    may_be_log: bool = True


def kept_points(y: Array, most: int = MOST_POINTS) -> NDArray[np.int64]:
    """Indices of at most `most` of P points: the lowest and the highest of each stretch of neighbours, so that no spike is lost."""
    if len(y) <= most:
        return np.arange(len(y))
    stretches = np.array_split(np.arange(len(y)), most // 2)
    shown = np.where(np.isfinite(y), y, 0.0)
    return np.unique([end for part in stretches for end in (part[shown[part].argmin()], part[shown[part].argmax()])])


def number(value: float | None) -> str:
    """A number of about four digits: `0.9312`, `12,345`, `3.1e-05`."""
    if value is None or not math.isfinite(value):
        return "–" if value is None or math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}".replace("-", "−")
    size = abs(value)
    text = f"{value:,.0f}" if size >= 1000 and size < 1e7 else f"{value:.4g}"
    return text.replace("-", "−") if "e" not in text else text


def draw(chart: Chart, key: str) -> str:
    """The chart as an HTML figure: title, drawing, table. `key`: its id on the page. Empty text if there is no value to draw."""
    known = [line for line in chart.lines if np.isfinite(line.y).any()]
    if not known:
        return ""
    is_log = chart.may_be_log and _spans_powers(known)
    missing = sum(int((~np.isfinite(line.y)).sum()) for line in chart.lines)
    notes = ["Logarithmic scale."] if is_log else []
    if missing and all(line.runs is None for line in chart.lines):  # the mean over runs has gaps where no run has a value
        notes.append(f'<strong class="warn">{missing:,} values are not finite.</strong>')
    about = " ".join(filter(None, [escape(chart.about), *notes]))
    summary = "; ".join(f"{line.label}: last {number(_finite(line)[-1])}" for line in known[:COLOURS])
    record = {"title": chart.title, "x_label": chart.x_label, "log": is_log, "from_zero": chart.from_zero, "lines": list(map(_data, known))}
    return (
        f'<figure class="card chart" id="{escape(key)}"><figcaption><h3>{escape(chart.title)}</h3></figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(f"{chart.title}, by {chart.x_label}. {summary}")}"></div>'
        f'<p class="about">{about}</p>{_table(known, chart.x_label)}'
        f'<script type="application/json">{embedded(record)}</script></figure>'
    )


def _spans_powers(lines: Sequence[Curve]) -> bool:
    values = np.concatenate([part[np.isfinite(part)] for line in lines for part in (line.y, line.low, line.high) if part is not None])
    return len(values) > 4 and bool((values > 0).all()) and float(values.max()) > LOG_FROM * float(np.median(values))


def _finite(line: Curve) -> Array:
    return line.y[np.isfinite(line.y)]


def colour_of(colour: int) -> str:
    """The class of a line's colour."""
    return f"c{colour}" if 0 <= colour < COLOURS else "grey"


def _table(lines: Sequence[Curve], x_label: str) -> str:
    """A few values of each line, evenly spaced over the axis."""
    shown = lines[:COLOURS]
    xs = np.unique(np.concatenate([line.x for line in shown]))
    chosen = xs[np.unique(np.linspace(0, len(xs) - 1, min(ROWS, len(xs))).round().astype(int))]
    head = "".join(f"<th>{escape(line.label)}</th>" for line in shown)
    rows = "".join(f"<tr><th>{number(float(x))}</th>{''.join(_cell(line, x) for line in shown)}</tr>" for x in chosen)
    table = f"<table><tr><th>{escape(x_label)}</th>{head}</tr>{rows}</table>"
    return f'<details><summary>values</summary><div class="scroll">{table}</div></details>'


def _cell(line: Curve, x: float) -> str:
    at = np.flatnonzero(line.x == x)
    if not len(at):
        return "<td>–</td>"
    value, low, high = (None if part is None else float(part[at[0]]) for part in (line.y, line.low, line.high))
    interval = "" if low is None or not math.isfinite(low) else f" <small>[{number(low)}, {number(high)}]</small>"
    return f"<td>{number(value)}{interval}</td>"


def _data(line: Curve) -> dict[str, Any]:
    """What the script needs of a line."""
    kept = kept_points(line.y)
    parts = {"x": line.x, "y": line.y, "low": line.low, "high": line.high, "runs": line.runs}
    whole = None if line.whole is None else int(np.searchsorted(kept, line.whole))
    numbers = {name: [_rounded(value) for value in part[kept].tolist()] for name, part in parts.items() if part is not None}
    return {"label": line.label, "colour": line.colour, "marks": line.marks, "whole": whole} | numbers


def embedded(record: Any) -> str:
    """JSON that may stand inside a script element, whatever text it holds."""
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "&<>\u2028\u2029"})


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
