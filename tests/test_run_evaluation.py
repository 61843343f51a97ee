"""Evaluations beside training on the real stack: one policy version each, and nothing of training changes."""

from __future__ import annotations

import json

import pytest
from main_job import MainJob
from test_run_resume import checkpoints

pytestmark = [pytest.mark.slow]


def results(job: MainJob, version: int, name: str = "reverse_text") -> list[dict]:
    folder = job.run_dir / "eval" / f"{name}--tiny" / f"step_{version}"
    assert json.loads((folder / "metadata.json").read_text())["policy_version"] == version
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_a_run_with_slack_evaluates_every_due_version_and_keeps_the_best_checkpoint(start):
    keys = ("max_steps=12", "eval.interval=5", "eval.num_examples=64", "eval.rollouts_per_example=4", "eval.sampling.temperature=0.5")
    greedy = [f"eval.envs.greedy.{key}" for key in ("id=rlx-reverse-text", "sampling.temperature=0", "rollouts_per_example=2")]
    run = start(
        "run", *keys, "eval.envs.reverse_text={}", *greedy, "ckpt.interval=5", "ckpt.keep_last=1", "ckpt.keep_best=eval/reverse_text/avg@4"
    )
    assert run.wait() == 0, run.text()
    records = {record["step"]: record for record in run.metrics("eval")}
    assert list(records) == [0, 5, 10, 12]
    scores = {version: record["eval/reverse_text/avg@4"] for version, record in records.items()}
    for version, record in records.items():
        lines = results(run, version)
        assert len(lines) == 64 * 4 == 4 * record["eval/reverse_text/examples"]
        assert sum(line["reward"] for line in lines) / len(lines) == pytest.approx(scores[version])
        assert record["eval/reverse_text/error_frac"] == 0
        assert record["eval/reverse_text/avg@4_low"] < scores[version] < record["eval/reverse_text/avg@4_high"]
    lines = results(run, 12, "greedy")
    assert [one["completion"] for one in lines[::2]] == [other["completion"] for other in lines[1::2]], "greedy: both rollouts are equal"
    assert records[12]["eval/greedy/avg@2"] == pytest.approx(records[12]["eval/greedy/pass@2"])
    assert scores[12] > scores[0] + 0.1, "it learned"
    best = max((score, version) for version, score in scores.items() if version)[1]
    assert {best, 12} <= set(checkpoints(run))
    assert f"reverse_text avg@4: {scores[0]:.3f} → {scores[12]:.3f} at step 12" in run.text()
    assert f"checkpoints/step_{best}" in run.text()
