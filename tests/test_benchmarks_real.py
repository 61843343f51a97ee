"""What the benchmarks beside TRL compute from two curves, without running either side."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from demo import Curve  # noqa: E402

from rlx.config.schema import SamplingConfig  # noqa: E402


def curve(rewards: list[float], seconds: list[float]) -> Curve:
    return Curve(started=0.0, times=seconds, rewards=rewards, tokens=[8.0] * len(rewards))


def test_a_curve_of_few_steps_has_no_rate_and_a_longer_one_leaves_out_the_first() -> None:
    assert curve([0.1] * 4, [1.0, 2.0, 3.0, 4.0]).steps_per_second() is None
    assert curve([0.1] * 6, [1.0, 2.0, 3.0, 10.0, 12.0, 14.0]).steps_per_second() == 0.5


def test_a_rate_counts_no_step_behind_the_goal() -> None:
    cheap_end = curve([0.5] * 3 + [0.9] * 12, [10.0 * n for n in range(8)] + [70.0 + n for n in range(1, 8)])
    assert len(cheap_end.until(0.9).times) == 8, "the last of the five steps whose mean reaches the goal"
    assert cheap_end.until(0.9).steps_per_second() == 0.1
    assert cheap_end.until(1.0) == cheap_end, "never reached"


def test_trl_gets_every_key_of_the_sampling_section_that_changes_tokens() -> None:
    read = {
        node.slice.value
        for node in ast.walk(ast.parse((BENCHMARKS / "demo_trl.py").read_text()))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "sampling"
        if isinstance(node.slice, ast.Constant)
    }
    assert read == set(SamplingConfig.__dataclass_fields__) - {"allow_biased_ratio"}
