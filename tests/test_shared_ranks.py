"""The shared trainer on two ranks: rank 0 looks for runs, and both train them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_shared_trainer import A, Orchestrator, alone, configure, model, same, until

from rlx.checkpoints import folders
from rlx.paths import listed

__all__ = ["model"]  # the fixture


@pytest.mark.slow
@pytest.mark.long
def test_a_shared_trainer_of_two_ranks_trains_and_refuses_as_one_process_does(tmp_path: Path, model: Path):
    host = configure(tmp_path / "host", **{"trainer.max_concurrent_runs": 2, "trainer.idle_timeout": 15, "hardware.trainer_processes": 2})
    host.initial_model.write_text(f"{model}\n")
    a = Orchestrator(host, "a", A | {"max_steps": 2})
    refused = Orchestrator(host, "b", A | {"lora.target_modules": "[q_proj]"})
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *ranks, "-m", "rlx.roles.shared_trainer", "--run-dir", str(host.root)]
    with (host.root / "log.txt").open("w") as log:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        until(lambda: listed(host.membership) and listed(host.membership / "present"), "the trainer", process)
        with pytest.raises(RuntimeError, match=r"lora.target_modules is .'q_proj'. in this run"):
            refused.join()
        a.join()
        a.send([0, 1])
        a.wait(2, process)
        until(a.done, "the run's end", process)
        a.leave()
        assert process.wait(300) == 0, (host.root / "log.txt").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert folders.steps(a.paths) == [2]
    same(a.paths, alone(tmp_path / "alone", model, "a", A | {"max_steps": 2}), 2)
