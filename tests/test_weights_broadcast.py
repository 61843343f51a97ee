"""The trainer's loop makes the same calls, whether servers read files or get weights from its memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_examples import make_model

from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths, arrived, write_text
from rlx.types import WeightVersion
from rlx.waiting import Preempted
from rlx.weights import broadcast as broadcasts
from rlx.weights.broadcast import Broadcast
from rlx.weights.files import ModelFiles, versions
from rlx.weights.subscribe import Subscriber, request_transfer

URL = "http://127.0.0.1:1"


class Sends:
    """A transfer whose servers take everything at once."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths, self.version, self.seconds = paths, -1, 0.0
        self.asked = False
        self.sent: list[int] = []

    def offer(self, version: int) -> None:
        self.version = version
        write_text(self.paths.offer, json.dumps({"version": version, "token": ""}))

    def wanted(self) -> bool:
        return self.asked

    def send(self) -> None:
        self.asked = False
        self.sent.append(self.version)
        asked = arrived(self.paths.endpoints / "weights_wanted.json")
        reply = {"version": self.version, "id": json.loads(asked or "{}").get("id"), "failed": {}}
        write_text(self.paths.endpoints / "weights_sent.json", json.dumps(reply))

    def close(self) -> None:
        self.paths.offer.unlink(missing_ok=True)


@pytest.fixture
def phases() -> list[str]:
    return []


@pytest.fixture
def broadcast(tmp_path: Path, phases: list[str], monkeypatch: pytest.MonkeyPatch) -> Broadcast:
    """A broadcast over files. `with_transfer` gives it a transfer."""
    monkeypatch.setattr(broadcasts, "SOON", 0.02)
    paths = RunPaths(tmp_path / "run")
    for folder in (paths.endpoints, paths.weights):
        folder.mkdir(parents=True)
    found = Broadcast(PolicyModel(make_model()), one_process("cpu"), paths, ModelFiles({}), torch.float32)

    def working(phase: str, step: int | None = None) -> nullcontext[None]:
        phases.append(f"{phase}, step {step}")
        return nullcontext()

    found.working = working
    return found


def with_transfer(broadcast: Broadcast) -> Sends:
    transfer: Any = Sends(broadcast.paths)
    broadcast.transfer = transfer
    return transfer


@pytest.mark.parametrize("memory", [False, True], ids=["files", "memory"])
def test_a_preemption_ends_the_wait_and_a_version_in_memory_goes_to_the_disk(broadcast: Broadcast, phases: list[str], memory: bool) -> None:
    if memory:
        with_transfer(broadcast)
    broadcast.offer(3)
    assert broadcast.paths.offer.exists() == memory

    def preempted() -> None:
        raise Preempted

    with pytest.raises(Preempted):
        broadcast.serve_while(lambda tick: tick(), preempted)
    broadcast.serve()
    broadcast.leave_on_disk(3)
    assert versions(broadcast.paths.weights) == ([3] if memory else [])
    assert phases == (["writing version 3, step None"] if memory else [])
    assert broadcast.times.keys() == {"time/write_weights", "time/send_weights"}
    broadcast.close()
    assert not broadcast.paths.offer.exists()


def test_servers_that_wait_interrupt_a_wait_for_the_batch_and_get_the_version(broadcast: Broadcast, phases: list[str]) -> None:
    transfer = with_transfer(broadcast)
    broadcast.offer(3)
    waits: list[list[int]] = []

    def wait(tick: Callable[[], None]) -> str:
        waits.append(list(transfer.sent))
        transfer.asked = len(waits) == 1
        tick()
        return "batch"

    assert broadcast.serve_while(wait, lambda: None) == "batch"
    assert waits == [[], [3]]
    assert phases == ["sending version 3, step 3"]


@pytest.mark.parametrize("when", ["at once", "before the wait", "within the step"])
def test_servers_get_the_version_wherever_the_weights_are_still_its_own(broadcast: Broadcast, phases: list[str], when: str) -> None:
    transfer = with_transfer(broadcast)
    transfer.asked = when == "at once"
    broadcast.offer(3)
    transfer.asked = when == "before the wait"
    assert broadcast.serve_while(lambda tick: "batch", lambda: None) == "batch"
    transfer.asked = when == "within the step"
    broadcast.serve()
    assert transfer.sent == [3]
    assert phases == ["sending version 3, step 3"], "heartbeats go on"


def test_the_orchestrator_asks_for_what_is_offered_and_hears_why_servers_do_not_have_it(broadcast: Broadcast) -> None:
    transfer, subscriber = with_transfer(broadcast), Subscriber(broadcast.paths)
    assert subscriber.latest() is None
    transfer.offer(3)
    found = WeightVersion(version=3, kind="memory", where=str(broadcast.paths.endpoints))
    assert subscriber.latest() == subscriber.at(3) == found
    assert subscriber.at(2) is None

    async def ask(version: int, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> dict[str, str]:
        asked = asyncio.create_task(request_transfer(found.where, version, [(URL, "the key")], timeout))
        await asyncio.sleep(0.05)
        meanwhile()
        return await asked

    wanted = broadcast.paths.endpoints / "weights_wanted.json"

    def send() -> None:
        asked = json.loads(wanted.read_text())
        assert asked.pop("id")
        assert asked == {"version": 3, "servers": [{"url": URL, "api_key": "the key"}]}
        assert wanted.stat().st_mode & 0o777 == 0o600, "it has the servers' key"
        transfer.send()

    assert asyncio.run(ask(3, 20, send)) == {}
    assert asyncio.run(ask(3, 0.1)) == {URL: "the trainer did not send version 3 within 0.1 s (weight_broadcast.timeout)"}, "an old reply"
    assert not wanted.exists()
    assert asyncio.run(ask(3, 20, lambda: transfer.offer(4)))[URL].startswith("the trainer has version 4 instead of 3")
    broadcast.close()
    assert asyncio.run(ask(4, 20))[URL].startswith("the trainer has version None instead of 4")


def test_an_offer_of_an_earlier_attempt_is_ignored(broadcast: Broadcast, monkeypatch: pytest.MonkeyPatch) -> None:
    with_transfer(broadcast).offer(3)
    monkeypatch.setenv("RLX_RUN_TOKEN", "the next attempt")
    assert Subscriber(broadcast.paths).latest() is None
