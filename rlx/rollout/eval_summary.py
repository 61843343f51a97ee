"""The table of `rlx eval`: one row for each evaluated version and environment, as JSON and CSV.

The rows come from the records of source `eval` in `metrics.jsonl`, which both kinds of evaluation write. `rlx report` plots them.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.metrics import read_metrics
from rlx.paths import RunPaths, write_text


def write_summary(paths: RunPaths, envs: Sequence[str], facts: Mapping[str, Any]) -> None:
    """Write `summary.json` (the facts, and the rows) and `summary.csv`.

    A row has the version, the environment, and what its record says by the names without `eval/<env>/`; the environments as in `envs`.
    """
    records = {record["step"]: record for record, _ in read_metrics(paths.metrics) if record["source"] == "eval"}
    rows: list[dict[str, Any]] = []
    for step, record in sorted(records.items()):
        for env in envs:
            prefix = f"eval/{env}/"
            values = {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}
            attested = {"attested": record["eval/attested"]} if "eval/attested" in record else {}
            rows += [{"step": step, "env": env, **values, **attested}] if values else []
    write_text(paths.root / "summary.json", json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(paths.root / "summary.csv", text.getvalue())
