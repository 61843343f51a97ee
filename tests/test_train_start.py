"""How a trainer starts, is tried before a run, and leaves."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_worker import make_trainer
from launch_configs import config
from trainer_examples import make_model

from rlx.cli import main
from rlx.heartbeat import read_heartbeats
from rlx.models.load import check_packed_forward, load_policy
from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import Mesh
from rlx.parallel.rendezvous import Place
from rlx.paths import RunPaths
from rlx.polling import wait_for
from rlx.roles.trainer import Trainer
from rlx.train import build, checkpoint
from rlx.train.checkpoint import Saver, TrainerProgress
from rlx.train.role import allocator_variables
from rlx.train.watch import Watch
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
    saver.save(tmp_path / "saved", TrainerProgress(1, 1))
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


@pytest.mark.parametrize(
    ("bench", "step", "saved"), [(False, 3, [3]), (False, 1, []), (True, 3, [])], ids=["run", "no_step_done", "benchmark"]
)
def test_a_preempted_trainer_writes_a_checkpoint_unless_it_is_a_benchmark(tmp_path: Path, bench: bool, step: int, saved: list[int]) -> None:
    written: list[int] = []
    on_disk: list[int] = []
    trainer: Any = SimpleNamespace(
        cfg=SimpleNamespace(bench=bench),
        first_step=1,
        mesh=SimpleNamespace(first=True),
        paths=RunPaths(tmp_path),
        step_trainer=SimpleNamespace(abort_step=lambda: None),
        broadcast=SimpleNamespace(leave_on_disk=on_disk.append),
        save=lambda step, phase: written.append(step),
        finish=lambda phase: None,
    )
    Trainer.give_way(trainer, step)
    assert written == saved
    assert on_disk == saved, "the version of a checkpoint must be on the disk"
    assert trainer.paths.preempted.is_file()


CODE = """\
from rlx.losses.tokens import TokenLoss; import sys, torch


def scalar(tokens):
    return TokenLoss(loss=(tokens.logp * tokens.advantages).sum())


def bare(tokens):
    return -tokens.logp * tokens.advantages


def not_finite(tokens):
    return TokenLoss(loss=tokens.logp.sqrt())


def detached(tokens):
    return TokenLoss(loss=-tokens.logp.detach() * tokens.advantages)


def misspelt(tokens):
    return TokenLoss(loss=-tokens.log_prob * tokens.advantages)


def good(tokens):
    return TokenLoss(loss=-tokens.logp * tokens.advantages)


def by_sequence(tokens):
    return TokenLoss(loss=-tokens.rollout_mean(tokens.ratio() * tokens.advantages), unit="sequence")


def means(groups):
    return [rewards.mean() for rewards in groups.rewards]


def own_mean(groups):
    return [rewards - rewards.mean() for rewards in groups.rewards]


def flat(tokens):
    return TokenLoss(loss=0 * tokens.logp)


def root(tokens):
    return TokenLoss(loss=(tokens.logp - tokens.old_logp).square().sqrt() * tokens.advantages)


def changing(tokens):
    tokens.advantages.clamp_(min=0)
    return TokenLoss(loss=-tokens.logp * tokens.advantages)


def array(tokens):
    return TokenLoss(loss=tokens.logp.detach().numpy())


def compared(tokens):
    return TokenLoss(loss=tokens.logp - tokens.ref_logp)


def leaving(tokens):
    sys.exit(3)


def words(groups):
    return [list("abcd") for _ in groups.rewards]


def made(params, lr=0.1):
    return torch.optim.SGD(params, lr=lr)


class Idle(torch.optim.SGD):
    def step(self):
        raise RuntimeError("not yet")


class Own(torch.optim.SGD):
    pass


def region(tokens):
    return TokenLoss(loss=((tokens.logp - tokens.inference_logp).abs() - 0.2).clamp(min=0) ** 2)


class Sorting(torch.optim.SGD):
    def __init__(self, params, lr=0.1):
        params = list(params)
        super().__init__([{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim < 2]}], lr=lr)

    def step(self):
        for p in self.param_groups[0]["params"]:
            torch.linalg.svd(p.grad)
"""
MORE = {"loss": "aggregate: token_mean\n", "optim": "lr: 1e-4\n"}


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`said("loss", "scalar")`: exit code and output of a dry run with that function of `own_trial.py`."""
    (tmp_path / "own_trial.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_trial", raising=False)

    def run(group: str, name: str) -> tuple[int, str]:
        (tmp_path / group).mkdir()
        (tmp_path / group / f"{name}.yaml").write_text(f"_target_: own_trial.{name}\n" + MORE.get(group, ""))
        code = main(["train", f"--config-dir={tmp_path}", f"{group}={name}", "dry_run=true", "launcher.check_envs=false"])
        out, err = capsys.readouterr()
        return code, out + err

    return run


@pytest.mark.parametrize(
    ("group", "name", "line", "words"),
    [
        ("loss", "scalar", 4, "its loss is Tensor of shape []; it must have one value per token, here [12]"),
        ("loss", "bare", 8, "it returned Tensor of shape [12], not a rlx.losses.tokens.TokenLoss"),
        ("loss", "not_finite", 12, "its loss is not finite for ordinary numbers"),
        ("loss", "detached", 16, "its loss has no gradient, so nothing would be trained"),
        ("loss", "misspelt", 21, "AttributeError: 'TokenBatch' object has no attribute 'log_prob'"),
        ("advantage", "means", 32, "a group's advantages are float64 of shape []; they must have one value per rollout, here [4]"),
        ("loss", "flat", 40, "its loss has no gradient"),
        ("loss", "root", 44, "its gradient is not finite for ordinary numbers"),
        ("loss", "changing", 48, "it changes tokens.advantages in place"),
        ("loss", "array", 53, "must be Tensor, not numpy.ndarray"),
        ("loss", "compared", 58, "TypeError: unsupported operand type(s) for -: 'Tensor' and 'NoneType'"),
        ("loss", "leaving", 62, "SystemExit: 3"),
        ("advantage", "words", 65, "ValueError: could not convert string to float: 'a'"),
        ("optim", "made", 69, "it is a function; it must be a class of torch.optim.Optimizer"),
        ("optim", "Idle", 75, "RuntimeError: not yet"),
    ],
)
def test_what_cannot_train_is_refused_in_its_authors_words(said, tmp_path: Path, group: str, name: str, line: int, words: str) -> None:
    code, text = said(group, name)
    assert code == 2
    assert f"own_trial.{name} ({group}) fails on made-up numbers:\n  {tmp_path / 'own_trial.py'}, line {line}" in text
    assert words in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("group", "name"),
    [("loss", "good"), ("loss", "by_sequence"), ("loss", "region"), ("advantage", "own_mean"), ("optim", "Own"), ("optim", "Sorting")],
)
def test_what_can_train_is_planned(said, group: str, name: str) -> None:
    code, text = said(group, name)
    assert code == 0, text
