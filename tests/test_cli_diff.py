"""`rlx diff`: what it shows, what it ignores, and its exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from launch_configs import config

from rlx.cli import main
from rlx.config.schema import RunConfig
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths
from rlx.plan.make import make_plan
from rlx.runs.run_dir import create


def run(root: Path, rewards: tuple[float, ...] = (0.25, 0.5), **changes) -> RunPaths:
    cfg = replace(config("cpu"), run=RunConfig(name=root.name, dir=str(root)), **changes)
    paths, lock = create(cfg, [], make_plan(cfg, root))
    lock.close()
    writer = MetricsWriter(paths.metrics, "orchestrator")
    for step, reward in enumerate(rewards):
        writer.write(step, {"reward/mean": reward, "time/step": reward})
    paths.data.write_text('{"envs": {"math": {"examples": 4, "xxh3": "ab"}}}')
    return paths


def test_runs_of_one_configuration_do_not_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    shown = capsys.readouterr().out
    assert "configuration: equal" in shown
    assert "metrics: 2 records, bitwise equal except for wall-clock times" in shown


def test_the_order_in_which_roles_wrote_their_records_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An evaluator beside the trainer writes when it is done."""
    for name in ("a", "b"):
        paths = run(tmp_path / name, (0.25, 0.5, 0.75))
        lines = paths.metrics.read_text().splitlines(keepends=True)
        evaluations = [json.dumps({"step": step, "source": "eval", "time": 1.0, "eval/e/avg@1": 0.5}) + "\n" for step in (0, 2)]
        lines = [evaluations[0], *lines, evaluations[1]] if name == "a" else [*lines[:1], *evaluations, *lines[1:]]
        paths.metrics.write_text("".join(lines))
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "metrics: 5 records, bitwise equal" in capsys.readouterr().out
    lines = paths.metrics.read_text().splitlines(keepends=True)
    paths.metrics.write_text("".join(line for line in lines if '"step": 2, "source": "eval"' not in line))
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    shown = capsys.readouterr().out
    assert "last step of the eval: 2 → 0" in shown
    assert "absent" not in shown, "the last step that both have is compared"


def test_every_kind_of_difference_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a")
    other = run(tmp_path / "b", (0.25, 0.625, 0.75), seed=1, optim={"_target_": "torch.optim.AdamW", "lr": 1e-4})
    record = json.loads(other.provenance.read_text())
    record["source"]["commit"] = "0" * 40
    record["packages"] |= {"numpy": "0.1"}
    record["packages"].pop("torch")
    other.provenance.write_text(json.dumps(record))
    other.data.write_text('{"envs": {"math": {"examples": 5, "xxh3": "cd"}}}')
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    shown = capsys.readouterr().out
    for line in (
        "  seed: 0 → 1\n",
        "  optim.lr: 1e-06 → 0.0001\n",
        f" → {'0' * 40}\n",
        " → 0.1\n",
        " → absent\n",
        "  math.examples: 4 → 5\n",
        "  math.xxh3: ab → cd\n",
        "  first record that differs: step 1 of the orchestrator\n",
        "  last step of the orchestrator: 1 → 2\n",
        "  orchestrator, step 1: reward/mean: 0.5 → 0.625  (+0.125)\n",
    ):
        assert line in shown, line
    assert "run.dir" not in shown
    assert "time/step" not in shown


def test_what_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    assert main(["diff", str(tmp_path / "a")]) == 2
