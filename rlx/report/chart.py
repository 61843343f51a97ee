"""Curves as SVG with a legend and a table, readable without scripts. `page.js` adds the values under the pointer.

Knows neither runs nor metrics. Colours are classes (`c0` … `c7`, `grey`), which `page.css` defines for light and dark. Every line also has
its own dashes, so that colour is never the only difference.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 440, 230  # user units of the drawing
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 8, 26  # margins around the plot; the left one holds −0.00015
COLOURS = 8  # lines after these are grey
MOST_POINTS = 200  # of a line: more than a card has pixels for
ROWS = 8  # of the table under a chart
LOG_FROM = 30.0  # the axis is logarithmic if the largest value exceeds the median by this factor

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
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
    smallest: bool = False  # thin out by the smallest value of neighbours, not by their mean
    largest: bool = False  # thin out by the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Several lines over the same axis."""

    title: str
    lines: Sequence[Line]
    about: str = ""  # what is shown, in one sentence
    x_label: str = "step"
    from_zero: bool = False  # the axis begins at 0
    may_be_log: bool = True


def thin(line: Line, most: int = MOST_POINTS) -> tuple[Line, int]:
    """At most `most` points, each the mean of neighbours (or the smallest, or the largest), and how many points became one."""
    count = len(line.x)
    size = -(-count // most)
    if size <= 1:
        return line, 1
    edges = np.arange(0, count, size)

    def shrunk(values: Array | None, how: str = "mean") -> Array | None:
        if values is None:
            return None
        there = np.isfinite(values)
        if how == "mean":
            with np.errstate(invalid="ignore"):
                return np.add.reduceat(np.where(there, values, 0.0), edges) / np.add.reduceat(there.astype(float), edges)
        function, empty = (np.minimum, np.inf) if how == "smallest" else (np.maximum, -np.inf)
        found = function.reduceat(np.where(there, values, empty), edges)
        return np.where(np.isfinite(found), found, np.nan)

    how = "smallest" if line.smallest else "largest" if line.largest else "mean"
    x, y = shrunk(line.x), shrunk(line.y, how)
    assert x is not None and y is not None  # noqa: PT018
    return Line(
        label=line.label,
        x=x,
        y=y,
        low=shrunk(line.low),
        high=shrunk(line.high),
        runs=None if line.runs is None else np.minimum.reduceat(line.runs, edges),
        whole=None if line.whole is None else line.whole // size,
        colour=line.colour,
        marks=line.marks,
    ), size


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
    """The chart as an HTML figure: title, legend, drawing, table. `key`: its id on the page. Empty text if there is no value to draw."""
    thinned = [thin(line) for line in chart.lines if len(line.x)]
    lines, size = [line for line, _ in thinned], max((n for _, n in thinned), default=1)
    known = [line for line in lines if np.isfinite(line.y).any()]
    if not known:
        return ""
    axes = _axes(chart, known)
    missing = sum(int((~np.isfinite(line.y)).sum()) for line in chart.lines)
    notes = [f"Each point stands for {size} steps." if size > 1 else "", "Logarithmic scale." if axes.log else ""]
    lost = f'<strong class="warn">{missing:,} values are not finite.</strong>' if missing and not _has_gaps(chart) else ""
    body = "".join(_line(line, axes) for line in sorted(known, key=lambda line: -line.colour))
    about = " ".join(filter(None, [escape(chart.about), *notes, lost]))
    summary = "; ".join(f"{line.label}: {_first_last(line)}" for line in known[:COLOURS])
    return (
        f'<figure class="card chart" id="{escape(key)}" tabindex="0" data-x="{escape(chart.x_label)}">'
        f"<figcaption><h3>{escape(chart.title)}</h3>{_legend(known)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{chart.title}, by {chart.x_label}. {summary}")}">'
        f"{_frame(axes, chart.x_label)}{body}</svg>"
        f'<p class="about">{about}</p>{_table(known, chart.x_label)}{_data(known, axes)}</figure>'
    )


def _has_gaps(chart: Chart) -> bool:
    return any(line.runs is not None for line in chart.lines)


# axes


@dataclass(frozen=True, slots=True)
class _Axes:
    """From values to the drawing's units."""

    x: tuple[float, float]
    y: tuple[float, float]  # of log10 if `log`
    log: bool

    def at_x(self, value: Any) -> Any:
        return LEFT + (value - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def at_y(self, value: Any) -> Any:
        value = np.log10(np.maximum(value, 10 ** self.y[0])) if self.log else value
        return TOP + (self.y[1] - value) / (self.y[1] - self.y[0]) * (HEIGHT - TOP - BOTTOM)


def _axes(chart: Chart, lines: Sequence[Line]) -> _Axes:
    xs = np.concatenate([line.x for line in lines])
    parts = [part for line in lines for part in (line.y, line.low, line.high) if part is not None]
    ys = np.concatenate(parts)
    ys = ys[np.isfinite(ys)]
    positive = ys[ys > 0]
    log = chart.may_be_log and len(positive) == len(ys) and float(ys.max()) > LOG_FROM * float(np.median(ys)) and len(ys) > 4
    ends: tuple[float, float]
    if log:
        ends = (math.floor(math.log10(positive.min())), math.ceil(math.log10(positive.max())))
        ends = ends if ends[0] < ends[1] else (ends[0], ends[0] + 1)
    else:
        low, high = float(ys.min()), float(ys.max())
        low = min(low, 0.0) if chart.from_zero else low
        pad = (high - low) * 0.06 or max(abs(high) * 0.1, 1e-3)
        ends = (low if chart.from_zero and low == 0 else low - pad, high + pad)
    first, last = float(xs.min()), float(xs.max())
    return _Axes((first, last) if last > first else (first - 0.5, first + 0.5), ends, log)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most `most` + 1 round numbers between `low` and `high`: multiples of 1, 2 or 5 times a power of 10."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    return [round(i * step, 12) + 0.0 for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    """A tick's label, at most six characters."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if 0 < size < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.4g}".replace("-", "−")


def _frame(axes: _Axes, x_label: str) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    if axes.log:
        powers = range(math.ceil(axes.y[0]), math.floor(axes.y[1]) + 1)
        every = -(-len(powers) // 6)
        marks = [(10.0**power, f"1e{power}" if not -2 <= power <= 3 else f"{10.0**power:g}") for power in powers[::every]]
    else:
        marks = [(tick, _short(tick)) for tick in ticks(*axes.y)]
    for value, text in marks:
        y = axes.at_y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/><text x="{LEFT - 6}" y="{y + 4:.1f}" class="end">{text}</text>')
    for tick in ticks(*axes.x, most=6):
        if tick == int(tick):
            parts.append(f'<text x="{axes.at_x(tick):.1f}" y="{bottom + 16}" class="middle">{_short(tick)}</text>')
    parts.append(
        f'<path class="axis" d="M{LEFT} {bottom}H{right}"/><text x="{LEFT - 12}" y="{bottom + 16}" class="end">{escape(x_label)}</text>'
    )
    return "".join(parts)


# lines


def _line(line: Line, axes: _Axes) -> str:
    x, y = axes.at_x(line.x), axes.at_y(line.y)
    look = colour_of(line.colour)
    parts = []
    if line.low is not None and line.high is not None:
        low, high = axes.at_y(line.low), axes.at_y(line.high)
        if line.marks:
            spans = zip(x, low, high, strict=True)
            parts += [f'<path class="line {look}" d="M{a:.1f} {b:.1f}V{c:.1f}"/>' for a, b, c in spans if math.isfinite(b + c)]
        else:
            parts += [f'<path class="band {look}" d="{shape}"/>' for shape in _bands(x, low, high)]
    cut = len(x) if line.whole is None else line.whole
    if cut < len(x):
        parts.append(f'<path class="line rest {look}" d="{_path(x[max(cut - 1, 0) :], y[max(cut - 1, 0) :])}"/>')
    dash = f" d{line.colour}" if 0 <= line.colour < COLOURS else ""
    if (shape := _path(x[:cut], y[:cut])) != "":
        parts.append(f'<path class="line{dash} {look}" d="{shape}"/>')
    if line.marks or np.isfinite(y).sum() == 1:
        points = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
        parts += [f'<circle class="dot {look}" cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>' for a, b in points]
    return "".join(parts)


def colour_of(colour: int) -> str:
    """The class of a line's colour."""
    return f"c{colour}" if 0 <= colour < COLOURS else "grey"


def _path(x: Array, y: Array) -> str:
    """Straight lines through the points; a gap where y is not finite."""
    parts, pen = [], "M"
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if math.isfinite(b):
            parts.append(f"{pen}{a:.1f} {b:.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def _bands(x: Array, low: Array, high: Array) -> Iterable[str]:
    """Closed shapes between the ends of the interval, one for each stretch where it is known."""
    there = np.isfinite(low) & np.isfinite(high)
    stretches = np.split(np.arange(len(x)), np.flatnonzero(np.diff(there.astype(int))) + 1)
    for part in stretches:
        if len(part) > 1 and there[part[0]]:
            forth = "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x[part], high[part], strict=True))
            back = "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x[part[::-1]], low[part[::-1]], strict=True))
            yield f"M{forth}L{back}Z"


# words


def _first_last(line: Line) -> str:
    found = line.y[np.isfinite(line.y)]
    return f"first {number(found[0])}, last {number(found[-1])}, lowest {number(found.min())}, highest {number(found.max())}"


def _legend(lines: Sequence[Line]) -> str:
    items = []
    for line in lines[:COLOURS]:
        found = line.y[np.isfinite(line.y)]
        dash = f" d{line.colour}" if 0 <= line.colour < COLOURS else ""
        sample = f'<svg viewBox="0 0 22 8" aria-hidden="true"><path class="line{dash} {colour_of(line.colour)}" d="M1 4H21"/></svg>'
        items.append(f"<li>{sample}{escape(line.label)} <b>{number(float(found[-1]))}</b></li>")
    if len(lines) > COLOURS:
        items.append(f"<li>and {len(lines) - COLOURS} more, grey</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _table(lines: Sequence[Line], x_label: str) -> str:
    """A few values of each line, evenly spaced over the axis."""
    shown = lines[:COLOURS]
    xs = np.unique(np.concatenate([line.x for line in shown]))
    chosen = xs[np.unique(np.linspace(0, len(xs) - 1, min(ROWS, len(xs))).round().astype(int))]
    head = "".join(f"<th>{escape(line.label)}</th>" for line in shown)
    rows = []
    for x in chosen:
        cells = []
        for line in shown:
            at = np.flatnonzero(line.x == x)
            text = number(float(line.y[at[0]])) if len(at) else "–"
            if len(at) and line.low is not None and line.high is not None and math.isfinite(line.low[at[0]]):
                text += f" <small>[{number(float(line.low[at[0]]))}, {number(float(line.high[at[0]]))}]</small>"
            cells.append(f"<td>{text}</td>")
        rows.append(f"<tr><th>{number(float(x))}</th>{''.join(cells)}</tr>")
    table = f"<table><tr><th>{escape(x_label)}</th>{head}</tr>{''.join(rows)}</table>"
    return f'<details><summary>values</summary><div class="scroll">{table}</div></details>'


def _data(lines: Sequence[Line], axes: _Axes) -> str:
    """What the script needs: the values of every line, and how they lie in the drawing."""
    record = {
        "box": [LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM],
        "x": axes.x,
        "y": axes.y,
        "log": axes.log,
        "lines": [
            {"label": line.label, "colour": colour_of(line.colour), "x": _rounded(line.x), "y": _rounded(line.y)}
            | ({"low": _rounded(line.low), "high": _rounded(line.high)} if line.low is not None and line.high is not None else {})
            | ({"runs": line.runs.tolist()} if line.runs is not None else {})
            for line in lines
        ],
    }
    return f'<script type="application/json">{embedded(record)}</script>'


def embedded(record: Any) -> str:
    """JSON that may stand inside a script element, whatever text it holds."""
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "&<>\u2028\u2029"})


def _rounded(values: Array) -> list[float | int | None]:
    found: list[float | int | None] = []
    for value in values.tolist():
        short = float(f"{value:.5g}") if math.isfinite(value) else None
        found.append(int(short) if short is not None and short == int(short) and abs(short) < 1e15 else short)
    return found
