"""Runs in one shared trainer learn what each learns alone, with one rank or two."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from in_ranks import in_ranks
from safetensors.torch import load_file
from trainer_examples import make_model, make_samples, step_batch

from rlx.checkpoints import folders
from rlx.checkpoints.orchestrator import STATE
from rlx.config.load import compose, to_yaml
from rlx.data.source import send
from rlx.metrics import read_metrics
from rlx.models.tiny import build_tokenizer
from rlx.paths import RunPaths, listed, write_text
from rlx.runs.rewind import rewind
from rlx.shared.membership import EvictedError, TrainerClient, response_of
from rlx.types import StepBatch
from rlx.weights.files import verify, versions
from rlx.weights.shapes import ADAPTER

COMMON = {"hardware": "cpu", "lora.rank": 4, "seq_len": 60, "sampling.max_tokens": 32, "trainer.batch_timeout": 600}
A = {"max_steps": 5, "loss": "grpo", "optim.lr": 1e-2, "seed": 3, "ckpt.interval": 2}
B = {"max_steps": 4, "loss": "gspo", "optim.lr": 3e-2, "lora.alpha": 8, "scheduler.type": "linear", "trainer.num_minibatches": 2} | {
    "ckpt.interval": "null"
}
GROUPS = {"a": 6, "b": 2, "own_a": 6, "own_b": 2}
WITHIN = 300.0  # seconds for anything to happen


def configure(root: Path, **keys: object) -> RunPaths:
    """A run directory as the launcher leaves it."""
    root.mkdir(parents=True)
    paths = RunPaths(root)
    paths.config.write_text(to_yaml(compose([f"{key}={value}" for key, value in (COMMON | keys).items()], environ={}).cfg))
    return paths


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(tie_word_embeddings=True).save_pretrained(folder)
    build_tokenizer(64).save_pretrained(folder)
    return folder


@contextmanager
def role(paths: RunPaths, name: str) -> Iterator[subprocess.Popen]:
    """A trainer's process; killed at the end if it is still there."""
    command = [sys.executable, "-m", f"rlx.roles.{name}", "--run-dir", str(paths.root)]
    with (paths.root / f"{name}.txt").open("a") as log:
        process = subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(condition: Callable[[], object], what: str, process: subprocess.Popen | None = None) -> None:
    end = time.monotonic() + WITHIN
    while not condition():
        assert time.monotonic() < end, what
        assert process is None or process.poll() is None, f"the trainer ended before {what}"
        time.sleep(0.02)


def batch(name: str, step: int) -> StepBatch:
    """What the orchestrator of a run sends: of unequal size."""
    samples = make_samples(groups=GROUPS[name], seed=1000 * GROUPS[name] + step)
    half = len(samples) // 2 if GROUPS[name] == 2 else len(samples)
    return step_batch(step, [part for part in (samples[:half], samples[half:]) if part])


class Orchestrator:
    """The end of a run that asks, sends batches, and answers checkpoints."""

    def __init__(self, host: RunPaths, name: str, keys: dict) -> None:
        self.host, self.name, self.paths, self.keys = host, name, host.member(name), keys
        if not self.paths.root.exists():
            configure(self.paths.root, **keys, **{"trainer.shared_trainer_dir": host.root})

    def join(self) -> None:
        self.member = TrainerClient(self.paths, self.host.root)
        self.member.wait(lambda: None)

    def send(self, steps: Sequence[int]) -> None:
        for step in steps:
            send(self.paths, batch(self.name, step))

    def trained(self, version: int) -> bool:
        """Whether the version is there. Gives checkpoints that are being written the orchestrator's part."""
        for _, folder in folders.being_written(self.paths):
            if not (part := folder / folders.ORCHESTRATOR / STATE).exists():
                write_text(part, "state")
        return version in versions(self.paths.weights)

    def wait(self, version: int, process: subprocess.Popen) -> None:
        until(lambda: self.trained(version), f"version {version} of {self.name}", process)

    def done(self) -> bool:
        """Whether the trainer has let the run go, after its last checkpoint."""
        self.trained(0)
        return response_of(self.paths).state == "done"

    def leave(self) -> None:
        os.close(self.member.presence.fd)


def alone(root: Path, model: Path, name: str, keys: dict) -> RunPaths:
    """The same run with a trainer of its own."""
    paths = configure(root, **(keys | {"ckpt.interval": "null"}))
    paths.initial_model.write_text(f"{model}\n")
    with role(paths, "trainer") as process:
        until(lambda: version_0_changes_nothing(paths), "version 0", process)
        for step in range(int(keys["max_steps"])):
            send(paths, batch(name, step))
        assert process.wait(WITHIN) == 0, (paths.root / "trainer.txt").read_text()
    return paths


def version_0_changes_nothing(paths: RunPaths) -> bool:
    """Whether version 0 is there, as an adapter: servers never compute the base model and adapters in one batch."""
    if 0 not in versions(paths.weights):
        return False
    assert verify(paths.weights_of(0))["base"]["identity"]
    adapter = load_file(paths.weights_of(0) / ADAPTER)
    assert all((tensor == 0).all() == ("lora_B" in name) for name, tensor in adapter.items())
    return True


def same(found: RunPaths, expected: RunPaths, version: int) -> None:
    ours, theirs = (load_file(paths.weights_of(version) / ADAPTER) for paths in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


def trainer_records(paths: RunPaths) -> dict[int, dict]:
    return {record["step"]: record for record, _ in read_metrics(paths.metrics) if record["source"] == "trainer"}


@pytest.mark.long
@pytest.mark.slow
def test_two_runs_in_one_trainer_learn_what_each_learns_alone_although_all_processes_are_killed_in_between(tmp_path: Path, model: Path):
    keys = {"trainer.max_concurrent_runs": 2, "trainer.batch_wait": 5, "trainer.idle_timeout": 15}
    host = configure(tmp_path / "host", **keys)
    host.initial_model.write_text(f"{model}\n")
    a, b = Orchestrator(host, "a", A), Orchestrator(host, "b", B)
    with role(host, "shared_trainer") as process:
        until(lambda: listed(host.membership) and listed(host.membership / "present"), "the trainer", process)
        a.join()
        assert a.paths.initial_model.read_text().strip() == str(model)
        until(lambda: version_0_changes_nothing(a.paths), "version 0", process)
        a.send([0])
        a.wait(1, process)
        b.join()  # while the trainer works
        a.send([1])
        b.send([0])
        b.wait(1, process)
        a.wait(2, process)
        until(lambda: 2 in folders.steps(a.paths), "checkpoint 2", process)
        a.send([2])
        b.send([1])
        a.wait(3, process)  # lost
        b.wait(2, process)
        os.killpg(process.pid, signal.SIGKILL)
    until(lambda: process.poll() is not None, "its end")
    with pytest.raises(EvictedError, match=r"has ended .*Start it again, then go on with this run: resume=latest"):
        a.member.check()
    a.leave()
    assert trainer_records(b.paths)[0]["perf/runs"] == trainer_records(a.paths)[1]["perf/runs"] == 2, "in one common step"
    assert rewind(a.paths, warn=lambda _: None).step == 2
    shutil.copytree(a.paths.weights_of(2), a.paths.weights_of(3))  # a version that was being written while the directory was rewound
    with role(host, "shared_trainer") as process:
        until(
            lambda: (found := response_of(b.paths)) is not None and found.state == "out",
            "an answer to a run of the trainer before",
            process,
        )
        with pytest.raises(EvictedError, match="it was started again; go on with this run, resume=latest"):
            b.member.check()
        b.leave()
        rewind(b.paths, warn=lambda _: None)  # from its beginning, because it has no checkpoint
        a.join()
        assert not listed(a.paths.weights_of(3))
        b.join()
        late = Orchestrator(host, "late", A)
        with pytest.raises(EvictedError, match=r"it trains 2 runs \(trainer.max_concurrent_runs\): run_a, run_b"):
            late.join()
        late.leave()
        for step in range(4):
            if step < 3:
                a.send([2 + step])
            b.send([step])
            b.wait(step + 1, process)
        a.wait(5, process)
        for run in (a, b):
            until(run.done, "the run's end", process)
            assert run.member.check()
            run.leave()
        assert process.wait(WITHIN) == 0
    for run in (a, b):
        own = alone(tmp_path / run.name, model, run.name, run.keys)
        same(run.paths, own, int(run.keys["max_steps"]))
        found, expected = trainer_records(run.paths), trainer_records(own)
        assert found.keys() == expected.keys()
        for step, record in expected.items():
            for name in ("loss/total", "optim/grad_norm", "optim/lr", "policy/entropy"):
                assert found[step][name] == pytest.approx(record[name], rel=1e-3, abs=1e-5), (step, name)
    assert folders.steps(a.paths) == [4, 5]
    manifest = verify(a.paths.weights_of(5))
    assert manifest["base"]["name"] == str(model)
    assert json.loads((a.paths.weights_of(5) / "adapter_config.json").read_text())["r"] == 4


__all__ = ["model"]  # the fixture
TWO_RANKS = {"trainer.idle_timeout": 15, "hardware.trainer_processes": 2}


@contextmanager
def two_ranks(host: RunPaths) -> Iterator[subprocess.Popen]:
    """The shared trainer's processes, when it takes runs."""
    ranks = in_ranks(2)
    command = [sys.executable, *ranks, "-m", "rlx.roles.shared_trainer", "--run-dir", str(host.root)]
    with (host.root / "log.txt").open("w") as log:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        until(lambda: listed(host.membership) and listed(host.membership / "present"), "the trainer", process)
        yield process
        assert process.wait(300) == 0, (host.root / "log.txt").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.long
def test_a_shared_trainer_of_two_ranks_trains_and_refuses_as_one_process_does(tmp_path: Path, model: Path):
    host = configure(tmp_path / "host", **TWO_RANKS, **{"trainer.max_concurrent_runs": 2})
    host.initial_model.write_text(f"{model}\n")
    a = Orchestrator(host, "a", A | {"max_steps": 2})
    refused = Orchestrator(host, "b", A | {"lora.target_modules": "[q_proj]"})
    with two_ranks(host) as process:
        with pytest.raises(RuntimeError, match=r"lora.target_modules is .'q_proj'. in this run"):
            refused.join()
        a.join()
        a.send([0, 1])
        a.wait(2, process)
        until(a.done, "the run's end", process)
        a.leave()
    assert folders.steps(a.paths) == [2]
    same(a.paths, alone(tmp_path / "alone", model, "a", A | {"max_steps": 2}), 2)


@pytest.mark.slow
@pytest.mark.long
def test_what_rank_0_alone_fails_to_write_or_read_puts_that_run_out_and_the_others_go_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only rank 0 writes versions, begins checkpoints and reads batches. The other rank must not wait for it in another collective."""
    host = configure(tmp_path / "host", **TWO_RANKS, **{"trainer.max_concurrent_runs": 4, "trainer.batch_wait": 5})
    host.initial_model.write_text(f"{model}\n")
    names = ("good", "without_weights", "without_checkpoints", "without_batch")
    for name in names:
        monkeypatch.setitem(GROUPS, name, 6)
    good, *bad = runs = [Orchestrator(host, name, A | {"max_steps": 2, "ckpt.interval": 1}) for name in names]
    with two_ranks(host) as process:
        for run in runs:
            run.join()
        for folder in (bad[0].paths.weights, bad[1].paths.checkpoints):
            if folder.is_dir():  # with version 0
                folder.rename(folder.with_name(f"earlier_{folder.name}"))
            folder.write_text("a file where the folder should be")
        for run in runs[:3]:
            run.send([0, 1])
        bad[2].paths.batch_of(0).mkdir(parents=True)
        for run in bad:
            until(lambda run=run: response_of(run.paths).state == "out", f"{run.name} is put out", process)
            run.leave()
        good.wait(2, process)
        until(good.done, "the run's end", process)
        good.leave()
    assert folders.steps(good.paths) == [1, 2]
    reasons = [response_of(run.paths).why for run in bad]
    assert [error in why for error, why in zip(("PublishFailed", "CheckpointFailed", "IsADirectoryError"), reasons, strict=True)], reasons
