"""Reads what `rlx synthesize` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file as they were written."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    rows = pq.read_table(path).to_pylist()
    for row in rows:
        for column in ("prompt", "completion"):
            if not isinstance(row[column], str):
                row[column] = [_given(message) for message in row[column]]
    return rows


def _given(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the keys that it lacks."""
    return {name: value for name, value in message.items() if value is not None}
