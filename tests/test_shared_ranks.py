"""The shared trainer on two ranks: rank 0 looks for runs, and both train them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from in_ranks import in_ranks
from test_shared_trainer import GROUPS, A, Orchestrator, alone, configure, model, same, until

from rlx.checkpoints import folders
from rlx.paths import RunPaths, listed
from rlx.shared.membership import answered

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
    host = configure(tmp_path / "host", **TWO_RANKS, **{"trainer.max_concurrent_runs": 4, "trainer.wait_for_others": 5})
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
            until(lambda run=run: answered(run.paths).state == "out", f"{run.name} is put out", process)
            run.leave()
        good.wait(2, process)
        until(good.done, "the run's end", process)
        good.leave()
    assert folders.steps(good.paths) == [1, 2]
    reasons = [answered(run.paths).why for run in bad]
    assert [error in why for error, why in zip(("PublishFailed", "CheckpointFailed", "IsADirectoryError"), reasons, strict=True)], reasons
