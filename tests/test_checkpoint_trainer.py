"""The trainer's state on disk: loading restores it bit for bit, on any number of ranks."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_worker import UPDATES, Job, full, make_trainer, run
from torch.distributed.checkpoint import FileSystemReader
from trainer_examples import make_model, make_samples, step_batch, train_minibatch
from transformers.models.ernie4_5_moe import Ernie4_5_MoeConfig
from transformers.models.llama import LlamaConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig

from rlx.data.packing import pack
from rlx.parallel.mesh import one_process
from rlx.train.checkpoint import Saver, TrainerProgress, _state_of, load
from rlx.train.reference import Reference
from rlx.train.step import PolicyTrainer
from rlx.weights.shapes import digest_of

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
HALF = UPDATES // 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_model(tie_word_embeddings=True).save_pretrained(folder)
    return str(folder)


def two_ranks(folder: Path, *jobs: Job) -> None:
    """Run both ranks in their own processes, over gloo, sharded by FSDP2."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    arguments = ["2", str(folder / "store"), *(json.dumps(asdict(job)) for job in jobs)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "checkpoint_worker.py"), str(rank), *arguments], env=environment, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors.decode()[-3000:]


def result(path: Path) -> dict[str, Any]:
    return torch.load(path)


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(b[name], tensor), name


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad", "Muon"])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(model: str, tmp_path: Path, optimizer: str) -> None:
    job = {"model": model, "optimizer": optimizer}
    run(Job(**job, out=str(tmp_path / "whole"), first=0, last=UPDATES), one_process("cpu"))
    run(Job(**job, out=str(tmp_path / "half"), first=0, last=HALF, save=str(tmp_path / "saved")), one_process("cpu"))
    run(Job(**job, out=str(tmp_path / "rest"), first=HALF, last=UPDATES, load=str(tmp_path / "saved")), one_process("cpu"))
    whole, half, rest = (result(tmp_path / name) for name in ("whole", "half", "rest"))
    assert half["records"] + rest["records"] == whole["records"]
    same_weights(rest["weights"], whole["weights"])


def test_a_parameter_that_never_has_a_gradient_has_no_state_and_training_goes_on(tmp_path: Path) -> None:
    """The bias by which ERNIE's router chooses experts. A checkpoint of one process has no optimizer state for it."""
    model = str(tmp_path / "ernie")
    make_model(Ernie4_5_MoeConfig, moe_num_experts=4, moe_k=2, moe_intermediate_size=16).save_pretrained(model)
    job: dict[str, Any] = {"model": model}
    run(Job(**job, out=str(tmp_path / "whole"), first=0, last=UPDATES), one_process("cpu"))
    run(Job(**job, out=str(tmp_path / "half"), first=0, last=HALF, save=str(tmp_path / "saved")), one_process("cpu"))
    stored = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert any("e_score_correction_bias" in name for name in stored)
    assert not any("e_score_correction_bias" in name for name in stored if name.startswith("optimizer."))
    run(Job(**job, out=str(tmp_path / "rest"), first=HALF, last=UPDATES, load=str(tmp_path / "saved")), one_process("cpu"))
    whole, half, rest = (result(tmp_path / name) for name in ("whole", "half", "rest"))
    assert half["records"] + rest["records"] == whole["records"]
    same_weights(rest["weights"], whole["weights"])
    trainer = make_trainer(model)
    load(tmp_path / "saved", trainer)
    assert len(trainer.optimizer.state) < len(list(trainer.model.parameters())), "as in the run that never stopped"


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad", "Muon"])
def test_saving_before_the_first_optimizer_step_changes_nothing(model: str, tmp_path: Path, optimizer: str) -> None:
    """As after a batch without a trainable token."""
    job = {"model": model, "optimizer": optimizer}
    run(Job(**job, out=str(tmp_path / "never"), first=0, last=HALF), one_process("cpu"))
    run(Job(**job, out=str(tmp_path / "none"), first=0, last=0, save=str(tmp_path / "saved")), one_process("cpu"))
    run(Job(**job, out=str(tmp_path / "resumed"), first=0, last=HALF, load=str(tmp_path / "saved")), one_process("cpu"))
    never = result(tmp_path / "never")["weights"]
    same_weights(result(tmp_path / "resumed")["weights"], never)
    trainer = make_trainer(model, optimizer)
    saver = Saver(trainer, digest_of, in_background=False)
    saver.save(tmp_path / "before", TrainerProgress(0, 0)).files()
    saver.close()
    for step in range(HALF):
        batch = pack(step_batch(step, [make_samples(seed=step)]), rank=0, ranks=1, tokens=60)
        train_minibatch(trainer, batch.mini_batches[0], step=step)
    same_weights({name: full(tensor) for name, tensor in trainer.model.named_weights()}, never)


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_a_checkpoint_does_not_say_where_the_optimizers_state_was(model: str, tmp_path: Path, optimizer: str) -> None:
    job = {"model": model, "optimizer": optimizer}
    run(Job(**job, out=str(tmp_path / "whole"), first=0, last=UPDATES), one_process("cpu"))
    for offload in (False, True):
        run(
            Job(**job, out=str(tmp_path / "half"), first=0, last=HALF, save=str(tmp_path / f"{offload}"), offload=offload),
            one_process("cpu"),
        )
        rest = Job(**job, out=str(tmp_path / "rest"), first=HALF, last=UPDATES, load=str(tmp_path / f"{offload}"), offload=not offload)
        run(rest, one_process("cpu"))
        same_weights(result(tmp_path / "rest")["weights"], result(tmp_path / "whole")["weights"])
    one, other = (FileSystemReader(tmp_path / f"{offload}").read_metadata().state_dict_metadata for offload in (False, True))
    assert one == other


def test_random_states_go_on_where_they_were(model: str, tmp_path: Path) -> None:
    import random

    import numpy as np

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    trainer = make_trainer(model)
    Saver(trainer, digest_of).save(tmp_path / "saved", TrainerProgress(4, 7))
    expected = draw()
    draw()
    assert load(tmp_path / "saved", trainer) == TrainerProgress(4, 7)
    assert trainer.updates == 7
    assert draw() == expected


def test_adapters_go_on_from_a_checkpoint_that_holds_them_alone(model: str, tmp_path: Path) -> None:
    job = {"model": model, "rank": 4, "dropout": 0.3}
    run(Job(**job, out=str(tmp_path / "whole"), first=0, last=UPDATES), one_process("cpu"))
    run(Job(**job, out=str(tmp_path / "half"), first=0, last=HALF, save=str(tmp_path / "saved")), one_process("cpu"))
    run(Job(**job, out=str(tmp_path / "rest"), first=HALF, last=UPDATES, load=str(tmp_path / "saved")), one_process("cpu"))
    whole, half, rest = (result(tmp_path / name) for name in ("whole", "half", "rest"))
    assert half["records"] + rest["records"] == whole["records"]
    same_weights(rest["weights"], whole["weights"])
    stored = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert {name.rpartition(".")[2] for name in stored if name.startswith("model.")} == {"lora_A", "lora_B"}
    assert not any("norm" in name or "weight" in name for name in stored if name.startswith("optimizer."))


@pytest.mark.long
def test_two_ranks_go_on_with_the_masks_of_dropout(model: str, tmp_path: Path) -> None:
    def job(name: str, first: int, last: int, **keys: Any) -> Job:
        return Job(**{"model": model, "out": str(tmp_path / name), "first": first, "last": last, "rank": 4, "dropout": 0.3} | keys)

    two_ranks(
        tmp_path,
        job("whole", 0, UPDATES),
        job("half", 0, HALF, save=str(tmp_path / "saved")),
        job("rest", HALF, UPDATES, load=str(tmp_path / "saved")),
        job("plain", 0, UPDATES, dropout=0.0),
    )
    whole, half, rest, plain = (result(tmp_path / name) for name in ("whole", "half", "rest", "plain"))
    assert half["records"] + rest["records"] == whole["records"]
    same_weights(rest["weights"], whole["weights"])
    assert plain["records"] != whole["records"]


def test_adapters_of_another_model_are_refused(model: str, tmp_path: Path) -> None:
    run(Job(model=model, rank=4, out=str(tmp_path / "out"), first=0, last=1, save=str(tmp_path / "saved")), one_process("cpu"))
    make_model(seed=1, tie_word_embeddings=True).save_pretrained(tmp_path / "other")
    both = (re.escape(model), re.escape(str(tmp_path / "other")))
    with pytest.raises(ValueError, match="belong to another model: they were trained beside {} .*, not {} ".format(*both)):
        load(tmp_path / "saved", make_trainer(str(tmp_path / "other"), rank=4))
    with pytest.raises(ValueError, match=r"does not fit this model .*lora\.\*"):
        load(tmp_path / "saved", make_trainer(model, rank=8))
    with pytest.raises(ValueError, match="does not fit this model"):
        load(tmp_path / "saved", make_trainer(model))


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=pytest.mark.nightly)], ids=["all", "adapters"])
def test_ranks_may_change_from_two_to_one_and_from_one_to_two(model: str, tmp_path: Path, rank: int) -> None:
    def job(name: str, first: int, last: int, **keys: Any) -> Job:
        return Job(**{"model": model, "out": str(tmp_path / name), "first": first, "last": last, "rank": rank} | keys)

    experts = str(tmp_path / "experts")
    make_model(Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16).save_pretrained(experts)
    run(job("one", 0, HALF, save=str(tmp_path / "from_one")), one_process("cpu"))
    run(job("experts_one", 0, HALF, model=experts, save=str(tmp_path / "from_experts")), one_process("cpu"))
    two_ranks(
        tmp_path,
        job("two", 0, HALF, save=str(tmp_path / "from_two")),
        job("two_rest", HALF, UPDATES, load=str(tmp_path / "from_two")),
        job("two_in_background", 0, HALF, save=str(tmp_path / "from_background"), in_background=True),
        job("one_to_two", HALF, HALF, load=str(tmp_path / "from_one"), save=str(tmp_path / "from_one_again")),
        job("one_to_two_rest", HALF, UPDATES, load=str(tmp_path / "from_one")),
        job("two_whole", 0, UPDATES),
        job("two_offloaded", 0, HALF, save=str(tmp_path / "from_offloaded"), in_background=True, offload=True),
        job("two_offloaded_rest", HALF, UPDATES, load=str(tmp_path / "from_two"), offload=True),
        job("two_again_rest", HALF, UPDATES, load=str(tmp_path / "from_offloaded")),
        job("one_to_pieces", HALF, HALF, load=str(tmp_path / "from_one"), save=str(tmp_path / "from_pieces"), divided={"context": 2}),
        job("pieces_rest", HALF, UPDATES, load=str(tmp_path / "from_pieces"), divided={"context": 2}),
        job("pieces_to_two_rest", HALF, UPDATES, load=str(tmp_path / "from_pieces")),
        job("pieces_to_parts", HALF, HALF, load=str(tmp_path / "from_pieces"), save=str(tmp_path / "from_parts"), divided={"tensor": 2}),
        job("parts_rest", HALF, UPDATES, load=str(tmp_path / "from_parts"), divided={"tensor": 2}),
        job("parts_to_two_rest", HALF, UPDATES, load=str(tmp_path / "from_parts")),
        job(
            "experts_two",
            HALF,
            HALF,
            model=experts,
            load=str(tmp_path / "from_experts"),
            save=str(tmp_path / "of_experts"),
            divided={"expert": 2},
        ),
        job("two_to_pieces", HALF, HALF, load=str(tmp_path / "from_two"), divided={"context": 2}),
    )
    # one → two: the weights arrive bit for bit, and so does the optimizer's state, which went to two ranks and back to one
    same_weights(result(tmp_path / "one_to_two")["weights"], result(tmp_path / "one")["weights"])
    run(job("one_rest", HALF, UPDATES, load=str(tmp_path / "from_one")), one_process("cpu"))
    run(job("one_again_rest", HALF, UPDATES, load=str(tmp_path / "from_one_again")), one_process("cpu"))
    same_weights(result(tmp_path / "one_again_rest")["weights"], result(tmp_path / "one_rest")["weights"])
    assert result(tmp_path / "one_again_rest")["records"] == result(tmp_path / "one_rest")["records"]
    # two → two, and two → one
    whole = result(tmp_path / "two_whole")
    assert result(tmp_path / "two")["records"] + result(tmp_path / "two_rest")["records"] == whole["records"]
    same_weights(result(tmp_path / "two_rest")["weights"], whole["weights"])
    for rest in ("two_offloaded_rest", "two_again_rest"):  # the optimizer's state in host memory after the checkpoint, or before it
        assert result(tmp_path / rest)["records"] == result(tmp_path / "two_rest")["records"]
        same_weights(result(tmp_path / rest)["weights"], whole["weights"])
    run(job("two_to_one", HALF, HALF, load=str(tmp_path / "from_two")), one_process("cpu"))
    same_weights(result(tmp_path / "two_to_one")["weights"], result(tmp_path / "two")["weights"])
    # in the background: it saves the state at the time of the call, although that state changed meanwhile
    run(job("background_to_one", HALF, HALF, load=str(tmp_path / "from_background")), one_process("cpu"))
    same_weights(result(tmp_path / "background_to_one")["weights"], result(tmp_path / "two")["weights"])
    # rows in two pieces, and matrices in two parts: weights and optimizer's state come and go bit for bit
    run(job("pieces_to_one_rest", HALF, UPDATES, load=str(tmp_path / "from_pieces")), one_process("cpu"))
    assert result(tmp_path / "pieces_to_one_rest")["records"] == result(tmp_path / "one_rest")["records"]
    assert result(tmp_path / "pieces_to_two_rest")["records"] == result(tmp_path / "one_to_two_rest")["records"]
    run(job("parts_to_one_rest", HALF, UPDATES, load=str(tmp_path / "from_parts")), one_process("cpu"))
    assert result(tmp_path / "parts_to_one_rest")["records"] == result(tmp_path / "one_rest")["records"]
    assert result(tmp_path / "parts_to_two_rest")["records"] == result(tmp_path / "one_to_two_rest")["records"]
    same_weights(result(tmp_path / "two_to_pieces")["weights"], result(tmp_path / "two")["weights"])
    for divided in ("pieces_rest", "parts_rest"):
        for a, b in zip(result(tmp_path / divided)["records"], result(tmp_path / "one_rest")["records"], strict=True):
            assert a == pytest.approx(b, rel=1e-3, abs=1e-5), divided
    for name, start in (("experts_rest", "from_experts"), ("experts_again_rest", "of_experts")):
        run(job(name, HALF, UPDATES, model=experts, load=str(tmp_path / start)), one_process("cpu"))
    assert result(tmp_path / "experts_again_rest")["records"] == result(tmp_path / "experts_rest")["records"]
    # one and two ranks differ only by the order of sums
    for a, b in zip(result(tmp_path / "one_to_two_rest")["records"], result(tmp_path / "one_rest")["records"], strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_checkpoint_knows_all_its_files(model: str, tmp_path: Path, in_background: bool) -> None:
    saver = Saver(make_trainer(model), digest_of, in_background=in_background)
    for name in ("first", "second"):
        folder = tmp_path / name
        saving = saver.save(folder, TrainerProgress(1, 1))
        saving.wait_copied()
        files = saving.files()
        assert files == {path.name: {"size": path.stat().st_size, "xxh3": digest_of(path)} for path in folder.iterdir()}
    saver.close()


def test_the_configuration_decides_the_learning_rate_of_what_follows(model: str, tmp_path: Path) -> None:
    trainer = make_trainer(model)
    Saver(trainer, digest_of).save(tmp_path / "saved", TrainerProgress(2, 2))
    other = make_trainer(model)
    other.optimizer.param_groups[0]["lr"] = 0.5
    load(tmp_path / "saved", other)
    assert other.optimizer.param_groups[0]["lr"] == 0.5


def with_reference(model: str, sync_interval: int | None, *, teacher: bool = False) -> PolicyTrainer:
    trainer = make_trainer(model)
    trainer.reference = Reference(make_trainer(model).model, sync_interval=sync_interval, alpha=0.5, teacher=teacher)
    return trainer


def test_a_reference_that_moved_is_not_forgotten_by_a_fork(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = with_reference(model, 2)
    with torch.no_grad():
        for parameter in first.reference.model.parameters():
            parameter.fill_(0.25)
    Saver(first, digest_of).save(tmp_path / "moved", TrainerProgress(2, 2))
    with pytest.raises(ValueError, match=r"followed the policy, but ref\.sync_interval=null makes it the initial policy\. Set it to"):
        load(tmp_path / "moved", with_reference(model, None))
    other = with_reference(model, 10**9)
    load(tmp_path / "moved", other)
    assert all((parameter == 0.25).all() for parameter in other.reference.model.parameters())
    load(tmp_path / "moved", with_reference(model, None, teacher=True))
    load(tmp_path / "moved", make_trainer(model))  # has no reference

    Saver(with_reference(model, None), digest_of).save(tmp_path / "frozen", TrainerProgress(2, 2))
    follower = with_reference(model, 2)
    before = [parameter.clone() for parameter in follower.reference.model.parameters()]
    with caplog.at_level("INFO", "rlx.trainer"):
        load(tmp_path / "frozen", follower)
    assert all(torch.equal(a, b) for a, b in zip(before, follower.reference.model.parameters(), strict=True))
    assert "the reference starts as the initial policy" in caplog.text


def test_a_checkpoint_of_another_model_is_refused(model: str, tmp_path: Path) -> None:
    Saver(make_trainer(model), digest_of).save(tmp_path / "saved", TrainerProgress(1, 1))
    for name, other in {"wider": make_model(hidden_size=32), "untied": make_model(LlamaConfig, tie_word_embeddings=False)}.items():
        other.save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match=r"does not fit this model and optimizer: .+ Resume with the model"):
            load(tmp_path / "saved", make_trainer(str(tmp_path / name)))
    with pytest.raises(ValueError, match="does not fit this model and optimizer"):
        load(tmp_path / "saved", make_trainer(model, "Adagrad"))


class Evil:
    """Unpickling it makes a folder."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize("place", ["record", "value"])
def test_what_a_strangers_checkpoint_would_execute_is_not_read(model: str, tmp_path: Path, place: str) -> None:
    folder, made = tmp_path / "theirs", tmp_path / "made"
    state = _state_of(make_trainer(model), TrainerProgress(1, 1))
    if place == "value":
        state["progress"]["step"] = Evil(made)
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    if place == "record":
        (folder / ".metadata").write_bytes(pickle.dumps(Evil(made)))
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        load(folder, make_trainer(model))
    assert not made.exists()
