"""The start of a trainer process: it uses CUDA only after the servers on its GPU answer, and sends heartbeats while it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_worker import make_trainer
from launch_configs import config
from trainer_examples import make_model

from rlx.heartbeat import read_heartbeats
from rlx.models.load import check_packed_forward, load_policy
from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import Mesh
from rlx.parallel.rendezvous import Place
from rlx.paths import RunPaths
from rlx.roles.trainer import Trainer
from rlx.train import build, checkpoint
from rlx.train.checkpoint import Progress, Saver
from rlx.train.role import allocator_variables
from rlx.train.watch import Watch
from rlx.waiting import wait_for
from rlx.weights.shapes import digest_of


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("layout", "sections", "expected"),
    [
        ("gpu1_shared", {}, ["servers", "cuda"]),
        ("gpu1_shared", {"replay": "/another/run"}, ["cuda"]),
        ("gpu1_shared", {"inference": {"base_url": ["http://elsewhere:8000"]}}, ["cuda"]),
        ("gpu2", {}, ["cuda"]),
    ],
)
def test_cuda_is_touched_after_the_servers_that_share_the_gpu_answer(layout, sections, expected, tmp_path: Path, monkeypatch) -> None:
    called: list[str] = []

    def cuda(*_: Any) -> None:
        called.append("cuda")
        raise Stop

    for name in ("set_device", "init", "synchronize", "current_device"):
        monkeypatch.setattr(torch.cuda, name, cuda)
    monkeypatch.setattr("rlx.inference.endpoints.read_endpoints", lambda *_: called.append("servers"))
    paths = RunPaths(tmp_path)
    with pytest.raises(Stop):
        Trainer(config(layout, **sections), paths, Place.of({}), Watch(paths, "trainer", first=True, grace=1.0))
    assert called == expected


@pytest.mark.parametrize(
    ("sections", "present", "expected"),
    [
        ({}, {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, {}),
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, {}),
        ({"weight_broadcast": {"type": "ipc"}}, {}, {}),
    ],
)
def test_segments_of_cuda_memory_grow_unless_the_user_says_otherwise_or_servers_map_them(sections, present, expected) -> None:
    assert allocator_variables(config("gpu1_shared", **sections), present) == expected
    assert allocator_variables(config("cpu"), present) == {}


def test_a_model_that_takes_long_to_load_gives_signs_of_life(tmp_path: Path, monkeypatch) -> None:
    paths = RunPaths(tmp_path)
    watch = Watch(paths, "trainer", first=True, grace=1.0)
    monkeypatch.setattr("rlx.heartbeat.INTERVAL", 0.02)
    beats: list[dict] = []

    def load(*_: Any, **__: Any) -> None:
        for _ in range(3):
            beats.append(wait_for(lambda: (now := read_heartbeats(paths)["trainer"]) not in beats and now, "another beat", 60))
        raise Stop

    monkeypatch.setattr(build, "load_policy", load)
    with pytest.raises(Stop):
        build.build(config("cpu"), "a large model", Mesh(device=torch.device("cpu")), watch.working)
    assert {beat["phase"] for beat in beats} == {"loading the model"}
    assert beats[0]["time"] < beats[1]["time"] < beats[2]["time"]


def test_a_model_whose_packed_forward_differs_is_refused_with_device_and_both_numbers() -> None:
    model = PolicyModel(make_model())
    check_packed_forward(model, "cpu")
    model.logit_scale = 1.5
    with pytest.raises(ValueError, match=r"on cpu its packed forward differs from its own by [\d.]+ nats, while .* spread by [\d.]+\."):
        check_packed_forward(model, "cpu")


def stop(*_: Any, **__: Any) -> None:
    raise Stop


def test_the_packed_forward_is_checked_when_a_model_is_read_and_when_a_checkpoint_is(tmp_path: Path, monkeypatch) -> None:
    make_model().save_pretrained(tmp_path / "model")
    trainer = make_trainer(str(tmp_path / "model"))
    saver = Saver(trainer, digest_of, in_background=False)
    saver.save(tmp_path / "saved", Progress(1, 1))
    saver.close()
    monkeypatch.setattr("rlx.models.load.check_packed_forward", stop)
    with pytest.raises(Stop):
        make_trainer(str(tmp_path / "model"))
    resumes = make_trainer(str(tmp_path / "model"), read=False)
    monkeypatch.setattr(checkpoint, "check_packed_forward", stop)
    with pytest.raises(Stop):
        checkpoint.load(tmp_path / "saved", resumes)


@pytest.mark.parametrize(("backend", "liger"), [("triton", "false"), ("torch", "true")])
def test_triton_is_checked_before_a_model_is_read(backend: str, liger: str, tmp_path: Path, monkeypatch) -> None:
    make_model().save_pretrained(tmp_path / "model")
    monkeypatch.setattr("rlx.models.load.check_triton", stop)
    with pytest.raises(Stop):
        load_policy(str(tmp_path / "model"), Mesh(device=torch.device("cuda")), dtype="float32", logprob_backend=backend, liger=liger)
