"""What `rlx eval` samples: jobs and retries, records that survive a kill, failures, what a resumed evaluation plays again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_eval_command import config_of

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.roots import EVAL
from rlx.config.schema import RunConfig
from rlx.config.schema_eval import EvalRoot
from rlx.heartbeat import Heartbeat
from rlx.inference.replica import ServerState
from rlx.metrics import MetricsWriter, read_metrics
from rlx.paths import COMPLETE, RunPaths
from rlx.plan.make import make_plan
from rlx.roles.evaluator import Evaluator, finished_file, has_finished
from rlx.rollout.eval_results import METADATA, Outcome, Usage, outcome_of
from rlx.rollout.failures import RolloutsFailed
from rlx.rollout.policy_backend import ModelInfo, ServerBackend
from rlx.rollout.rollout_runner import RolloutRunner
from rlx.rollout.rollout_set import RolloutSet, read_finished
from rlx.rollout.task_sampler import keep_digests
from rlx.runs.run_dir import create
from rlx.trace import Trace
from rlx.types import Rollout, Task


def outcome(place: int, rollout: int, reward: float = 1.0, **fields: Any) -> Outcome:
    """`turns`: sizes of its turns; other fields are those of a Rollout, and `info`."""
    turns, info = fields.pop("turns", [(1, 1)]), fields.pop("info", {})
    texts: dict[str, Any] = {"prompt": "", "completion": "", "status": "ok", "stop": "stop"}
    scores: dict[str, Any] = {"reward": reward, "rewards": {}, "metrics": {}}
    task = Task(env="e", example_id=place, index=place, row={"info": info})
    one = outcome_of(Rollout(**{**texts, **scores, **fields}, task=task, member=rollout, trace=Trace()), env="e")
    one.token_usage = Usage(sum(prompt for prompt, _ in turns), sum(sampled for _, sampled in turns), turns) if turns else Usage()
    return one


class Env:
    """Counts what is in flight; fails `failing` attempts at each rollout, or at those of one example."""

    name, tools = "e", ()

    def __init__(self, failing: int = 0, scores_groups: bool = False, only: int | None = None) -> None:
        self.failing, self.scores_groups, self.only = failing, scores_groups, only
        self.rows = [{"example_id": place} for place in range(10)]
        self.asked: list[tuple[int, tuple[int, ...], int]] = []
        self.now = self.most = 0

    async def play(self, task: Task, members: Sequence[int], attempt: int) -> list[Rollout]:
        self.asked.append((task.index, tuple(members), attempt))
        self.now += len(members)
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.001)
        self.now -= len(members)
        failed = attempt < self.failing and self.only in (None, task.index)
        status: Any = "error" if failed else "ok"
        return [
            Rollout(task=task, member=m, prompt="", completion="", trace=Trace(), reward=0.5, rewards={}, metrics={},
                    status=status, stop="boom" if failed else "stop", error="boom" if failed else None, is_truncated=False, timing={})
            for m in members
        ]  # fmt: skip

    async def close(self) -> None:
        pass


def wanted(env: Env, rollouts: int, examples: int | None = None, file: Path | None = None, digest: str | None = None) -> RolloutSet:
    return RolloutSet({"x": env}, {"x": (examples, rollouts)}, file=file, digest=digest)


def test_jobs_are_run_with_bounded_concurrency_and_retries() -> None:
    env, found = Env(failing=1), []
    runner = RolloutRunner(
        {"x": env}, max_retries=2, max_concurrent=3, on_end=lambda job, rollouts: found.append((job.task.index, rollouts[0].status))
    )
    asyncio.run(runner.run(wanted(env, 2).jobs()))
    assert sorted(found) == [(place, "ok") for place in range(10) for _ in range(2)]
    assert (env.most, runner.finished, runner.in_flight) == (3, 20, 0)
    assert len(env.asked) == 40, "each was played twice"


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_that_comes_as_a_rollout_ends_is_not_lost(turns: int) -> None:
    ended, env = asyncio.Event(), Env()
    runner = RolloutRunner({"x": env}, max_retries=0, max_concurrent=1, on_end=lambda job, rollouts: ended.set())
    running = asyncio.create_task(runner.run(wanted(env, 1).jobs()))
    await ended.wait()
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert runner.finished < 10


@pytest.mark.parametrize("cut", [0, 20], ids=["whole lines", "killed in the middle of a line"])
def test_finished_rollouts_are_not_played_again_and_groups_stay_whole(tmp_path: Path, cut: int) -> None:
    file, env = tmp_path / "finished.jsonl", Env(failing=1, only=1)
    earlier = wanted(env, 2, 2, file)
    runner = RolloutRunner({"x": env}, max_retries=0, max_concurrent=1, on_end=earlier.add)
    asyncio.run(runner.run(earlier.jobs()))
    assert [one.status for one in read_finished(file)] == ["ok", "ok", "error", "error"], "those of example 1 failed"
    file.write_bytes(file.read_bytes()[: -cut or None])
    jobs = [(job.task.index, job.members) for job in wanted(env, 2, 3, file).jobs()]
    assert jobs == [(1, (0,)), (1, (1,)), (2, (0,)), (2, (1,))], "what failed is played again"
    jobs = [(job.task.index, job.members) for job in wanted(Env(scores_groups=True), 2, 3, file).jobs()]
    assert jobs == [(1, (0, 1)), (2, (0, 1))]


def test_an_export_takes_the_rollouts_of_weights_that_came_back(tmp_path: Path) -> None:
    file = tmp_path / "finished.jsonl"
    for digest, examples in (("a", 2), ("b", 1), ("a", 2)):
        rollouts = wanted(Env(), 2, examples, file, digest)
        asyncio.run(RolloutRunner({"x": Env()}, max_retries=0, max_concurrent=1, on_end=rollouts.add).run(rollouts.jobs()))
    found = read_finished(file)
    assert found[-1].weights == "a", "an export takes the weights of the last line"
    assert {one.key for one in found if one.weights == "a"} == {("x", place, number) for place in (0, 1) for number in (0, 1)}


class Model:
    """A model of one version that finds nothing wrong, whose weights have a digest."""

    def __init__(self, digest: str | None = None, origin: ModelInfo | None = None) -> None:
        self.digest, self._origin = digest, origin

    async def versions(self, wanted: Sequence[int]) -> Sequence[int]:
        return [28]

    async def reach(self, version: int) -> None:
        pass

    async def info(self) -> ModelInfo:
        return self._origin or ModelInfo("m", "weights/step_28", 1.0, self.digest)

    def away(self) -> float:
        return 0.0

    def check(self, rollout: Rollout) -> None:
        pass

    async def follow(self, playing: Any) -> None:
        pass


def evaluator(root: Path, env: Any) -> Evaluator:
    cfg = compose(["dry_run=true", "env=sums", "rollouts_per_example=4"], {}, EVAL).cfg
    cfg = replace(cfg, num_examples=10, rollouts_per_example=2, orchestrator=replace(cfg.orchestrator, max_retries=0, max_concurrent=4))
    paths = RunPaths(root)
    return Evaluator(cfg, paths, {"sums": env}, Model("a"), Heartbeat(paths, "evaluator"))  # type: ignore[arg-type]


def record_of(root: Path) -> dict[str, Any]:
    (record,) = (record for record, _ in read_metrics(RunPaths(root).metrics))
    return record


def test_an_environment_whose_every_rollout_fails_ends_the_evaluation_and_nothing_of_it_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(RolloutsFailed, match=r"environment sums: \d+ of its latest \d+ rollouts failed .*boom: boom"):
        asyncio.run(evaluator(tmp_path, Env(failing=1)).run())
    again = Env()
    asyncio.run(evaluator(tmp_path, again).run())
    assert len(again.asked) == 20
    assert (record_of(tmp_path)["eval/sums/avg@2"], record_of(tmp_path)["eval/sums/error_frac"]) == (0.5, 0)
    folder = tmp_path / "eval" / "sums--tiny" / "step_28"
    assert len((folder / "results.jsonl").read_text().splitlines()) == 20
    assert not list(tmp_path.rglob("finished.jsonl"))


def test_a_rollout_that_fails_for_good_scores_0_and_is_counted(tmp_path: Path) -> None:
    asyncio.run(evaluator(tmp_path, Env(failing=1, only=3)).run())
    values = record_of(tmp_path)
    assert values["eval/sums/error_frac"] == pytest.approx(0.1)
    assert (values["eval/sums/avg@2"], values["eval/attested"]) == (pytest.approx(0.45), 1.0)
    metadata = json.loads((tmp_path / "eval" / "sums--tiny" / "step_28" / METADATA).read_text())
    assert (metadata["served_model"], metadata["weights"], metadata["attested"]) == ("m", "weights/step_28", 1.0)


def test_a_limit_that_changes_holds_from_then_on() -> None:
    env, seen = Env(), list[int]()

    def ended(job: Any, rollouts: list[Rollout]) -> None:
        seen.append(env.now)
        runner.set_max_concurrent(8)

    runner = RolloutRunner({"x": env}, max_retries=0, max_concurrent=2, on_end=ended)
    asyncio.run(runner.run(wanted(env, 8).jobs()))
    assert (max(seen[:2]) <= 2, env.most, runner.finished) == (True, 8, 80)


@pytest.mark.parametrize("others", ["", "orchestrator.max_concurrent=4", "inference.base_url=[http://127.0.0.1:9]"])
def test_an_evaluation_follows_its_own_engines_if_no_number_is_fixed(others: str) -> None:
    cfg = compose(["dry_run=true", "env=sums", *filter(None, [others])], {}, EVAL).cfg
    assert isinstance(cfg, EvalRoot)
    assert cfg.adaptive_concurrency == (not others)


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
