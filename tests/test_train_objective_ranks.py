"""No objective depends on the number of processes: two real processes (gloo, FSDP2) against one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from in_ranks import in_ranks
from mixed_examples import MIXES
from objective_worker import CASES, train
from trainer_examples import make_model

from rlx.parallel.mesh import one_process

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results of one process, and of two."""
    folder = tmp_path_factory.mktemp("objectives")
    make_model(tie_word_embeddings=True).save_pretrained(folder / "model")
    make_model(tie_word_embeddings=True, seed=1).save_pretrained(folder / "teacher")
    launcher = [sys.executable, *in_ranks(2)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    command = [*launcher, str(HERE / "objective_worker.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return train(folder, one_process("cpu")), torch.load(folder / "results_2.pt")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("case", [*CASES, *MIXES, "the reference"])  # the last compares its parameters after it followed the policy
def test_two_processes_give_the_gradients_and_metrics_of_one(case, results):
    (gradients, metrics), (others, other_metrics) = (result[case] for result in results)
    scale = max(float(g.abs().max()) for g in gradients.values())
    assert scale > 0
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-5, atol=1e-5 * scale, msg=name)
    assert other_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        assert other_metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
