"""The orchestrator's main loop between a stand-in policy and a stand-in trainer: real environments, files, schedule and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from policy_stand_in import OUTSIDE, StandIn, load, tiny_chat
from recorded import check_recorded, normalised
from served_stand_in import served

from rlx.aio import first_failure
from rlx.checkpoints.folders import begin, writing
from rlx.checkpoints.orchestrator import STATE
from rlx.codec import encode
from rlx.config.schema import Config, TrainedEnvConfig
from rlx.data.source import OrchestratorSource
from rlx.envs.load import give_policy
from rlx.envs.pool import WorkerPool
from rlx.heartbeat import Heartbeat, read_heartbeats
from rlx.inference.wire import ServerUnreachable
from rlx.parallel.mesh import one_process
from rlx.paths import COMPLETE, RunPaths
from rlx.roles.orchestrator import Orchestrator
from rlx.rollout.record import read_rollouts
from rlx.trace import Turn
from rlx.types import StepBatch, TrainingSample, WeightVersion

pytestmark = pytest.mark.slow

assert OUTSIDE


def config_of(**overrides: Any) -> Config:
    config = Config(
        max_steps=4,
        max_async_level=0,
        seq_len=128,
        loss={"_target_": "x", "aggregate": "token_mean"},
        advantage={"_target_": "rlx.advantages.group.group_norm"},
        envs={"e": TrainedEnvConfig(id="rlx_reverse_text", args={"num_examples": 64})},
    )
    config.sampling.max_tokens = 12
    config.orchestrator.batch_size = 8
    config.orchestrator.rollouts_per_example = 4
    config.orchestrator.rollout_timeout = 60.0
    config.hardware.name, config.hardware.device = "cpu", "cpu"
    config.model.name = "tiny"
    for name, value in overrides.items():
        node: Any = config
        *path, last = name.split("__")
        for part in path:
            node = getattr(node, part)
        setattr(node, last, value)
    return config


class StandInServers(StandIn):
    """Stands in for the servers: accepts weight updates, improves with every version, and records the versions that it got."""

    size = 1  # servers

    def __init__(self, jitter: float = 0.0, **settings: Any) -> None:
        super().__init__(tiny_chat(), **settings)
        self.jitter = jitter
        self.updates: list[int] = []
        self._random = random.Random()

    async def generate(self, *arguments: Any) -> Any:
        await asyncio.sleep(self.jitter * self._random.random())
        return await super().generate(*arguments)

    async def update(self, weights: WeightVersion, timeout: float) -> None:
        assert weights.kind == "files"
        assert (Path(weights.where) / COMPLETE).is_file()
        await asyncio.sleep(0.001)
        self.updates.append(weights.version)
        self.version = weights.version
        self.error = 0.9 if weights.version < 3 else 0.0

    async def held(self) -> None:
        await asyncio.Event().wait()

    async def stats(self) -> dict[str, float]:
        return {
            "perf/servers": 1,
            "perf/kv_cache_usage": 0.25,
            "perf/running": 0,
            "perf/waiting": 0,
            "perf/preemptions": 0,
            "perf/answered": 0,
        }


class StandInTrainer:
    """Consumes batches in order and publishes versions, like the real trainer. Checks each batch's tokens against the staleness bound.

    A step takes it `seconds`, and the run's last checkpoint begins `late` seconds after the last version is published."""

    def __init__(self, paths: RunPaths, config: Config, seconds: float = 0.0, late: float = 0.0) -> None:
        self.paths, self.config, self.seconds, self.late = paths, config, seconds, late
        self.batches: list[StepBatch] = []

    async def run(self) -> None:
        source = OrchestratorSource(self.paths, one_process("cpu"), timeout=1)
        for step in range(self.config.max_steps):
            while not self.paths.batch_of(step).exists():
                await asyncio.sleep(0.002)
            self.batches.append(source.receive(step, lambda: None))
            source.done(step)
            await asyncio.sleep(self.seconds)
            folder = self.paths.weights_of(step + 1)
            folder.mkdir(parents=True)
            (folder / COMPLETE).write_text("{}")
        if self.config.ckpt.interval is not None:
            await self.checkpoint(self.config.max_steps)

    async def checkpoint(self, step: int) -> None:
        """Begin the run's last checkpoint."""
        await asyncio.sleep(self.late)
        folder = begin(self.paths, step)
        while not (folder / "orchestrator" / STATE).exists():
            await asyncio.sleep(0.01)

    def samples(self, step: int) -> list[TrainingSample]:
        return [sample for mini_batch in self.batches[step].mini_batches for sample in mini_batch]


def play(
    root: Path, config: Config, servers: StandInServers | None = None, envs: Any = None, digests: Any = None, **of_trainer: float
) -> tuple[RunPaths, StandInTrainer]:
    paths = RunPaths(root)
    envs = {} if envs is None else envs
    for name, env in config.envs.items() if not envs else ():
        from rlx.envs.base import sampling_of

        timeout = env.rollout_timeout or config.orchestrator.rollout_timeout
        rule = env.on_reward_error
        envs[name] = load(env.id, timeout=timeout, sampling=sampling_of(config, env), name=name, on_reward_error=rule, **env.args)
    trainer = StandInTrainer(paths, config, **of_trainer)
    heartbeat = Heartbeat(paths, "orchestrator")

    stand_in: Any = servers or StandInServers()

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            if any(isinstance(env, WorkerPool) for env in envs.values()):
                sampler = await stack.enter_async_context(served(stand_in))
                stand_in.servers, stand_in.listeners = sampler.servers, sampler.listeners
            give_policy(envs, config, tiny_chat(), stand_in)
            orchestrator = Orchestrator(config, paths, envs, stand_in, stand_in, heartbeat, digests=digests)
            await asyncio.wait_for(first_failure(orchestrator.run(), trainer.run()), 300)

    asyncio.run(main())
    return paths, trainer


def metrics(paths: RunPaths, source: str = "orchestrator") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    return [line for line in lines if line["source"] == source]


def reproducible(paths: RunPaths) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith(("time/", "perf/"))} for line in lines]


def test_a_run_gives_every_step_its_batch_metrics_rollouts_and_ends_with_the_last_weights_served(tmp_path: Path) -> None:
    servers = StandInServers(error=0.9)
    paths, trainer = play(tmp_path, config_of(), servers)
    assert servers.updates[-1] == 4
    assert [batch.step for batch in trainer.batches] == [0, 1, 2, 3]
    records = metrics(paths)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    for record in records:
        assert record["batch/rollouts"] == 8
        assert record["batch/groups"] == 2
        assert record["env/e/share"] == 1.0
        assert record["reward/mean"] == record["reward/e/mean"] == pytest.approx(record["reward/e/exact"])
        assert record["rollouts/dropped_off_policy"] == 0
        assert record["time/step"] > 0
        assert record["perf/cpu_ms_per_rollout"] > 0
    assert records[-1]["reward/mean"] > records[0]["reward/mean"], "the stand-in policy learns"
    assert metrics(paths, "inference")[0]["perf/kv_cache_usage"] == 0.25
    assert read_heartbeats(paths)["orchestrator"]["pid"]


class Remembering(StandInServers):
    """Keeps every turn that it has sampled."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.turns: list[Turn] = []

    async def generate(self, *arguments: Any) -> Any:
        self.turns.append(await super().generate(*arguments))
        return self.turns[-1]


@pytest.mark.parametrize("name", ["rlx_test_multi", "rlx_test_rewrite", "rlx_test_single"])
def test_recorded_batches_train_each_sampled_token_once_with_its_context_and_the_advantage_of_its_group(name: str, tmp_path: Path) -> None:
    servers = Remembering(error=0.5)
    config = config_of(max_steps=2, envs={"e": TrainedEnvConfig(id=name)}, seq_len=256)
    play(tmp_path, config, servers)
    tokens, groups = check_recorded(tmp_path, 2, normalised, servers.turns)
    assert tokens == sum(len(turn.completion_ids) for turn in servers.turns) > 0
    assert groups == 4
    damaged = [*servers.turns[1:], servers.turns[1]]
    with pytest.raises(AssertionError):
        check_recorded(tmp_path, 2, normalised, damaged)
    with pytest.raises(AssertionError):
        check_recorded(tmp_path, 2, lambda rewards: normalised(rewards) + 0.01)


def test_the_rollouts_file_has_the_fields_people_rely_on(tmp_path: Path) -> None:
    paths, _ = play(tmp_path, config_of(max_steps=1))
    lines = list(read_rollouts(paths.rollouts_of(0)))
    assert len(lines) == 8
    assert [(line["group"], line["member"]) for line in lines] == [(g, m) for g in range(2) for m in range(4)]
    wanted = {
        "env",
        "example_id",
        "group",
        "prompt",
        "completion",
        "reward",
        "rewards",
        "advantage",
        "versions",
        "num_tokens",
        "stop",
        "error",
    }
    for line in lines:
        assert wanted <= line.keys()
        assert (line["env"], line["versions"], line["error"]) == ("e", [0], None)
        assert line["prompt"][0]["role"] == "user"
        assert line["reward"] == float(line["completion"][0]["content"] == line["answer"])
    for group in range(2):
        assert sum(line["advantage"] for line in lines if line["group"] == group) == pytest.approx(0, abs=1e-5)


def test_on_policy_runs_of_one_seed_write_the_same_metrics_in_the_same_order_whatever_finishes_first(tmp_path: Path) -> None:
    first, _ = play(tmp_path / "a", config_of(), StandInServers(jitter=0.01))
    second, _ = play(tmp_path / "b", config_of(), StandInServers(jitter=0.01))
    other, _ = play(tmp_path / "c", config_of(seed=1), StandInServers(jitter=0.01))
    assert reproducible(first) == reproducible(second)
    assert reproducible(first) != reproducible(other)
    for step in range(4):
        texts = [[(r["prompt"], r["completion"], r["advantage"]) for r in read_rollouts(p.rollouts_of(step))] for p in (first, second)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("level", [0, 1, 3])
def test_no_token_is_older_than_the_bound_with_a_slow_trainer_and_uneven_rollouts(tmp_path: Path, level: int) -> None:
    servers = StandInServers(jitter=0.03)
    _, trainer = play(tmp_path, config_of(max_steps=10, max_async_level=level), servers, seconds=0.02)
    lags = []
    for step in range(10):
        for sample in trainer.samples(step):
            lags += (step - sample.versions[sample.loss_mask]).tolist()
    assert min(lags) >= 0
    assert max(lags) <= level
    assert (max(lags) > 0) == (level > 0), "the schedule uses the slack it has"


class Silent(StandInServers):
    """Does not answer when its state is asked for."""

    async def stats(self) -> dict[str, float]:
        raise ServerUnreachable("it is leaving")


def test_a_step_without_an_answer_of_the_servers_has_its_inference_record_all_the_same(tmp_path: Path) -> None:
    paths, _ = play(tmp_path / "run", config_of(max_steps=2), Silent())
    records = [record for record in map(json.loads, paths.metrics.read_text().splitlines()) if record["source"] == "inference"]
    assert [(record["step"], record["perf/servers"]) for record in records] == [(0, 0), (1, 0)]


def test_rollouts_in_flight_when_weights_arrive_go_on(tmp_path: Path) -> None:
    servers = StandInServers(delay=0.05)
    paths, _ = play(tmp_path, config_of(max_steps=6, max_async_level=2, orchestrator__max_concurrent=64), servers)
    assert servers.updates == sorted(servers.updates)
    assert len(servers.requests) == 6 * 8, "no request was repeated or dropped"
    assert metrics(paths)[-1]["rollouts/dropped_off_policy"] == 0


def test_mini_batches_are_whole_groups_and_know_nothing_of_the_trainers_layout(tmp_path: Path) -> None:
    keys = {"max_steps": 1, "trainer__num_minibatches": 2}
    _, trainer = play(tmp_path / "one", config_of(**keys))
    _, other = play(tmp_path / "two", config_of(**keys, hardware__trainer_processes=2, trainer__micro_batch_tokens=64))
    (batch,) = trainer.batches
    members = [[(sample.group, sample.member) for sample in mini_batch] for mini_batch in batch.mini_batches]
    assert members == [[(group, member) for member in range(4)] for group in range(2)]
    assert [encode(one) for one in trainer.batches] == [encode(one) for one in other.batches]


def test_environments_are_mixed_by_weight_with_their_own_metrics(tmp_path: Path) -> None:
    envs = {
        "a": TrainedEnvConfig(id="rlx_reverse_text", args={"num_examples": 16}, weight=3.0),
        "b": TrainedEnvConfig(id="rlx_test_multi", args={"num_examples": 16}),
    }
    paths, _ = play(tmp_path, config_of(envs=envs, max_steps=2, orchestrator__batch_size=16))
    for record in metrics(paths):
        assert (record["env/a/share"], record["env/b/share"]) == (0.75, 0.25)
        assert {"reward/a/exact", "reward/b/solved", "env/a/similarity", "env/b/num_turns"} <= record.keys()


def test_group_rewards_train(tmp_path: Path) -> None:
    paths, _ = play(tmp_path, config_of(max_steps=1, envs={"g": TrainedEnvConfig(id="rlx_test_group")}))
    assert metrics(paths)[0]["reward/g/shortest"] > 0


def test_failing_examples_are_replaced_counted_and_written_down(tmp_path: Path) -> None:
    envs = {"t": TrainedEnvConfig(id="rlx_test_trouble", args={"kind": "vf_error", "every": 5})}
    paths, _ = play(tmp_path, config_of(envs=envs, max_steps=3, orchestrator__max_retries=3))
    last = metrics(paths)[-1]
    assert last["rollouts/failed_sandbox_error"] > 0
    assert last["rollouts/dropped_error"] % 4 == 0
    assert [record["batch/rollouts"] for record in metrics(paths)] == [8, 8, 8]
    failed = [line for step in range(3) for line in read_rollouts(paths.rollouts_of(step)) if line["status"] == "error"]
    assert failed
    assert all(line["advantage"] is None and "cannot be set up" in line["error"] for line in failed)


@pytest.mark.parametrize(
    ("rule", "said"),
    [("fail", r"\d+ × reward_raised: raising raised"), ("zero", r"\d+ × reward_raised: raising raised")],
)
def test_a_reward_function_that_always_raises_ends_the_run(rule: str, said: str, tmp_path: Path) -> None:
    envs = {"t": TrainedEnvConfig(id="rlx_test_trouble", args={"kind": "raising"}, on_reward_error=rule)}
    with pytest.raises(RuntimeError, match=rf"environment t: .*{said}.*reward function is broken"):
        play(tmp_path, config_of(envs=envs, max_steps=10))


def test_a_rollout_whose_reward_raised_is_not_trained_on_and_is_counted(tmp_path: Path) -> None:
    envs = {"t": TrainedEnvConfig(id="rlx_test_trouble", args={"kind": "sometimes_raising"})}
    paths, _ = play(tmp_path, config_of(envs=envs, max_steps=1, orchestrator__max_retries=40))
    record = metrics(paths)[0]
    assert record["reward/mean"] == 1, "the others raised"
    assert record["env/t/reward_error"] == 0
    assert record["rollouts/failed_reward_raised"] > 0


def test_a_failed_weight_update_ends_the_run(tmp_path: Path) -> None:
    class Refusing(StandInServers):
        async def update(self, weights: WeightVersion, timeout: float) -> None:
            raise ValueError(f"weights {weights.version} are corrupt")

    with pytest.raises(ValueError, match="weights 1 are corrupt"):
        play(tmp_path, config_of(), Refusing())


def test_the_last_checkpoint_gets_its_part_however_late_it_begins(tmp_path: Path) -> None:
    paths, _ = play(tmp_path, config_of(max_steps=2), late=0.3)
    assert (writing(paths, 2) / "orchestrator" / STATE).is_file()
    assert config_of().ckpt.interval is not None


def test_an_update_that_takes_for_ever_ends_the_run(tmp_path: Path) -> None:
    class Stuck(StandInServers):
        async def update(self, weights: WeightVersion, timeout: float) -> None:
            async with asyncio.timeout(timeout):
                await asyncio.sleep(3600)

    with pytest.raises(TimeoutError):
        play(tmp_path, config_of(weight_broadcast__timeout=0.1), Stuck())
