"""Checkpoints between the two roles: a full disk, a resumed orchestrator, the checkpoint's marker and pruning."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_worker import make_trainer
from policy_stand_in import load, tiny_chat
from test_checkpoint_folders import Number
from test_orchestrator_run import StandInServers, StandInTrainer, config_of, reproducible
from trainer_examples import make_model

from rlx.aio import first_failure
from rlx.checkpoints import folders
from rlx.checkpoints.orchestrator import STATE, Snapshots
from rlx.checkpoints.trainer import CheckpointFailed, Checkpoints
from rlx.codec import encode
from rlx.config.load import compose
from rlx.config.schema import CkptConfig, Config
from rlx.data.source import OrchestratorSource, RecordedSource
from rlx.envs.load import give_policy
from rlx.heartbeat import Heartbeat
from rlx.metrics import MetricsWriter
from rlx.parallel.mesh import one_process
from rlx.paths import COMPLETE, RunPaths, write_text
from rlx.polling import Preempted
from rlx.roles.orchestrator import Orchestrator
from rlx.rollout.record import StepRecorder, read_rollouts
from rlx.runs.rewind import rewind
from rlx.weights.files import verify

pytestmark = pytest.mark.slow

# the orchestrator's part


class CheckpointingTrainer(StandInTrainer):
    """Asks for a checkpoint after some steps, like the trainer."""

    def __init__(self, paths: RunPaths, config: Config, first: int = 0, last: int | None = None, at: tuple[int, ...] = ()) -> None:
        super().__init__(paths, config)
        self.first, self.last, self.at = first, config.max_steps if last is None else last, at

    async def run(self) -> None:
        if self.first:
            self.publish(self.first)
        for step in range(self.first, self.last):
            while not self.paths.batch_of(step).exists():
                await asyncio.sleep(0.002)
            self.batches.append(OrchestratorSource(self.paths, one_process("cpu"), timeout=1).receive(step, lambda: None))
            self.paths.batch_of(step).unlink()
            self.publish(step + 1)
            if step + 1 in self.at:
                folder = folders.begin(self.paths, step + 1)
                while not (folder / "orchestrator").exists() or not list((folder / "orchestrator").glob(STATE)):
                    await asyncio.sleep(0.002)
                folders.finish(self.paths, step + 1, {}, {})
        if self.last < self.config.max_steps:
            write_text(self.paths.preempted, "{}")
            await asyncio.sleep(30)

    def publish(self, version: int) -> None:
        folder = self.paths.weights_of(version)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / COMPLETE).write_text('{"version": 0, "files": {}}')


@functools.cache
def any_config() -> str:
    return compose([], {}).yaml


def play(
    paths: RunPaths, config: Config, trainer: StandInTrainer, role: type[Orchestrator] = Orchestrator, **servers: Any
) -> StandInServers:
    write_text(paths.config, any_config())  # a rewind asks it which command the directory belongs to
    envs = {name: load(env.id, sampling={"max_tokens": 12, "temperature": 1.0}, name=name, **env.args) for name, env in config.envs.items()}
    stand_in = StandInServers(**servers)

    async def main() -> None:
        give_policy(envs, config, tiny_chat(), stand_in)
        orchestrator = role(config, paths, envs, stand_in, stand_in, Heartbeat(paths, "orchestrator"))  # type: ignore[arg-type]
        await asyncio.wait_for(first_failure(orchestrator.run(), trainer.run()), 300)

    asyncio.run(main())
    return stand_in


@pytest.mark.parametrize("advantage", ["group.group_norm", "batch.Ema"])
def test_an_orchestrator_goes_on_as_if_it_had_never_stopped(tmp_path: Path, advantage: str) -> None:
    keys = {"max_steps": 6, "ckpt__interval": None, "advantage": {"_target_": f"rlx.advantages.{advantage}"}}
    whole, cut = RunPaths(tmp_path / "whole"), RunPaths(tmp_path / "cut")
    play(whole, config_of(**keys), CheckpointingTrainer(whole, config_of(**keys)))
    with pytest.raises(Preempted):
        play(cut, config_of(**keys), CheckpointingTrainer(cut, config_of(**keys), last=3, at=(3,)))
    assert rewind(cut) == folders.at(cut, 3)
    servers = play(cut, config_of(**keys), CheckpointingTrainer(cut, config_of(**keys), first=3))
    assert servers.updates == [3, 4, 5, 6], "the checkpoint's policy must be loaded first"
    assert reproducible(cut) == reproducible(whole)
    for step in range(6):
        lines = [
            [(r["prompt"], r["completion"], r["versions"], r["advantage"]) for r in read_rollouts(p.rollouts_of(step))]
            for p in (whole, cut)
        ]
        assert lines[0] == lines[1]


def test_failed_rollouts_are_written_once_whether_or_not_the_run_was_resumed(tmp_path: Path) -> None:
    paths, config = RunPaths(tmp_path), config_of(max_steps=4, ckpt__interval=None)

    class Failing(Orchestrator):
        def _scores(self, batch: Any) -> Any:
            if len(batch) > 1:  # the step's batch, not a single group for a filter
                self.collector.tally.failures.append(replace(batch[0][0], status="error", error="it failed"))
            return super()._scores(batch)

    with pytest.raises(Preempted):
        play(paths, config, CheckpointingTrainer(paths, config, last=2, at=(2,)), role=Failing)
    rewind(paths)
    play(paths, config, CheckpointingTrainer(paths, config, first=2), role=Failing)
    assert [sum(line["status"] == "error" for line in read_rollouts(paths.rollouts_of(step))) for step in range(4)] == [1, 1, 1, 1]


def test_a_checkpoint_waits_for_the_files_of_the_step_before_it(tmp_path: Path) -> None:
    """Also before their writing has begun: otherwise a SIGKILL would leave a hole that a resumed run never fills."""
    paths, config = RunPaths(tmp_path), config_of(max_steps=3, ckpt__interval=None)
    there: list[bool] = []

    class LateRecorder(StepRecorder):
        async def begin(self, *arguments: Any) -> None:
            await asyncio.sleep(0.2)
            await super().begin(*arguments)

    class Late(Orchestrator):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.recorder = LateRecorder(paths, config.orchestrator, None)
            answer = self.snapshots.answer

            def watched(*arguments: Any) -> list[int]:
                steps = answer(*arguments)
                there.extend(paths.rollouts_of(step - 1).exists() and paths.recorded_of(step - 1).exists() for step in steps)
                return steps

            self.snapshots.answer = watched  # type: ignore[method-assign]

    play(paths, config, CheckpointingTrainer(paths, config, at=(1, 2)), role=Late)
    assert there == [True, True]


def test_with_slack_no_example_is_lost_or_played_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished groups that were not trained on are in the checkpoint; groups in flight are rolled out again."""
    monkeypatch.setattr("rlx.rollout.collector.MIN_WAIT_SECONDS", 300.0)  # also on a machine that pauses
    paths, config = RunPaths(tmp_path), config_of(max_steps=8, max_async_level=2, ckpt__interval=None, orchestrator__max_concurrent=12)
    with pytest.raises(Preempted):
        play(paths, config, CheckpointingTrainer(paths, config, last=4, at=(4,)), jitter=0.02)
    assert rewind(paths) == folders.at(paths, 4)
    play(paths, config, CheckpointingTrainer(paths, config, first=4), jitter=0.02)
    groups = [line["group"] for step in range(8) for line in read_rollouts(paths.rollouts_of(step))]
    assert len(groups) == 8 * 8
    assert sorted(set(groups)) == list(range(16))


def test_recorded_batches_are_those_that_were_sent_and_arrivals_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.rollout.collector.MIN_WAIT_SECONDS", 300.0)  # also on a machine that pauses
    paths, config = RunPaths(tmp_path), config_of(max_steps=3, max_async_level=1, ckpt__interval=None)
    trainer = CheckpointingTrainer(paths, config)
    play(paths, config, trainer, jitter=0.02)
    for step, sent in enumerate(trainer.batches):
        again = RecordedSource(paths, one_process("cpu")).receive(step, lambda: None)
        assert encode(sent) == encode(again)
    arrivals = [line["arrival"] for step in range(3) for line in read_rollouts(paths.rollouts_of(step))]
    assert sorted(arrivals) == list(range(24))


# whole checkpoints


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    make_model(tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    return make_trainer(str(tmp_path / "model"))


@contextlib.contextmanager
def orchestrator_of(paths: RunPaths, last: int) -> Iterator[None]:
    """A thread that answers checkpoints like the orchestrator."""
    snapshots, stopped = Snapshots(paths, keep=100), threading.Event()
    for step in range(last + 1):
        snapshots.take(step, Number(number=step))

    def answer() -> None:
        while not stopped.wait(0.005):
            snapshots.answer()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def test_the_orchestrator_does_not_bring_a_checkpoint_back_that_was_finished_or_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.checkpoints.mkdir(parents=True)
    gone = folders.writing(paths, 1)
    monkeypatch.setattr("rlx.checkpoints.orchestrator.being_written", lambda _: [(1, gone)])
    snapshots = Snapshots(paths, keep=2)
    snapshots.take(1, Number(number=1))
    assert snapshots.answer() == []
    assert not gone.exists()


def test_an_orchestrator_that_answers_at_once_does_not_disturb_the_trainer(
    tmp_path: Path, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path / "run")
    snapshots = Snapshots(paths, keep=2)
    snapshots.take(2, Number(number=2))
    begin = folders.begin

    def begin_and_answer(paths: RunPaths, step: int) -> Path:
        folder = begin(paths, step)
        assert snapshots.answer() == [step]
        return folder

    monkeypatch.setattr(folders, "begin", begin_and_answer)
    checkpoints = Checkpoints(paths, CkptConfig(interval=2, save_async=False), trainer, last=7, facts={})
    checkpoints.save(2)
    checkpoints.close()
    assert folders.steps(paths) == [2]


@pytest.mark.parametrize("save_async", [False, True])
def test_checkpoints_of_both_roles_are_complete_and_old_ones_go(tmp_path: Path, trainer: Any, save_async: bool) -> None:
    paths = RunPaths(tmp_path / "run")
    config = CkptConfig(interval=2, keep_last=1, keep_interval=4, save_async=save_async)
    checkpoints = Checkpoints(paths, config, trainer, last=7, facts={"ranks": 1})
    with orchestrator_of(paths, 7):
        for step in range(1, 8):
            if checkpoints.due(step):
                checkpoints.save(step)
                assert step in checkpoints.protected()
            checkpoints.wait_copied()
            checkpoints.finish(wait=False)
        checkpoints.close()
    assert folders.steps(paths) == [4, 7], "the last step also gets a checkpoint"
    for step in (4, 7):
        manifest = verify(paths.checkpoint_of(step))
        assert (manifest["step"], manifest["ranks"]) == (step, 1)
        assert {name.split("/")[0] for name in manifest["files"]} == {"trainer", "orchestrator"}


def test_the_best_checkpoint_by_an_evaluation_is_not_pruned(tmp_path: Path, trainer: Any) -> None:
    paths = RunPaths(tmp_path / "run")
    config = CkptConfig(interval=1, keep_last=1, keep_best="eval/e/avg@1")
    checkpoints = Checkpoints(paths, config, trainer, last=9, facts={}, is_evaluated=lambda step: step % 2 == 0 or step == 9)
    evaluations = MetricsWriter(paths.metrics, "eval")
    with orchestrator_of(paths, 9):
        for step in range(1, 8):
            checkpoints.save(step)
            if step in (4, 6):  # the evaluation of version 2 or 4 ends while the trainer is two steps ahead
                assert step - 2 in folders.steps(paths)
                evaluations.write(step - 2, {"eval/e/avg@1": 1.0 / step})
        checkpoints.close()
    assert folders.steps(paths) == [2, 6, 7], "2 is the best so far, 6 is not evaluated yet"
    assert {2, 6, 7} <= checkpoints.protected(), "their weights stay, too"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounts a small file system")
@pytest.mark.parametrize("save_async", [False, True])
def test_a_full_disk_ends_the_run_with_the_last_good_checkpoint_intact(tmp_path: Path, trainer: Any, save_async: bool) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        paths = RunPaths(disk / "run")
        checkpoints = Checkpoints(paths, CkptConfig(interval=1, keep_last=None, save_async=save_async), trainer, last=99, facts={})

        def fill() -> None:
            for step in range(1, 99):
                checkpoints.save(step)
                checkpoints.wait_copied()

        with orchestrator_of(paths, 99), pytest.raises(CheckpointFailed) as failure:
            fill()
        good = folders.newest(paths, pytest.fail)
        assert good.step >= 1
        assert f"the checkpoint of step {good.step + 1} could not be written" in str(failure.value)
        assert "No space left on device" in str(failure.value)
        assert f"the last complete checkpoint is {good.checkpoint}" in str(failure.value)
        assert list(folders.being_written(paths)) == [], "the unfinished checkpoint must be deleted"
    finally:
        subprocess.run(["umount", str(disk)], check=True)
