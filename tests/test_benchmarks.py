"""The benchmarks: those by name, what they import, what they compute from curves, and the script for one GPU."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.roots import EVAL
from rlx.config.schema import SamplingConfig
from rlx.config.schema_eval import EvalRoot
from rlx.config.sweeps import expand
from rlx.preflight.env_probe import environments_of, lines_of

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from demo import Curve  # noqa: E402

BY_NAME = ("gsm8k", "math500", "aime24", "aime25", "ifeval")


def evaluation(*argv: str) -> EvalRoot:
    return compose(["model=smollm2_135m", "dry_run=true", "launcher.check_envs=false", *argv], {}, EVAL).cfg


def test_benchmarks_are_evaluated_whole_unless_a_key_says_less() -> None:
    cfg = evaluation(f"bench=[{','.join(BY_NAME)}]")
    assert (tuple(cfg.envs), cfg.num_examples) == (BY_NAME, None)
    assert evaluation("bench=gsm8k", "num_examples=100").num_examples == 100
    assert compose(["bench=gsm8k", "dry_run=true"], {"RLX_NUM_EXAMPLES": "50"}, EVAL).cfg.num_examples == 50
    assert evaluation("env=gsm8k").num_examples == 128
    sweep = expand(["-m", "bench=gsm8k,math500", "model=smollm2_135m"], {}, EVAL)
    assert [(run.swept, "num_examples=null" in run.argv) for run in sweep.elements] == [(("env=gsm8k",), True), (("env=math500",), True)]
    beside = compose(["env@eval.envs.math500=math500", "eval.interval=5", "dry_run=true", "launcher.check_envs=false"], {}).cfg
    assert beside.eval.envs["math500"].args["eval_split"] == "test"


@pytest.mark.slow
def test_a_benchmark_is_read_from_a_file_and_never_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"problem": f"${n}+1$?", "answer": str(n + 1)}) + "\n" for n in range(4)))
    asked = [f"envs.math500.args.dataset={file}", "model=smollm2_135m", "dry_run=true"]
    (found,) = environments_of([compose(["bench=math500", *asked], {}, EVAL).cfg])
    assert "4 examples" in lines_of(found)[0]
    with pytest.raises(ConfigError, match="no training data set, only one for evaluation"):
        environments_of([compose(["env=math500", *asked], {}).cfg])


ROOT = Path(__file__).resolve().parent.parent
NEIGHBOURS = {path.stem: path for folder in ("benchmarks", "tests", "tools") for path in (ROOT / folder).glob("*.py")}


def defined_in(path: Path) -> set[str]:
    """The names that a file defines or imports at its top level, also under an `if` or `try`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_every_name_that_a_benchmark_imports_from_this_project_exists(path: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        wanted = {alias.name for alias in node.names}
        if node.module.split(".")[0] == "rlx":
            module = importlib.import_module(node.module)
            missing += [f"{node.module}.{name}" for name in wanted if not hasattr(module, name) and not _is_module(node.module, name)]
        elif node.module in NEIGHBOURS:
            missing += [f"{node.module}.{name}" for name in wanted - defined_in(NEIGHBOURS[node.module])]
    assert missing == []


def _is_module(package: str, name: str) -> bool:
    return (ROOT / package.replace(".", "/") / f"{name}.py").exists()


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
