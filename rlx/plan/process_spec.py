"""One process of a plan, and `plan.yaml`: a plan written and read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

from rlx.paths import write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of the plan. The supervisor starts it, watches it and stops it."""

    role: str  # "prepare", "inference", "orchestrator", "trainer"
    replica: int
    node: int  # index of the host in the allocation
    gpus: tuple[int, ...]  # device indices on that host; empty on CPU
    ports: dict[str, int] = field(default_factory=dict)  # purpose -> port; 0: the process binds a free port itself
    env: dict[str, str] = field(default_factory=dict)  # added to the environment
    argv: tuple[str, ...] = ()  # the command
    service: bool = False  # True: it serves until stopped, so an early exit is a failure

    @property
    def name(self) -> str:
        """`inference_0`, `trainer`, `trainer_1`; also the name of its log file."""
        return f"{self.role}_{self.replica}" if self.service or self.replica else self.role


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
        for record in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]
