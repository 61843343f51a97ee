"""The table of `rlx eval`: on the console, as JSON and CSV."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from rlx.cli.playing import eval_table
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths
from rlx.rollout.eval_summary import write_summary


def rows() -> list[dict[str, Any]]:
    scores = {"avg@2": 0.5, "avg@2_low": 0.4, "avg@2_high": 0.6, "pass@1": 0.5, "pass@2": 0.7}
    facts = {"examples": 10.0, "error_frac": 0.1, "truncated_frac": 0.0, "completion_mean": 5.0}
    return [{"step": step, "env": env, **scores, **facts, f"reward/{env}": 0.5} for step in (0, 10) for env in ("a", "b")]


def test_the_table_has_every_score_with_its_interval() -> None:
    head, cells = eval_table(rows())
    assert head == ["step", "env", "examples", "avg@2", "pass@1", "pass@2", "tokens", "errors", "truncated"]
    assert cells[0] == ["base", "a", "10", "0.500 [0.400, 0.600]", "0.500", "0.700", "5.0", "10.0%", "0.0%"]
    assert eval_table([rows()[0], rows()[2] | {"attested": 0.999}])[1][1][-1] == "99.9%"


def test_the_summary_is_written_as_json_and_csv(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for step in (10, 0):
        values = {f"eval/{row['env']}/{name}": value for row in rows()[:2] for name, value in row.items() if name not in ("step", "env")}
        MetricsWriter(paths.metrics, "eval").write(step, values | ({"eval/attested": 1.0} if step else {}))
    write_summary(paths, ["a", "b", "c"], {"model": "m"})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rows"] == [{**row, **({"attested": 1.0} if row["step"] else {})} for row in rows()]
    with (tmp_path / "summary.csv").open() as file:
        assert [row["env"] for row in csv.DictReader(file)] == ["a", "b", "a", "b"]
