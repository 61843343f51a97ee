"""A checkpoint of any layout of four ranks, or of one process, is read in any other, bit for bit: parameters and the optimizer's state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from checkpoint_worker import make_trainer
from layout_worker import LAYOUTS, RANKS, differences, save
from trainer_examples import make_model
from transformers.models.qwen3_moe import Qwen3MoeConfig

from rlx.parallel.mesh import one_process

pytestmark = [pytest.mark.slow, pytest.mark.long]
HERE = Path(__file__).parent
SOME = ["fsdp", "hsdp", "cp", "tp_ep"]  # every axis once


@pytest.mark.parametrize(
    ("layouts", "adapters"),
    [(SOME, 0), pytest.param([*LAYOUTS], 0, marks=pytest.mark.nightly), pytest.param([*LAYOUTS], 4, marks=pytest.mark.nightly)],
    ids=["some", "all", "adapters"],
)
def test_a_checkpoint_of_any_layout_is_read_in_any_other(tmp_path: Path, layouts: list[str], adapters: int) -> None:
    make_model(Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16).save_pretrained(tmp_path / "model")
    alone = make_trainer(str(tmp_path / "model"), rank=adapters)
    save(alone, tmp_path, "one", 0, one_process("cpu"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    command = [sys.executable, str(HERE / "layout_worker.py")]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path), str(adapters), *layouts], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-3000:]
    assert json.loads((tmp_path / "wrong.json").read_text()) == {}
    assert {name: found for name in layouts if (found := differences(alone, tmp_path, name))} == {}
    states = [torch.load(tmp_path / f"{name}.pt") for name in ("one", *layouts)]
    trained = [name for name in states[0] if not adapters or "lora_B" in name]  # the other matrices have no gradient in the first step
    assert trained
    assert all(not torch.equal(a[name], b[name]) for a, b in pairwise(states) for name in trained), "each layout trained on its own samples"
