"""What the benchmark of the whole loop makes of a run's records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from loop import PARTS, SPEEDS, measured, table  # noqa: E402

from rlx.metrics import METRICS  # noqa: E402


def records(steps: int) -> list[dict[str, Any]]:
    """A step lasts longer the earlier it is. The trainer's last record has no partner: the run was ended."""
    made: list[dict[str, Any]] = []
    for step in range(steps):
        times: dict[str, Any] = {"time/step": 10.0 - step, "step": step}
        made.append(
            times | {"source": "trainer", "perf/tokens_per_second": 100.0 * step, "time/wait_batch": 1.0, "perf/peak_memory_gb": 2.0}
        )
        made.append(times | {"source": "orchestrator", "perf/rollouts_per_second": 5.0, "time/wait_rollouts": 2.0})
    return [*made, {"source": "trainer", "step": steps, "time/step": 99.0, "perf/peak_memory_gb": 3.0}, {"source": "eval", "step": 1}]


def test_medians_are_of_complete_steps_after_the_first_three() -> None:
    found = measured(records(6))
    assert (found["steps"], found["warmup"]) == (3, 3)
    assert found["seconds"]["trainer"]["step"] == 6.0
    assert found["seconds"]["trainer"]["wait_batch"] == 1.0
    assert (found["trained_tokens_per_second"], found["rollouts_per_second"], found["trainer_peak_memory_gb"]) == (400.0, 5.0, 3.0)
    assert "mfu" not in found, "a CPU has no known peak"
    assert measured(records(2))["warmup"] == 0
    lines = table(found)
    assert "| trainer: wait batch, s | 1 | 17% |" in lines
    assert "| orchestrator: wait rollouts, s | 2 | 33% |" in lines


def test_a_run_without_a_complete_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no step with records of both"):
        measured(records(0))


def test_every_metric_that_is_read_exists() -> None:
    wanted = [name for names in SPEEDS.values() for name in names] + [name for parts in PARTS.values() for name in parts]
    assert set(wanted) <= set(METRICS)
