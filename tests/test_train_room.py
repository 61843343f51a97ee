"""The estimate of the trainer's memory against what is free, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from trainer_examples import make_model, make_trainer

from rlx.config import limits
from rlx.config.load import compose
from rlx.config.memory import size, trainer_memory
from rlx.parallel.mesh import Mesh
from rlx.paths import RunPaths
from rlx.train.room import too_little
from rlx.train.summary import Summary

GIB = 2**30
LARGE = ["dry_run=true", "model=qwen3_1_7b", "env=math", "trainer.ac.freq=0"]

pytestmark = pytest.mark.usefixtures("known_environments")


def test_too_little_host_memory_is_said_with_both_numbers_and_what_helps(monkeypatch, caplog) -> None:
    cfg = compose([*LARGE, "hardware=cpu"]).cfg
    memory = trainer_memory(cfg)
    need = memory.device + memory.published
    monkeypatch.setattr(limits, "free_memory", lambda: int(need - GIB))
    text = too_little(cfg, Mesh(device=torch.device("cpu")))
    assert text is not None
    assert f"it needs {size(need)} of host memory, and {size(need - GIB)} are free on the host of rank 0" in text
    assert "trainer.ac.freq=1: " in text
    assert text in caplog.text
    monkeypatch.setattr(limits, "free_memory", lambda: int(need + GIB))
    assert too_little(cfg, Mesh(device=torch.device("cpu"))) is None


def test_the_ranks_of_a_host_share_its_memory(monkeypatch) -> None:
    cfg = compose([*LARGE, "hardware=cpu", "hardware.trainer_processes=2"]).cfg
    memory = trainer_memory(cfg)
    monkeypatch.setattr(Mesh, "each", lambda self, own: [own, own])
    monkeypatch.setattr(limits, "free_memory", lambda: int(2 * memory.device))
    text = too_little(cfg, Mesh(device=torch.device("cpu"), world_size=2))
    assert text is not None
    assert f"the 2 ranks there need {size(2 * memory.device + memory.published)}" in text
    monkeypatch.setattr(Mesh, "hosts", lambda self: [[0], [1]])
    monkeypatch.setattr(limits, "free_memory", lambda: 0)
    apart = too_little(cfg, Mesh(device=torch.device("cpu"), world_size=2))
    assert apart is not None
    assert f"it needs {size(memory.device + memory.published / 2)}" in apart, "each host writes half of the weights"


@pytest.mark.parametrize("offload", [False, True])
def test_of_a_gpu_the_rank_with_the_least_free_memory_counts(monkeypatch, offload: bool) -> None:
    cfg = compose([*LARGE, "hardware=gpu2", f"trainer.fsdp_cpu_offload={str(offload).lower()}"]).cfg
    memory = trainer_memory(cfg)
    need = memory.device - memory.context
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(need + GIB), int(2 * need)))
    monkeypatch.setattr(limits, "free_memory", lambda: 2**50)
    mesh = Mesh(device=torch.device("cuda", 0), world_size=2)
    monkeypatch.setattr(Mesh, "each", lambda self, own: [own, own])
    assert too_little(cfg, mesh) is None
    monkeypatch.setattr(Mesh, "each", lambda self, own: [own, own - 2 * GIB if own == int(need + GIB) else own])
    text = too_little(cfg, mesh)
    assert text is not None
    assert f"a rank needs {size(need)} of its device, and {size(need - GIB)} are free on that of rank 1" in text
    monkeypatch.setattr(limits, "free_memory", lambda: int(2 * memory.host))
    monkeypatch.setattr(Mesh, "each", lambda self, own: [own, own])
    host = too_little(cfg, mesh)
    assert host is not None
    assert f"need {size(2 * memory.host + memory.published)} of host memory" in host
    assert replace(memory, on_host=not offload).host != memory.host


def test_the_closing_summary_of_the_run_has_the_warning(tmp_path) -> None:
    trainer = make_trainer(make_model())
    Summary(RunPaths(tmp_path), trainer.mesh, trainer, "too little")
    assert json.loads(RunPaths(tmp_path).kernels.read_text())["warning"] == "too little"
