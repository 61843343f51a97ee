"""How the orchestrator asks for a version that the trainer has in memory, and what the trainer leaves on the disk."""

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
from rlx.paths import RunPaths, write_text
from rlx.types import WeightVersion
from rlx.weights.files import ModelFiles, versions
from rlx.weights.publish import Publisher
from rlx.weights.subscribe import Subscriber, request_transfer

URL = "http://127.0.0.1:1"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "run")
    for folder in (found.endpoints, found.weights):
        folder.mkdir(parents=True)
    return found


def offer(paths: RunPaths, version: int) -> None:
    write_text(paths.offer, json.dumps({"version": version, "token": ""}))


class Sends:
    """A transfer whose servers take everything at once."""

    def __init__(self) -> None:
        self.seconds, self.sent = 0.0, list[int]()

    def offer(self, version: int, tick: Callable[[], None]) -> None:
        self.sent.append(version)

    def close(self) -> None: ...


@pytest.mark.parametrize("memory", [False, True], ids=["files", "memory"])
def test_only_a_transfer_sends_what_is_offered_and_leaves_a_version_on_the_disk_at_the_end(paths: RunPaths, memory: bool) -> None:
    publisher, phases = Publisher(PolicyModel(make_model()), one_process("cpu"), paths, ModelFiles({}), torch.float32), list[str]()
    transfer: Any = Sends()
    publisher.transfer = transfer if memory else None

    def working(phase: str, step: int | None = None) -> nullcontext[None]:
        phases.append(f"{phase}, step {step}")
        return nullcontext()

    publisher.working = working
    publisher.offer(3, lambda: None)
    publisher.leave_on_disk(3)
    assert transfer.sent == ([3] if memory else [])
    assert versions(paths.weights) == ([3] if memory else [])
    assert phases == (["sending version 3, step 3", "writing version 3, step None"] if memory else [])
    assert publisher.times.keys() == {"time/write_weights", "time/send_weights"}
    publisher.close()


def test_the_orchestrator_asks_for_what_is_offered_and_hears_why_servers_do_not_have_it(paths: RunPaths) -> None:
    subscriber, wanted = Subscriber(paths), paths.endpoints / "weights_wanted.json"
    assert subscriber.latest() is None
    offer(paths, 3)
    found = WeightVersion(version=3, kind="memory", where=str(paths.endpoints))
    assert subscriber.latest() == subscriber.at(3) == found
    assert subscriber.at(2) is None

    async def ask(version: int, timeout: float, meanwhile: Callable[[], None] = lambda: None) -> str:
        asked = asyncio.create_task(request_transfer(found.where, version, [(URL, "the key")], timeout))
        await asyncio.sleep(0.05)
        meanwhile()
        return await asked

    def send() -> None:
        asked = json.loads(wanted.read_text())
        number = asked.pop("id")
        assert asked == {"version": 3, "servers": [{"url": URL, "api_key": "the key"}]}
        assert wanted.stat().st_mode & 0o777 == 0o600, "it has the servers' key"
        write_text(paths.endpoints / "weights_sent.json", json.dumps({"version": 3, "id": number, "failed": ""}))

    assert asyncio.run(ask(3, 20, send)) == ""
    assert asyncio.run(ask(3, 0.1)) == "the trainer did not send version 3 within 0.1 s (weight_broadcast.timeout)", "an old reply"
    assert not wanted.exists()
    assert asyncio.run(ask(3, 20, lambda: offer(paths, 4))).startswith("the trainer has version 4 instead of 3")
    assert asyncio.run(ask(4, 20, paths.offer.unlink)).startswith("the trainer has version None instead of 4")


def test_an_offer_of_an_earlier_attempt_is_ignored(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(paths, 3)
    monkeypatch.setenv("RLX_RUN_TOKEN", "the next attempt")
    assert Subscriber(paths).latest() is None
