"""Writes a plan to `plan.yaml` and reads it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from rlx.paths import write_text
from rlx.types import ProcessSpec


def plan_yaml(plan: Sequence[ProcessSpec]) -> str:
    """The text of `plan.yaml`."""
    records = [{**asdict(spec), "gpus": list(spec.gpus), "argv": list(spec.argv)} for spec in plan]
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # a sweep writes hundreds of plans
    return yaml.dump(records, Dumper=dumper, sort_keys=False, allow_unicode=True, width=200)


def write_plan(path: Path, plan: Sequence[ProcessSpec]) -> None:
    write_text(path, plan_yaml(plan))


def read_plan(path: Path) -> list[ProcessSpec]:
    return [
        ProcessSpec(**{**record, "gpus": tuple(record["gpus"]), "argv": tuple(record["argv"])})
        for record in yaml.safe_load(path.read_text())
    ]
