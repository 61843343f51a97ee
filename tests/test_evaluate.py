"""Evaluations beside training: real environments and files, a stand-in policy and a stand-in trainer."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash
from policy_stand_in import OUTSIDE, tiny_chat
from test_orchestrator_run import StandInServers, StandInTrainer, config_of, metrics, reproducible

from rlx.aio import first_failure
from rlx.checkpoints.folders import Start, finish, write_start, writing
from rlx.checkpoints.orchestrator import STATE
from rlx.config.eval_envs import environments
from rlx.config.schema import Config, EvalEnvConfig
from rlx.envs.base import sampling_of
from rlx.envs.load import give_policy
from rlx.heartbeat import Heartbeat
from rlx.paths import COMPLETE, RunPaths
from rlx.polling import Preempted
from rlx.roles.orchestrator import Orchestrator
from rlx.rollout.evaluate import Evaluations
from rlx.rollout.evaluation import Evaluation
from rlx.rollout.record import read_rollouts
from rlx.runs.rewind import trim_metrics
from rlx.trace import Turn
from rlx.types import WeightVersion

sys.path.insert(0, OUTSIDE)


class Servers(StandInServers):
    """Remembers, for every request, whether an update began while it was in flight."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.evaluating: set[str] = set()
        self.torn: list[str] = []

    async def generate(self, prompt_ids: Any, sampling: Any, request_id: str, affinity: int) -> Turn:
        if "-eval_" not in f"-{request_id}":
            return await super().generate(prompt_ids, sampling, request_id, affinity)
        self.evaluating.add(request_id)
        try:
            return await super().generate(prompt_ids, sampling, request_id, affinity)
        finally:
            self.evaluating.discard(request_id)

    async def update(self, weights: WeightVersion, timeout: float) -> None:
        self.torn += self.evaluating
        await super().update(weights, timeout)


def loaded(config: Config) -> dict[str, Any]:
    from rlx.envs.verifiers_v0 import load_environment

    return {name: load_environment(name, env, sampling_of(config, env), 30.0) for name, env in environments(config).items()}


def play(root: Path, config: Config, servers: Any = None, trainer: StandInTrainer | None = None) -> tuple[RunPaths, StandInTrainer]:
    paths, envs = RunPaths(root), loaded(config)
    trainer, served = trainer or StandInTrainer(paths, config), servers or Servers()
    give_policy(envs, config, tiny_chat(), served)

    async def main() -> None:
        orchestrator = Orchestrator(config, paths, envs, served, served, Heartbeat(paths, "orchestrator"))
        await asyncio.wait_for(first_failure(orchestrator.run(), trainer.run()), 300)

    asyncio.run(main())
    return paths, trainer


def evaluating(**overrides: Any) -> Config:
    defaults = {"eval__interval": 2, "eval__num_examples": 6, "eval__rollouts_per_example": 2, "max_steps": 5, "ckpt__interval": None}
    return config_of(**{**defaults, **overrides})


def test_updates_do_not_wait_for_an_evaluation_and_its_record_names_the_newest_version(tmp_path: Path) -> None:
    servers = Servers(delay=0.03)
    keys = {"max_steps": 8, "eval__interval": 6, "eval__num_examples": 12, "eval__share": 0.01}
    paths, _ = play(tmp_path, evaluating(max_async_level=1, inference__max_num_seqs=8, **keys), servers)
    first, second, last = metrics(paths, "eval")
    assert [record["step"] for record in (first, second, last)] == [0, 6, 8]
    assert servers.torn, "an update came while an evaluation's request was in flight"
    assert 0 < first["eval/e/newest_version"] <= 6, "the next evaluation began behind it"
    assert last["eval/e/newest_version"] == 8
    assert all(record["eval/e/examples"] == 12 for record in (first, second, last))


def test_every_interval_and_the_last_version_are_evaluated_each_at_one_version(tmp_path: Path) -> None:
    servers = Servers(delay=0.03)
    paths, _ = play(tmp_path, evaluating(max_async_level=2, eval__pins=True), servers)
    records = metrics(paths, "eval")
    assert [record["step"] for record in records] == [0, 2, 4, 5]
    assert servers.torn == []
    for record in records:
        assert record["eval/e/examples"] == 6
        assert record["eval/e/avg@2_low"] <= record["eval/e/avg@2"] <= record["eval/e/avg@2_high"]
        assert record["eval/e/avg@2"] == pytest.approx(record["eval/e/pass@1"]) == pytest.approx(record["eval/e/reward/exact"])
        assert record["eval/e/pass@2"] >= record["eval/e/pass@1"]
        assert (record["eval/e/error_frac"], record["eval/e/truncated_frac"]) == (0, 0)
        assert record["time/evaluation"] > 0
    assert records[0]["eval/e/avg@2"] < records[-1]["eval/e/avg@2"] == 1.0, "the stand-in policy learns"


def test_a_record_without_the_metric_of_the_best_checkpoint_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    play(tmp_path, evaluating(max_steps=1, eval__num_examples=1, ckpt__keep_best="eval/e/reward/exect"))
    said = "the evaluation of version 1 has no eval/e/reward/exect, so it cannot be the best; it has eval/e/reward/exact"
    assert said in caplog.text
    caplog.clear()
    play(tmp_path / "fine", evaluating(max_steps=1, eval__num_examples=1, ckpt__keep_best="eval/e/reward/exact"))
    assert "keep_best" not in caplog.text


@pytest.mark.parametrize("level", [0, 1])
def test_no_due_version_is_skipped_however_fast_the_trainer_is(tmp_path: Path, level: int) -> None:
    servers = Servers(delay=0.02)
    paths, _ = play(tmp_path, evaluating(max_async_level=level, eval__interval=1, eval__eval_base=False), servers)
    assert [record["step"] for record in metrics(paths, "eval")] == [1, 2, 3, 4, 5]
    assert servers.updates == [1, 2, 3, 4, 5]


def test_on_policy_training_is_the_same_bit_for_bit_with_and_without_evaluations(tmp_path: Path) -> None:
    without, _ = play(tmp_path / "without", config_of(max_steps=4, ckpt__interval=None), Servers(jitter=0.01))
    runs = [play(tmp_path / name, evaluating(max_steps=4), Servers(jitter=0.01))[0] for name in "ab"]
    assert reproducible(runs[0]) == reproducible(runs[1])
    assert [record for record in reproducible(runs[0]) if record["source"] != "eval"] == reproducible(without)
    for step in range(4):
        clock = {"seconds": 0, "began": 0, "requests": 0}
        lines = [[one | clock for one in read_rollouts(paths.rollouts_of(step))] for paths in (without, runs[0])]
        assert [{**line, "arrival": 0} for line in lines[0]] == [{**line, "arrival": 0} for line in lines[1]]


def test_an_evaluation_uses_its_own_examples_and_sampling_and_leaves_training_its_own(tmp_path: Path) -> None:
    servers = Servers()
    envs = {"e": EvalEnvConfig(), "other": EvalEnvConfig(id="rlx_test_multi", num_examples=3)}
    envs["e"].sampling.temperature = 0.0
    paths, _ = play(tmp_path, evaluating(max_steps=1, eval__envs=envs, eval__sampling__max_tokens=20), servers)
    asked: dict[str, set[tuple[float, int]]] = {}
    for request in servers.requests:
        name = request["request_id"].split("-")[1]
        asked.setdefault(name, set()).add((request["sampling"]["temperature"], request["sampling"]["max_tokens"]))
    assert asked == {"e": {(1.0, 12)}, "eval_e": {(0.0, 20)}, "eval_other": {(1.0, 20)}}
    record = metrics(paths, "eval")[0]
    assert (record["eval/e/examples"], record["eval/other/examples"]) == (6, 3)
    assert "eval/other/metric/num_turns" in record
    trained = {line["prompt"][-1]["content"] for line in read_rollouts(paths.rollouts_of(0))}
    folder = paths.evaluation_of("e", "tiny", 0)
    evaluated = [json.loads(line)["prompt"][-1]["content"] for line in (folder / "results.jsonl").read_text().splitlines()]
    assert len(evaluated) == 12
    assert not trained & set(evaluated)


def test_results_are_files_that_verifiers_reads(tmp_path: Path) -> None:
    from verifiers.utils.metric_utils import PassAtKMetric
    from verifiers.utils.save_utils import load_outputs

    paths, _ = play(tmp_path, evaluating(max_steps=1, eval__rollouts_per_example=4))
    folder = paths.evaluations / "e--tiny" / "step_1"
    outputs = load_outputs(folder)
    assert [(one["rollout"], one["reward"] == float(one["completion"][0]["content"] == one["answer"])) for one in outputs[:4]] == [
        (member, True) for member in range(4)
    ]
    from verifiers.v1.cli.output import read_episodes
    from verifiers.v1.episode import WireEpisode

    episodes = read_episodes(folder, WireEpisode.model_fields["traces"].annotation.__args__[0])
    assert [(one.traces[0].reward, one.traces[0].nodes[-1].message.content) for one in episodes] == [
        (one["reward"], one["completion"][-1]["content"]) for one in outputs
    ]
    assert [one.traces[0].num_output_tokens for one in episodes] == [one["token_usage"]["output_tokens"] for one in outputs]
    theirs = PassAtKMetric(4)
    theirs.add_outputs(outputs)
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["pass_at_k"] == pytest.approx(theirs.compute()[0])
    assert (metadata["env_id"], metadata["model"], metadata["policy_version"]) == ("rlx_reverse_text", "tiny", 1)
    record = metrics(paths, "eval")[1]
    assert record["eval/e/pass@4"] == pytest.approx(metadata["pass_at_k"]["4"])
    assert record["eval/e/avg@4"] == pytest.approx(metadata["avg_reward"])


def test_an_environment_whose_rewards_compare_a_group_is_evaluated_in_whole_groups(tmp_path: Path) -> None:
    envs = {"g": EvalEnvConfig(id="rlx_test_group", num_examples=2)}
    paths, _ = play(tmp_path, evaluating(max_steps=1, eval__envs=envs, eval__rollouts_per_example=3))
    assert metrics(paths, "eval")[0]["eval/g/reward/shortest"] > 0


def test_a_token_of_another_version_ends_the_run(tmp_path: Path) -> None:
    class Shared(Servers):
        """Servers that another run updates, too."""

        async def generate(self, *arguments: Any) -> Turn:
            if "eval_" in arguments[2]:
                self.version = 7
            return await super().generate(*arguments)

    with pytest.raises(RuntimeError, match=r"the evaluation of version 0 has tokens of version 7: rollout \d of eval_e.*another run"):
        play(tmp_path, evaluating(), Shared())


def test_an_evaluation_takes_its_share_and_what_training_leaves_idle(tmp_path: Path) -> None:
    busy = 0
    config = evaluating(eval__share=0.25, inference__max_num_seqs=16, hardware__inference_replicas=2)
    (env,) = [env for name, env in loaded(config).items() if name.startswith("eval_")]
    serving = 2
    evaluations = Evaluations(config, RunPaths(tmp_path), {"eval_e": env}, 0, lambda: busy, servers=lambda: serving)
    assert evaluations._room() == 32
    busy = 20
    assert evaluations._room() == 12
    busy = 64
    assert evaluations._room() == 8
    serving = 4  # two have joined
    assert evaluations._room() == 16


def test_after_a_kill_the_evaluation_that_it_interrupted_is_played_first(tmp_path: Path) -> None:
    """The trainer wrote checkpoint 3 while version 2 was evaluated; its weights are still there, those of version 1 are gone."""
    config = evaluating(max_async_level=2, eval__interval=1)
    paths = RunPaths(tmp_path)
    with paths.metrics.open("w") as file:
        file.write(json.dumps({"step": 0, "source": "eval", "time": 1.0}) + "\n")
    for version in (2, 3):
        paths.weights_of(version).mkdir(parents=True)
        (paths.weights_of(version) / COMPLETE).write_text("{}")
    envs = loaded(config)
    evaluations = Evaluations(config, paths, envs, 3, lambda: 0)
    assert [version for version in range(6) if evaluations.is_wanted(version)] == [2, 3, 4, 5]
    assert evaluations.next_stop(0, 3) == 2
    assert evaluations.next_stop(2, 3) == 3
    assert evaluations.next_stop(3, 5) == 4
    fresh = Evaluations(config, RunPaths(tmp_path / "other"), envs, 0, lambda: 0)
    assert [version for version in range(6) if fresh.is_wanted(version)] == [0, 1, 2, 3, 4, 5]


async def test_a_missed_evaluation_is_waited_for_also_where_updates_do_not_wait(tmp_path: Path) -> None:
    config, paths = evaluating(max_async_level=1, eval__interval=2, eval__pins=False, max_steps=9), RunPaths(tmp_path)
    evaluations = Evaluations(config, paths, loaded(config), 5, lambda: 0)

    async def left(version: int, stop: int) -> bool:
        evaluations._now = Evaluation(config, paths, evaluations.envs, version)
        evaluations._playing = asyncio.ensure_future(asyncio.sleep(0.05, {"eval/e/avg@1": 1.0}))
        await evaluations.leave(stop)
        return evaluations._playing is None

    assert [await left(4, 5), await left(6, 7), await left(6, 8)] == [True, False, True]
    assert [record["step"] for record in metrics(paths, "eval")] == [4, 6]


class Resumed(StandInTrainer):
    """Goes on after `first` steps; that version's weights are there."""

    def __init__(self, paths: RunPaths, config: Config, first: int) -> None:
        super().__init__(paths, config)
        self.first = first

    async def run(self) -> None:
        for step in range(self.first, self.config.max_steps):
            while not self.paths.batch_of(step).exists():
                await asyncio.sleep(0.002)
            self.paths.batch_of(step).unlink()
            self.paths.weights_of(step + 1).mkdir(parents=True)
            (self.paths.weights_of(step + 1) / COMPLETE).write_text("{}")


def test_a_resumed_run_plays_the_missed_evaluation_and_then_goes_on_as_before(tmp_path: Path) -> None:
    """Killed while version 2 was evaluated, with a checkpoint of step 3: its trainer was one version ahead."""
    whole, _ = play(tmp_path / "whole", evaluating(max_async_level=0, eval__interval=1))
    config = evaluating(max_async_level=0, eval__interval=1)
    paths, _ = play(tmp_path / "run", evaluating(max_async_level=0, eval__interval=1, max_steps=3, ckpt__interval=3))
    content = (writing(paths, 3) / "orchestrator" / STATE).read_bytes()
    finish(paths, 3, {f"orchestrator/{STATE}": {"size": len(content), "xxh3": xxhash.xxh3_64(content).hexdigest()}}, {})
    lines = paths.metrics.read_text().splitlines(keepends=True)
    paths.metrics.write_text("".join(line for line in lines if not ('"eval"' in line and '"step": 2' in line)))
    write_start(paths, Start(step=3, checkpoint=paths.checkpoint_of(3)))
    trim_metrics(paths, 3)
    servers = Servers()
    servers.error = 0.9  # as in the other run at version 2; `update` sets the rest
    play(tmp_path / "run", config, servers, trainer=Resumed(paths, config, 3))
    assert servers.updates == [2, 3, 4, 5]
    there, here = ([record for record in reproducible(paths) if record["source"] == "eval"] for paths in (whole, paths))
    assert here == there
    assert reproducible(paths) == reproducible(whole), "the order of the records as well"


class Slow(Servers):
    """Asks the run to give way while version 1 is evaluated, which never ends."""

    def __init__(self, paths: RunPaths) -> None:
        super().__init__()
        self.paths = paths

    async def generate(self, *arguments: Any) -> Turn:
        if self.version == 1 and "eval_" in arguments[2]:
            self.paths.ask_to_give_way()
            await asyncio.sleep(3600)
        return await super().generate(*arguments)


class Saving(StandInTrainer):
    """Completes the run's last checkpoint, a moment after the orchestrator's part of it is there."""

    async def checkpoint(self, step: int) -> None:
        await super().checkpoint(step)
        await asyncio.sleep(0.3)
        part = f"orchestrator/{STATE}"
        content = (writing(self.paths, step) / part).read_bytes()
        finish(self.paths, step, {part: {"size": len(content), "xxh3": xxhash.xxh3_64(content).hexdigest()}}, {})


def test_a_run_whose_last_evaluation_was_given_up_is_preempted_and_plays_it_when_it_resumes(
    tmp_path: Path,
) -> None:
    paths, config = RunPaths(tmp_path), evaluating(max_steps=1, ckpt__interval=1)
    with pytest.raises(Preempted):
        play(tmp_path, config, Slow(paths), trainer=Saving(paths, config, late=0.3))
    assert [record["step"] for record in metrics(paths, "eval")] == [0]
    paths.preempt.unlink()
    write_start(paths, Start(step=1, checkpoint=paths.checkpoint_of(1)))
    play(tmp_path, config, trainer=Resumed(paths, config, 1))
    assert [record["step"] for record in metrics(paths, "eval")] == [0, 1]
