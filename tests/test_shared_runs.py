"""The shared trainer, called step by step in this process: which runs it keeps, admits and puts out."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_shared_trainer import A, Orchestrator, batch, configure, model, trainer_records, until
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from trainer_examples import make_samples, step_batch

from rlx.checkpoints import folders
from rlx.checkpoints.trainer import CheckpointFailed
from rlx.config.load import load_run
from rlx.data.packing import pack
from rlx.data.source import send
from rlx.parallel.rendezvous import Place
from rlx.paths import RunPaths
from rlx.roles import shared_trainer
from rlx.roles.shared_trainer import SharedTrainer
from rlx.runs.members import wait_until_let_go
from rlx.runs.rewind import rewind
from rlx.shared.membership import TrainerClient, is_present, request_token, respond, response_of
from rlx.train.build import build
from rlx.train.checkpoint import TrainerProgress, load
from rlx.train.watch import Watch

pytestmark = pytest.mark.slow

__all__ = ["model"]  # the fixture


class Host(SharedTrainer):
    """A shared trainer that is told when to look."""

    def news(self) -> dict:
        """What it finds at once."""
        self.looked = 0.0
        return self.look()

    def join(self, name: str, **keys: object) -> Orchestrator:
        """A run in a slot."""
        run = Orchestrator(self.paths, name, A | keys)
        run.member = TrainerClient(run.paths, self.paths.root)
        ((slot, folder, token),) = self.news()["join"]
        assert folder == str(run.paths.root)
        self.admit(slot, run.paths, token)
        assert run.member.check()
        return run


@pytest.fixture
def host(tmp_path: Path, model: Path) -> Iterator[Host]:
    paths = configure(tmp_path / "host", **{"trainer.max_concurrent_runs": 2})
    paths.initial_model.write_text(f"{model}\n")
    trainer = Host(load_run(paths.root), paths, Place(0, 0, 1), Watch(paths, "trainer", first=True, grace=60))
    yield trainer
    for slot in list(trainer.members):
        trainer.put_out(slot, "the test ends")


def test_a_run_that_was_started_again_during_a_step_is_not_taken_for_its_old_attempt(host: Host):
    run = host.join("a")
    run.send([0])
    assert host.news() == {"train": [0]}
    run.leave()
    again = TrainerClient(run.paths, host.paths.root)  # as the old step is being trained
    host.train([0])
    assert host.members == {}
    assert trainer_records(run.paths) == {}, "the new attempt makes step 0"
    assert [token for _, _, token in host.news()["join"]] == [again.token]


def test_a_run_that_was_started_again_while_it_was_waited_for_leaves_before_it_joins(host: Host):
    run = host.join("a")
    run.leave()
    again = TrainerClient(run.paths, host.paths.root)
    assert list(host.joining()) == [], "two members would share a directory"
    news = host.news()
    assert (news["leave"], news["join"]) == ([[0, "it was started again"]], [])
    host.put_out(0, "it was started again")
    assert not again.check(), "the answer was for the old attempt"
    ((slot, _, token),) = host.news()["join"]
    host.admit(slot, run.paths, token)
    assert again.check()
    assert response_of(run.paths).token == again.token


def test_a_run_goes_on_from_its_checkpoint_with_a_trainer_of_its_own(host: Host, model: Path, tmp_path: Path):
    runs = host.join("a", **{"ckpt.interval": "null"}), host.join("b")
    for step in range(2):
        for run in runs:
            run.send([step])
        host.train([0, 1])
    shared = host.members[1]
    until(lambda: runs[1].trained(2) and shared.go_on() is None and folders.steps(runs[1].paths) == [2], "checkpoint 2")
    cfg = load_run(configure(tmp_path / "own", **A).root)
    own = build(cfg, str(model), host.mesh, lambda _: nullcontext(), resumes=True)
    start = folders.at(runs[1].paths, 2)
    assert load(start.checkpoint / folders.TRAINER, own) == TrainerProgress(2, shared.trainer.updates)
    for step in (2, 3):
        names = [name for name, _ in own.model.named_weights()]
        assert names == [name for name, _ in shared.trainer.model.named_weights()]
        ours, theirs = (
            {"model": dict(each.model.named_weights()), "optimizer": get_optimizer_state_dict(each.model, each.optimizer)["state"]}
            for each in (own, shared.trainer)
        )
        near = 1e-5 if step > 2 else 0.0  # what was read is equal; the order of sums differs afterwards
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near)
        if step == 2:
            own.train_batch(pack(batch("b", 2), rank=0, ranks=1, tokens=cfg.micro_batch_tokens))
            for run in runs:
                run.send([2])
            host.train([0, 1])


def test_a_run_that_is_put_out_is_not_waited_for_and_a_preempted_one_without_a_new_step_saves_nothing(host: Host):
    run = host.join("a", **{"ckpt.interval": 1})
    run.send([0])
    host.train(host.news()["train"])
    assert host.members[0].checkpoints.writing
    began = time.monotonic()
    host.put_out(0, "its loss is nan")  # its orchestrator lives, and does not add its part
    assert time.monotonic() - began < 60, "its orchestrator's part would have been waited for for five minutes"
    assert response_of(run.paths).why == "its loss is nan"
    other = host.join("b")
    host.members[0].step = host.members[0].first = 2  # as after a resume
    host.let_go(0)
    assert response_of(other.paths).state == "done"
    assert folders.steps(other.paths) == []
    assert list(folders.being_written(other.paths)) == []


def test_a_run_that_is_preempted_and_gone_at_once_is_put_out_once(host: Host):
    run = host.join("a")
    run.paths.ask_to_give_way()
    assert host.news()["preempted"] == [0]
    run.leave()
    news = host.news()
    assert (news["leave"], news["preempted"]) == ([[0, "its orchestrator has ended"]], [])


def test_a_run_whose_checkpoint_fails_at_the_notice_is_not_called_preempted(host: Host, monkeypatch: pytest.MonkeyPatch):
    run = host.join("a")

    def fails() -> None:
        raise CheckpointFailed("the disk is full")

    monkeypatch.setattr(host.members[0].checkpoints, "close", fails)
    host.let_go(0)
    assert response_of(run.paths).state == "out"
    assert not run.paths.preempted.exists()


def test_a_loss_without_a_gradient_puts_out_its_run_alone(host: Host, monkeypatch: pytest.MonkeyPatch):
    bad, good = host.join("a"), host.join("b")
    trainer = host.members[0].trainer
    loss_of = trainer.loss_of

    def detached(*given: Any, **keys: Any) -> Any:
        loss, stats = loss_of(*given, **keys)
        return loss.detach(), stats

    monkeypatch.setattr(trainer, "loss_of", detached)
    bad.send([0])
    good.send([0])
    until(lambda: host.news().get("train") == [0, 1], "both batches")
    host.train([0, 1])
    assert "something in it is detached" in response_of(bad.paths).why
    assert 0 in trainer_records(good.paths)


def test_a_run_goes_on_only_when_the_trainer_has_let_go_of_its_last_attempt(host: Host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_trainer, "IDLE", 0.01)
    run = host.join("a")
    run.leave()
    said: list[str] = []

    def say(text: str) -> None:  # only now does the trainer let go
        said.append(text)
        threading.Thread(target=lambda: host.put_out(0, "its orchestrator has ended")).start()

    monkeypatch.setattr("rlx.runs.members.say", say)
    wait_until_let_go(run.paths, host.paths)
    assert host.members == {}
    assert "it still holds the last attempt of this run" in said[0]
    token = request_token(run.paths)
    respond(run.paths, token, "in")  # what a trainer leaves that is killed
    host.seen.clear()
    assert host.news() == {}
    assert response_of(run.paths).state == "out", "a new trainer does not hold it"
    wait_until_let_go(run.paths, host.paths)


def test_a_run_that_nobody_may_read_keeps_no_other_from_joining(host: Host, monkeypatch: pytest.MonkeyPatch):
    other = Orchestrator(host.paths, "a", A)
    other.member = TrainerClient(other.paths, host.paths.root)

    def forbidden(paths: RunPaths) -> bool:
        if paths.root == other.paths.root:
            raise PermissionError(13, "Permission denied")
        return is_present(paths)

    monkeypatch.setattr(shared_trainer, "is_present", forbidden)
    host.join("b")
    assert [member.name for member in host.members.values()] == ["run_b"]


def test_an_orchestrator_ends_when_the_trainer_has_completed_its_last_checkpoint(host: Host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_trainer, "IDLE", 0.01)
    run = host.join("a", **{"max_steps": 1, "ckpt.interval": 1})
    member = run.member

    async def end() -> None:
        ended = asyncio.create_task(member.ended())
        await asyncio.sleep(0.1)
        assert not ended.done()
        run.send([0])
        host.train(host.news()["train"])
        assert not ended.done()
        until(lambda: run.trained(1) and "done" in host.news(), "version 1 and its checkpoint")
        host.leave(0, "done", "")
        async with asyncio.timeout(60):
            await ended

    asyncio.run(end())
    assert folders.steps(run.paths) == [1]


def test_a_batch_that_the_runs_objective_cannot_use_puts_out_that_run_alone(host: Host):
    bad, good = host.join("a"), host.join("b")
    samples = [replace(sample, ref_kl_weights=sample.loss_mask.astype("float32")) for sample in make_samples(groups=2)]
    send(bad.paths, step_batch(0, [samples]))
    good.send([0])
    until(lambda: host.news().get("train") == [0, 1], "both batches")
    host.train([0, 1])
    assert list(host.members) == [1]
    assert "the batch has the stream `ref_kl_weights`, but this objective consumes" in response_of(bad.paths).why
    assert 0 in trainer_records(good.paths)


def test_a_run_whose_directory_is_deleted_stays_deleted(host: Host):
    run = host.join("a")
    shutil.rmtree(run.paths.root)
    ((slot, why),) = host.news()["leave"]
    assert why == "its orchestrator has ended"
    host.put_out(slot, why)
    assert not (run.paths.membership / "answer.json").exists()
    assert host.members == {}


def test_a_run_whose_orchestrator_ends_after_the_last_checkpoint_is_done_not_put_out(host: Host):
    run = host.join("a", **{"max_steps": 1, "ckpt.interval": 1})
    run.send([0])
    host.train(host.news()["train"])
    until(lambda: run.trained(1) and host.members[0].checkpoints._pending[1].done, "version 1 and its checkpoint's parts")
    run.leave()
    news = host.news()
    assert (news["leave"], news["done"]) == ([], [0])


def test_a_run_that_joins_leaves_the_random_state_of_all_runs_as_it_is(host: Host):
    run = host.join("a", **{"max_steps": 2, "ckpt.interval": 1})
    run.send([0])
    host.train(host.news()["train"])
    until(lambda: run.trained(1) and host.members[0].checkpoints._pending[1].done, "version 1 and its checkpoint's parts")
    host.members[0].go_on()
    run.leave()
    host.put_out(0, "its orchestrator has ended")
    rewind(run.paths, warn=lambda _: None)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    host.join("a")
    assert host.members[0].step == host.members[0].first == 1
    assert torch.equal(torch.get_rng_state(), state)
