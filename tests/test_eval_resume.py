"""What may change when `rlx eval` resumes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_eval_command import config_of
from test_rollout_runner import Env, Model

from rlx.config.errors import ConfigError
from rlx.config.schema import RunConfig
from rlx.heartbeat import Heartbeat
from rlx.inference.replica import ServerState
from rlx.metrics import MetricsWriter
from rlx.paths import COMPLETE, RunPaths
from rlx.plan.make import make_plan
from rlx.roles.evaluator import Evaluator, finished_file, has_finished
from rlx.rollout.policy_backend import ServerBackend
from rlx.rollout.rollout_set import RolloutSet, read_finished
from rlx.rollout.task_sampler import keep_digests
from rlx.runs.claim import create
from rlx.types import Rollout, Task


def test_a_resumed_evaluation_may_have_other_operational_keys_and_no_others(tmp_path: Path) -> None:
    cfg = replace(config_of("env=sums"), dry_run=False, run=RunConfig(name="run", dir=str(tmp_path / "run")))
    create(cfg, [], make_plan(cfg, tmp_path / "run"))[1].close()
    play = replace(cfg.orchestrator, max_concurrent=3, env_workers=2)
    client = replace(cfg.client, timeout=5.0, max_retries=1, api_key_var="K")
    again = replace(cfg, resume="latest", orchestrator=play, client=client)
    create(again, [], make_plan(again, tmp_path / "run"))[1].close()
    other = replace(again, orchestrator=replace(play, max_retries=9))
    with pytest.raises(ConfigError, match=r"orchestrator.max_retries: \d+ ≠ 9\n.*; or start another run, run.name=NEW$"):
        create(other, [], make_plan(other, tmp_path / "run"))


def test_a_resumed_evaluation_does_not_mix_two_data_sets(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    envs: Any = {"sums": Env()}
    keep_digests(paths, envs, kept=has_finished(paths))
    envs["sums"].rows = [{"example_id": 7}]
    finished_file(paths).parent.mkdir()
    finished_file(paths).touch()
    keep_digests(paths, envs, kept=has_finished(paths))  # nothing was played yet
    before = paths.data.read_text()
    envs["sums"].rows = [{"example_id": 8}]
    finished_file(paths).write_text("{}\n")
    with pytest.raises(ValueError, match="the examples of sums are not those of the earlier attempts"):
        keep_digests(paths, envs, kept=has_finished(paths))
    finished_file(paths).unlink()
    MetricsWriter(paths.metrics, "eval").write(0, {"eval/sums/avg@1": 1.0})
    with pytest.raises(ValueError, match="the examples of sums are not those"):
        keep_digests(paths, envs, kept=has_finished(paths))
    assert paths.data.read_text() == before


class Killed(Env):
    """Nothing is played beyond half of the examples."""

    async def play(self, task: Task, members: Sequence[int], attempt: int) -> list[Rollout]:
        if task.index >= 5:
            await asyncio.sleep(3600)
        return await super().play(task, members, attempt)


@pytest.mark.parametrize(
    ("first", "then", "again"),
    [("a", "a", 10), ("a", "b", 20), (None, "b", 10), ("a", None, 10)],
    ids=["same weights", "other weights", "not noted before", "not known now"],
)
def test_a_resumed_evaluation_plays_again_what_other_weights_of_the_version_have_played(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: str | None, then: str | None, again: int
) -> None:
    cfg, paths, killed, env = config_of("env=sums", "num_examples=10", "rollouts_per_example=2"), RunPaths(tmp_path), Killed(), Env()

    folder = paths.evaluation_of("sums", cfg.model.name, 28)

    def played() -> int:
        return len(finished_file(paths).read_text().splitlines()) if finished_file(paths).exists() else 0

    async def evaluate(env: Any, digest: str | None, until: int | None = None) -> None:
        """`until`: records after which it is killed."""
        role = Evaluator(cfg, paths, {"sums": env}, Model(digest), Heartbeat(paths, "evaluator"))  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            running = asyncio.ensure_future(role.run())
            while until is not None and played() < until:
                await asyncio.sleep(0.01)
            if until is not None:
                running.cancel()
            await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(evaluate(killed, first, until=10))
    assert played() == 10
    asyncio.run(evaluate(env, then))
    assert len(env.asked) == again
    said = "version 28 of the weights has changed since an earlier attempt (digest a, now b)"
    assert (said in caplog.text) == (again == 20)
    assert sorted(file.name for file in folder.iterdir()) == ["metadata.json", "results.jsonl", "traces.jsonl"]


def test_the_digest_of_served_weights_is_that_of_their_manifest_and_of_version_0_that_of_the_model(tmp_path: Path) -> None:
    def digest(version: int, weights_dir: Path, identity: str = "i") -> str | None:
        state = ServerState(f"{version}@run", "/m", 64, identity=identity)
        fleet = SimpleNamespace(version=version, compared=1.0, states=lambda: asyncio.sleep(0, [state]))
        config = config_of("env=sums")
        config.weights_dir = str(weights_dir)
        served = ServerBackend(config, fleet, None, {})  # type: ignore[arg-type]
        return asyncio.run(served.info()).digest

    folder = tmp_path / "step_28"
    folder.mkdir()
    (folder / COMPLETE).write_text('{"version": 28, "tensors": {"w": {"xxh3": "1"}}}')
    old = digest(28, tmp_path)
    assert old is not None
    assert digest(28, tmp_path, identity="") == old
    (folder / COMPLETE).write_text('{"version": 28, "tensors": {"w": {"xxh3": "2"}}}')
    assert digest(28, tmp_path) != old
    assert digest(0, tmp_path / "a") == digest(0, tmp_path / "b") != digest(0, tmp_path / "a", identity="j")
    assert digest(28, tmp_path / "elsewhere") is not None
    assert digest(28, tmp_path / "elsewhere", identity="") is None


def test_a_metric_that_is_not_finite_does_not_prevent_resuming_and_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    (rollout,) = asyncio.run(Env().play(Task(env="e", example_id=0, index=0, row={"info": {"of": {1, 2}}}), (0,), 0))
    odd, file = replace(rollout, rewards={"a": 1.0, "b": float("nan")}, metrics={"c": float("inf"), "d": 2}), tmp_path / "finished.jsonl"
    rollouts = RolloutSet({"x": Env()}, {"x": (1, 1)}, file=file)
    rollouts.add(next(rollouts.jobs()), [odd])
    assert [(one.rewards, one.metrics) for one in read_finished(file)] == [({"a": 1.0}, {"a": 1.0, "d": 2.0})]
    with file.open("a") as lines:
        lines.write('{"example_id": null}\n')
    with pytest.raises(ValueError, match=r"finished.jsonl, line 2: Expected `int`, got `null` .*\n  fix: delete this line"):
        read_finished(file)
