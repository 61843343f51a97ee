"""The table of `rlx eval`: one row for each evaluated version and environment, as JSON, CSV and a plot of score over steps.

The rows come from the records of source `eval` in `metrics.jsonl`, which both kinds of evaluation write.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.metrics import read_metrics
from rlx.paths import RunPaths, atomic, write_text

SUMMARY, TABLE, PLOT = "summary.json", "summary.csv", "scores.png"
Row = dict[str, Any]


def rows_of(paths: RunPaths, envs: Sequence[str]) -> list[Row]:
    """One row per version and environment, ordered by version, then as in `envs`; the names without `eval/<env>/`, and `attested`."""
    records = {record["step"]: record for record, _ in read_metrics(paths.metrics) if record["source"] == "eval"}
    rows = []
    for step, record in sorted(records.items()):
        for env in envs:
            prefix = f"eval/{env}/"
            values = {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}
            if values:
                attested = {"attested": record["eval/attested"]} if "eval/attested" in record else {}
                rows.append({"step": step, "env": env, **values, **attested})
    return rows


def score_of(row: Mapping[str, Any]) -> str:
    """The name of a row's main score: `avg@4`."""
    return next(name for name in row if name.startswith("avg@") and not name.endswith(("_low", "_high")))


def columns_of(rows: Sequence[Row]) -> list[str]:
    """All columns: the scores with their intervals first, then the shares, then rewards and metrics by name."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    kinds = (
        "step",
        "env",
        "avg@",
        "pass@",
        "examples",
        "error_frac",
        "truncated_frac",
        "completion_mean",
        "attested",
        "reward/",
        "metric/",
    )

    def place(name: str) -> tuple[int, int, str]:
        kind = next((n for n, each in enumerate(kinds) if name.startswith(each)), len(kinds))
        k = name.partition("@")[2].partition("_")[0]
        return kind, int(k) if k.isdecimal() else 0, name.replace("_low", "_1").replace("_high", "_2")

    return sorted(names, key=place)


def write_summary(folder: Path, rows: Sequence[Row], facts: Mapping[str, Any]) -> None:
    """Write `summary.json` (the facts, and the rows) and `summary.csv` and `scores.png`, if there are several steps."""
    columns = columns_of(rows)
    write_text(
        folder / SUMMARY,
        json.dumps({**facts, "rows": [{name: row[name] for name in columns if name in row} for row in rows]}, indent=1) + "\n",
    )
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(folder / TABLE, text.getvalue())
    if len({row["step"] for row in rows}) > 1:
        plot(folder / PLOT, rows)


def plot(file: Path, rows: Sequence[Row]) -> None:
    """Draw each environment's main score over steps, with its interval."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for env in dict.fromkeys(row["env"] for row in rows):
        mine = [row for row in rows if row["env"] == env]
        score = score_of(mine[0])
        steps = [row["step"] for row in mine]
        axes.plot(steps, [row[score] for row in mine], marker="o", markersize=4, label=f"{env} {score}")
        low, high = ([float(row.get(f"{score}{end}", math.nan)) for row in mine] for end in ("_low", "_high"))
        axes.fill_between(steps, low, high, alpha=0.2, linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel("score (95 % interval over examples)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    FigureCanvasAgg(figure)
    with atomic(file) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
