"""Evaluations beside training on the real stack: one policy version each, and nothing of training changes."""

from __future__ import annotations

import json

import pytest
from main_job import MainJob
from test_run_resume import checkpoints, kill_everything

pytestmark = [pytest.mark.slow]
EVALUATED = ("eval.interval=2", "eval.num_examples=24", "eval.rollouts_per_example=4")
SHORT = ("max_async_level=0", "orchestrator.batch_size=32", "max_steps=6", "ckpt.interval=2")


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


@pytest.mark.nightly
def test_on_policy_training_is_the_same_with_and_without_evaluations_also_after_a_kill_in_one(start):
    without = start("without", *SHORT)
    assert without.wait() == 0, without.text()
    whole = start("whole", *SHORT, *EVALUATED)
    assert whole.wait() == 0, whole.text()
    assert [line for line in whole.reproducible_lines() if line["source"] != "eval"] == without.reproducible_lines()
    one, other = ((job.run_dir / "weights" / "step_6" / "COMPLETE").read_text() for job in (whole, without))
    assert one == other, "the same weights, by their checksums"
    killed = start("killed", *SHORT, *EVALUATED)
    killed.until(lambda: 4 in checkpoints(killed), "checkpoint 4")  # version 4 is evaluated now, or about to be
    kill_everything(killed)
    again = start("killed", *SHORT, *EVALUATED, "resume=latest")
    assert again.wait() == 0, again.text()
    assert again.reproducible_lines() == whole.reproducible_lines()
    for version in (0, 2, 4, 6):
        lines = [[(line["completion"], line["reward"]) for line in results(job, version)] for job in (again, whole)]
        assert lines[0] == lines[1]


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["killed", "preempted"])
def test_a_run_that_ended_in_its_last_evaluation_is_resumed_and_plays_it(start, how):
    last = (*SHORT, "eval.interval=6", "eval.eval_base=false", "eval.num_examples=null", "eval.rollouts_per_example=8")
    ended = start("ended", *last)
    if how == "killed":
        ended.until(lambda: 6 in checkpoints(ended), "checkpoint 6")
        kill_everything(ended)
    else:  # perhaps before its last checkpoint is complete, which is waited for
        ended.until(lambda: (ended.run_dir / "weights" / "step_6" / "COMPLETE").is_file(), "version 6")
        (ended.run_dir / "preempt").touch()
        assert ended.wait() == 75, ended.text()
        assert 6 in checkpoints(ended)
    assert ended.metrics("eval") == [], "it ended before its evaluation"
    again = start("ended", *last, "resume=latest")
    assert again.wait() == 0, again.text()
    assert [record["step"] for record in again.metrics("eval")] == [6]
    assert [record["step"] for record in again.metrics("trainer")] == list(range(6)), "nothing was trained again"
