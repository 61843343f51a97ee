"""The report of a sweep: curves with bands over seeds, interquartile means, what differs, and every run with its end."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.metrics import METRICS
from rlx.report.chart import COLOURS, Chart, Curve, colour_of, draw, number
from rlx.report.gather import Facts, samples, sections_of
from rlx.report.page import folded, grid, note, page, table, text, tiles
from rlx.report.panels import EVAL, SECTIONS, Panel
from rlx.report.settings import SEED, Setting, SweepRuns, arrange, overrides_of
from rlx.report.single import provenance, sample
from rlx.report.statistics import FEW, Interval, band
from rlx.runs.history import AVERAGE

MOST_POINTS = 120  # of a curve with a band
MOST_COLUMNS = 12  # settings side by side in the table of differences
RESAMPLES = 1000  # of a band
# Titles of panels that show several metrics of a run, but only one of a sweep.
TITLES = {"off_policy/lag_mean": "Mean lag", "time/step": "Duration of a step"}

Array = NDArray[np.float64]


def report(directory: Path, found: Sequence[Facts], others: Sequence[str] = ()) -> str:
    """The page. `others`: lines about directories that are not shown."""
    sweep = arrange(found)
    best = max((f for f in found if f.score is not None), key=lambda f: f.score or 0.0, default=None)

    def curves() -> str:
        drawn = "".join(_panel(sweep, panel) for panels in SECTIONS.values() for panel in panels if panel.in_sweep)
        return _how(sweep) + grid([drawn]) if drawn else ""

    def taken() -> str:
        shown = "".join(map(sample, samples(best))) if best is not None else ""
        return f"<p>Of the run with the highest score, {text(best.name)}.</p>{shown}" if best is not None and shown else ""

    states = ", ".join(f"{count} {state}" for state, count in Counter(facts.state for facts in found).most_common())
    parts = {
        "Overview": lambda: _overview(sweep, found) + _ended(found),
        "Final scores": lambda: _final(sweep),
        "Curves": curves,
        "Evaluation": lambda: grid(_evaluations(sweep)),
        "Runs": lambda: _runs(sweep, found),
        "What differs": lambda: _differences(sweep),
        "Samples": taken,
        "Provenance": lambda: _provenance(found),
        "Not shown": lambda: note(others),
    }
    failed: list[str] = []
    sections = sections_of(parts, failed)
    problems = [f"{facts.name}: {problem}" for facts in found for problem in facts.problems]
    sections.append(("Not readable", note([*problems, *failed])))
    return page(directory.absolute().name, str(directory.absolute()), states, sections)


def _overview(sweep: SweepRuns, found: Sequence[Facts]) -> str:
    facts = {
        "runs": str(len(found)),
        "settings": str(len(sweep.settings)),
        "seeds": str(len({each.config[SEED] for each in found if each.config is not None})),
        "varied": ", ".join(sweep.keys) or ("the seed" if len(found) > 1 else "nothing"),
        "steps done": f"{sum(each.history.steps for each in found):,}",
    }
    return tiles(facts)


def _ended(found: Sequence[Facts]) -> str:
    """The runs that are not completed, and why."""
    lines = []
    for facts in found:
        if not facts.ended_well:
            most = facts.max_steps
            cause = facts.status.cause if facts.status is not None else None
            why = f": {cause.role} {cause.replica}, {cause.reason}" if cause is not None else ""
            lines.append(f"{facts.name}: {facts.state} after {facts.history.steps}{f' of {most}' if most else ''} steps{why}")
    if not lines:
        return ""
    head = f"{len(lines)} of {len(found)} runs are not completed. They are left out of the final scores."
    return note([head, "That flatters a setting whose runs fail.", *lines], "bad")


# scores


def _final(sweep: SweepRuns) -> str:
    scored = [setting for setting in sweep.settings if setting.scored]
    if not scored:
        if any(facts.ended_well for setting in sweep.settings for facts in setting.runs):
            return note(["The completed runs have no rewards, so there are no final scores. The charts below show their losses."])
        return note(["No run is completed yet, so there are no final scores."])
    rows = []
    for place, setting in enumerate(sweep.settings):
        found, paired = setting.iqm, setting.minus(scored[0]) if setting is not scored[0] else None
        key = f'<span class="key {colour_of(place)}"></span>'
        ended = sum(facts.ended_well and facts.score is not None for facts in setting.runs)
        seeds = f", {len(setting.scored)} seed{'s' * (len(setting.scored) > 1)}" * (len(setting.scored) != ended)
        of = f"{ended} of {len(setting.runs)}{seeds}"
        if found is None:
            rows.append([f"{key}{text(setting.label)}", of, "–", "", ""])
            continue
        difference = _interval(paired) if paired is not None else ""
        scores = text(", ".join(number(s) for s in sorted(setting.scored)))
        rows.append([f"{key}{text(setting.label)}", of, _interval(found), difference, scores])
    fewest = min(len(setting.scored) for setting in scored)
    metric = scored[0].runs[0].scored_by
    score = "the mean of its reward/mean in training over the last five steps" if metric is None else f"the last value of its {metric}"
    about = text(
        f"A run's score is {score}. IQM: the mean of the middle half of the scores; in brackets its 95 % bootstrap interval over seeds. "
        "Differences to the first setting are means over the seeds that both completed."
    )
    lines = []
    if fewest < FEW:
        what = "intervals of so few are too narrow, and of a single one there is none"
        lines.append(f"A setting has completed runs of only {fewest} seed{'' if fewest == 1 else 's'}: {what}.")
    repeated = [setting.label for setting in sweep.settings if setting.repeated_seeds]
    if repeated:
        lines.append(f"Runs of one seed are one draw, so the mean of their scores counts once: {'; '.join(repeated[:5])}")
    head = ["setting", "completed", "IQM [95 %]", "difference, same seeds", "scores"]
    return f'<div class="card">{table(head, rows, "scores")}<p class="about">{about}</p></div>{note(lines)}'


def _interval(found: Interval) -> str:
    ends = "" if found.low is None else f" <small>[{number(found.low)}, {number(found.high)}]</small>"
    return f"<b>{number(found.value)}</b>{ends}"


# curves


def _how(sweep: SweepRuns) -> str:
    lines = (
        "Mean over the seeds of a setting, with its 95 % bootstrap interval. Where runs of a setting are missing, because they failed or "
        "still run, the line is faint and has no band."
    )
    if len(sweep.settings) > COLOURS:
        lines += f" The {COLOURS} settings with the best final scores are coloured."
    return f'<p class="about">{lines}</p>'


def _panel(sweep: SweepRuns, panel: Panel) -> str:
    name = str(panel.in_sweep)
    found = (_mean(setting, name, panel.source, place) for place, setting in enumerate(sweep.settings))
    about = f"{METRICS[name][0].upper()}{METRICS[name][1:]}."
    title = TITLES.get(name, panel.title)
    lines = [line for line in found if line is not None]
    return draw(Chart(title=title, lines=lines, about=about, from_zero=panel.from_zero, may_be_log=panel.may_be_log), _key(name))


def _key(name: str) -> str:
    """A known metric's name as an id of the page."""
    return name.replace("/", "-")


def _mean(setting: Setting, name: str, source: str, place: int, marks: bool = False) -> Curve | None:
    """The mean curve of a setting's seeds; `None` if no run has the metric."""
    ended = {seed for seed, facts in setting.with_seeds if facts.ended_well}
    counted = [(seed, facts) for seed, facts in setting.with_seeds if facts.ended_well or seed not in ended]  # as in `by_seed`
    found = [(seed, series) for seed, facts in counted if len((series := facts.series(name, source))[0])]
    if not found:
        return None
    x, values = aligned([series for _, series in found])
    seeds = [seed for seed, _ in found]
    of_seed = [np.flatnonzero([seed == each for each in seeds]) for seed in dict.fromkeys(seeds)]
    values = np.array([values[places].mean(axis=0) for places in of_seed])  # runs of one seed are one draw
    whole = first_missing(values)
    if not marks:
        x, values = shrunk(x, values)
        whole = first_missing(values)
    summary = band(values, resamples=RESAMPLES)
    gone = np.arange(len(x)) >= (len(x) if whole is None else whole)
    low, high = (np.where(gone, np.nan, end) for end in (summary.low, summary.high))
    several = len(values) > 1
    return Curve(
        label=setting.label,
        x=x,
        y=summary.mean,
        low=low if several else None,
        high=high if several else None,
        runs=summary.runs,
        whole=whole,
        colour=place,
        marks=marks,
    )


def aligned(found: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Curves of R runs on their common steps: [T] steps and [R][T] values, NaN where a run has none."""
    steps = np.unique(np.concatenate([x for x, _ in found]))
    values = np.full((len(found), len(steps)), np.nan)
    for row, (x, y) in enumerate(found):
        values[row, np.searchsorted(steps, x)] = y
    return steps, values


def shrunk(x: Array, values: Array, most: int = MOST_POINTS) -> tuple[Array, Array]:
    """At most `most` points, each the mean of neighbouring steps. A run counts in a point only if it has all of its steps."""
    size = -(-len(x) // most)
    if size <= 1:
        return x, values
    edges = np.arange(0, len(x), size)
    counts = np.diff([*edges, len(x)])
    return np.add.reduceat(x, edges) / counts, np.add.reduceat(values, edges, axis=1) / counts


def first_missing(values: Array) -> int | None:
    """The first of T points at which a run [R][T] lacks a value; `None` if all have all."""
    gaps = np.flatnonzero(~np.isfinite(values).all(axis=0))
    return int(gaps[0]) if len(gaps) else None


def _evaluations(sweep: SweepRuns) -> Iterator[str]:
    runs = (facts for setting in sweep.settings for facts in setting.runs)
    names = dict.fromkeys(name for facts in runs for name in facts.names(EVAL) if AVERAGE.fullmatch(name))
    for count, name in enumerate(names):  # an environment's name is untrusted, so it makes no id
        lines = [line for place, s in enumerate(sweep.settings) if (line := _mean(s, name, EVAL, place, marks=True)) is not None]
        about = "Mean over seeds; the interval is over seeds, not over examples."
        title = name.removeprefix("eval/").replace("/", " ")
        yield draw(Chart(title=title, lines=lines, about=about, x_label="version", may_be_log=False), f"eval{count}")


# runs


def csv_of(found: Sequence[Facts]) -> str:
    """The runs as CSV, one a line: what was varied, state, score, the last value of every evaluation, and the cause of a failure."""
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows(_rows(arrange(found), found))
    return lines.getvalue()


def _rows(sweep: SweepRuns, found: Sequence[Facts]) -> Iterator[list[Any]]:
    """The head of the table of runs, and a row for each."""
    evals = list(dict.fromkeys(name for facts in found for name in facts.history.scores()))
    yield ["run", *sweep.keys, SEED, "state", "steps", found[0].scored_by or "reward", *evals, "cause"]
    for facts in found:
        asked, scores = overrides_of(facts), facts.history.scores()
        varied = [asked.get(key, "") for key in sweep.keys]
        last = [scores[name][max(scores[name])] if name in scores else "" for name in evals]
        cause = facts.status.cause if facts.status is not None else None
        why = f"{cause.role}: {cause.reason}" if cause is not None else ""
        yield [facts.name, *varied, (facts.config or {}).get(SEED, ""), facts.state, facts.history.steps, facts.score, *last, why]


def _runs(sweep: SweepRuns, found: Sequence[Facts]) -> str:
    places = {id(facts): place for place, setting in enumerate(sweep.settings) for facts in setting.runs}
    ordered = sorted(found, key=lambda facts: (places[id(facts)], str((facts.config or {}).get(SEED))))
    head, *rows = _rows(sweep, ordered)
    shown = [[number(cell) if isinstance(cell, float) else text("" if cell is None else cell) for cell in row] for row in rows]
    for row, facts in zip(shown, ordered, strict=True):
        row[0] = f'<span class="key {colour_of(places[id(facts)])}"></span>{row[0]}'
    return table(head, shown)


def _differences(sweep: SweepRuns) -> str:
    """The keys of the resolved configurations that differ between settings."""
    known = [setting for setting in sweep.settings if setting.leaves]
    if not sweep.leaves:
        return "<p>The configurations differ in nothing but the seed.</p>"
    shown = known[:MOST_COLUMNS]
    rows = [[text(name), *(text(setting.leaves.get(name, "–")) for setting in shown)] for name in sweep.leaves]
    more = f"<p>The first {MOST_COLUMNS} of {len(known)} settings are shown.</p>" if len(known) > MOST_COLUMNS else ""
    columns = table(["key", *(setting.label for setting in shown)], rows)
    return folded(f"{len(rows)} keys of the configuration", columns + more, is_open=len(rows) <= 12)


def _of(record: Mapping[str, Any], name: str, key: str) -> Any:
    found = record.get(name)
    return found.get(key) if isinstance(found, Mapping) else None


def _provenance(found: Sequence[Facts]) -> str:
    records = [(facts, facts.provenance) for facts in found if facts.provenance is not None]
    if not records:
        return ""
    lines = []
    for what, read in (
        ("commits", lambda record: str(_of(record, "source", "commit"))),
        ("sets of packages", lambda record: repr(record.get("packages"))),
        ("versions of Python", lambda record: str(_of(record, "python", "version"))),
    ):
        count = len({read(record) for _, record in records})
        if count > 1:
            lines.append(f"The runs used {count} different {what}: rlx diff RUN_A RUN_B shows them.")
    return note(lines, "bad") + f"<p>Of {text(records[0][0].name)}:</p>" + provenance(records[0][0])
