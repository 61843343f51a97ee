"""What may change when `rlx eval` resumes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_eval_command import config_of
from test_rollout_play import Env, outcome

from rlx.config.errors import ConfigError
from rlx.config.schema import RunConfig
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths
from rlx.plan.make import make_plan
from rlx.roles.evaluator import has_finished
from rlx.rollout.play import Records
from rlx.rollout.results import Outcome, outcome_of
from rlx.rollout.scored import PLAYED
from rlx.rollout.tasks import keep_digests
from rlx.runs.claim import create
from rlx.types import Task


def test_a_resumed_evaluation_may_have_other_operational_keys_and_no_others(tmp_path: Path) -> None:
    cfg = replace(config_of("env=sums"), dry_run=False, run=RunConfig(name="run", dir=str(tmp_path / "run")))
    create(cfg, [], make_plan(cfg, tmp_path / "run"))[1].close()
    play = replace(cfg.orchestrator, max_concurrent=3, env_workers=2)
    client = replace(cfg.client, timeout=5.0, max_retries=1, api_key_var="K")
    again = replace(cfg, resume="latest", orchestrator=play, client=client)
    create(again, [], make_plan(again, tmp_path / "run"))[1].close()
    other = replace(again, orchestrator=replace(play, max_retries=9))
    with pytest.raises(ConfigError, match=r"orchestrator.max_retries: \d+ ≠ 9\n.*; or begin anew, run.name=NEW$"):
        create(other, [], make_plan(other, tmp_path / "run"))


def test_a_resumed_evaluation_does_not_mix_two_data_sets(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    envs: Any = {"sums": Env()}
    keep_digests(paths, envs, kept=has_finished(paths))
    envs["sums"].rows = [{"example_id": 7}]
    Records(paths.evaluation_of("sums", "tiny", 0) / PLAYED, Outcome).close()
    keep_digests(paths, envs, kept=has_finished(paths))  # nothing was played yet
    before = paths.data.read_text()
    envs["sums"].rows = [{"example_id": 8}]
    Records(paths.evaluation_of("sums", "tiny", 0) / PLAYED, Outcome).add(outcome(0, 0))
    with pytest.raises(ValueError, match="the examples of sums are not those of the earlier attempts"):
        keep_digests(paths, envs, kept=has_finished(paths))
    (paths.evaluation_of("sums", "tiny", 0) / PLAYED).unlink()
    MetricsWriter(paths.metrics, "eval").write(0, {"eval/sums/avg@1": 1.0})
    with pytest.raises(ValueError, match="the examples of sums are not those"):
        keep_digests(paths, envs, kept=has_finished(paths))
    assert paths.data.read_text() == before


def test_a_metric_that_is_not_finite_does_not_prevent_resuming(tmp_path: Path) -> None:
    (rollout,) = asyncio.run(Env().play(Task(env="e", example_id=0, index=0, row={}), (0,), 0))
    odd = replace(rollout, rewards={"a": 1.0, "b": float("nan")}, metrics={"c": float("inf"), "d": 2})
    records = Records(tmp_path / PLAYED, Outcome)
    records.add(outcome_of(odd))
    assert [(one.rewards, one.metrics) for one in records.read()] == [({"a": 1.0}, {"d": 2.0})]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    records = Records(tmp_path / PLAYED, Outcome)
    records.add(outcome(0, 0))
    records.add(outcome(0, 1, metrics={"c": float("nan")}))
    with pytest.raises(ValueError, match=rf"{PLAYED}, line 2: Expected `float`, got `null` .* Delete this line"):
        records.read()
