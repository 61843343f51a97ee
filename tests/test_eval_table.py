"""The table of `rlx eval`: on the console, as JSON and CSV, and as a plot."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from rlx.cli.playing import eval_table
from rlx.rollout.scoring import columns_of, write_summary


def rows() -> list[dict[str, Any]]:
    scores = {"avg@2": 0.5, "avg@2_low": 0.4, "avg@2_high": 0.6, "pass@1": 0.5, "pass@2": 0.7}
    facts = {"examples": 10.0, "error_frac": 0.1, "truncated_frac": 0.0, "completion_mean": 5.0}
    return [{"step": step, "env": env, **scores, **facts, f"reward/{env}": 0.5} for step in (0, 10) for env in ("a", "b")]


def test_the_table_has_every_score_with_its_interval() -> None:
    head, cells = eval_table(rows())
    assert head == ["step", "env", "examples", "avg@2", "pass@1", "pass@2", "tokens", "errors", "truncated"]
    assert cells[0] == ["base", "a", "10", "0.500 [0.400, 0.600]", "0.500", "0.700", "5.0", "10.0%", "0.0%"]
    assert columns_of(rows())[:7] == ["step", "env", "avg@2", "avg@2_low", "avg@2_high", "pass@1", "pass@2"]
    assert eval_table([rows()[0], rows()[2] | {"attested": 0.999}])[1][1][-1] == "99.9%"


def test_the_summary_is_written_as_json_csv_and_a_plot(tmp_path: Path) -> None:
    write_summary(tmp_path, rows(), {"model": "m"})
    assert json.loads((tmp_path / "summary.json").read_text())["rows"][2]["step"] == 10
    with (tmp_path / "summary.csv").open() as file:
        assert [row["env"] for row in csv.DictReader(file)] == ["a", "b", "a", "b"]
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")
