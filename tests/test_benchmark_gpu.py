"""The script for one GPU, without one: it runs with torch and transformers alone, and a part that fails or hangs ends alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu.py"
ABSENT = {"hydra", "omegaconf", "vllm", "verifiers", "openai", "xxhash", "zstandard", "submitit", "kubernetes", "textual", "renderers"}
HIDES = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def found(*given):  # some call it on an object, others on the class
    name, *rest = [one for one in given if one is None or not isinstance(one, PathFinder) and not hasattr(one, "find_spec")]
    return None if name.partition(".")[0] in {ABSENT} else find(name, *rest)
PathFinder.find_spec = found
"""
FIELDS = {"part", "what", "shape", "number", "unit", "goal", "met", "seconds", "peak_gib", "versions", "device"}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu

    return gpu


def rows_of(tmp_path: Path, *parts: str) -> list[dict]:
    """The rows of parts at small sizes, where only what the script needs can be imported."""
    (tmp_path / "sitecustomize.py").write_text(HIDES)
    command = [sys.executable, str(SCRIPT), "--small", "--out", str(tmp_path), *(["--only", *parts] if parts else [])]
    env = os.environ | {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert "| part | what |" in (tmp_path / "gpu.md").read_text()
    for row in rows:
        assert set(row) - {"error"} == FIELDS
        assert (row["number"] is None) == ("error" in row), row
    return rows


@pytest.mark.slow
def test_a_part_runs_without_what_the_script_does_not_need(tmp_path: Path):
    rows = rows_of(tmp_path, "head")
    assert all("error" not in row for row in rows)
    assert [row["met"] for row in rows if row["goal"]] == [True, True]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_step_and_a_written_version_are_measured_without_what_the_script_does_not_need(tmp_path: Path):
    rows = rows_of(tmp_path, "small_rl", "write", "stager")
    numbers = {row["part"] for row in rows if row["number"] is not None}
    assert numbers == {"small_rl", "write", "stager"}
    assert [row["error"] for row in rows if "error" in row] == []


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_every_part_runs_through_at_small_sizes(gpu, tmp_path: Path):
    """What needs CUDA, a device whose peak is known, or vLLM says so; nothing else is missing."""
    rows = rows_of(tmp_path)
    assert {row["part"] for row in rows} == gpu.PARTS.keys()
    needs = ("needs CUDA", "on CUDA only", "peak is not known", "left out without a GPU", "vLLM", "not installed")
    unexpected = [row for row in rows if "error" in row and not any(words in row["error"] for words in needs)]
    assert unexpected == []


def test_a_part_that_hangs_or_fails_gives_a_row_with_the_cause_and_keeps_its_rows(gpu, monkeypatch):
    begins = 'import time; print(\'{"part": "op", "number": 1}\', flush=True); '
    with monkeypatch.context() as patch:
        ends, timer = [], threading.Timer
        patch.setattr(gpu.threading, "Timer", lambda seconds, end: ends.append(end) or timer(3600, end))
        rows = gpu.run_part("op", 1.0, [sys.executable, "-c", begins + "time.sleep(3600)"])
        first = next(rows)
        ends[0]()  # its limit, whenever the part has come so far
        (last,) = rows
    assert first == {"part": "op", "number": 1}
    assert last["error"] == "the part was ended after its limit of 1 s"
    (row,) = gpu.run_part("op", 30.0, [sys.executable, "-c", "raise MemoryError('no room')"])
    assert row["error"] == "exit code 1: MemoryError: no room"
    assert row["number"] is None


def test_no_part_begins_when_the_time_is_over(gpu):
    (row,) = gpu.run_all(["op"], True, gpu.SHORTEST - 1, 1.0, lambda line: None)
    assert row["error"] == "not started: 9 s of 9 were left"


def test_the_parts_together_take_less_than_nine_minutes(gpu):
    assert sum(part.limit for part in gpu.PARTS.values()) <= gpu.TOTAL < 540


@pytest.mark.parametrize(
    ("number", "goal", "met"),
    [
        (601, ">= 600", True),
        (599, ">= 600", False),
        (0, "== 0", True),
        (1.3, "<= 1.2", False),
        (0.8, "0.75 to 1.33", True),
        (1.4, "0.75 to 1.33", False),
    ],
)
def test_a_goal_is_met_or_not(gpu, number: float, goal: str, met: bool):
    assert gpu.finished("op", number=number, goal=goal)["met"] is met
    assert gpu.finished("op", number=number, goal=goal, judged=False)["met"] is None
