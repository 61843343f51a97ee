"""The trainer's loop makes the same calls, whether servers read files or get weights from its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from test_weights_memory import GROUPS, TIMEOUT, Server
from trainer_examples import make_model

from rlx.models.policy import PolicyModel
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.waiting import Preempted, wait_for
from rlx.weights.broadcast import Broadcast
from rlx.weights.files import ModelFiles, versions
from rlx.weights.memory import Offers
from rlx.weights.publish import Publisher

Make = Callable[[bool], tuple[Broadcast, list[str]]]


@pytest.fixture
def broadcast(tmp_path: Path) -> Iterator[Make]:
    """Makes a broadcast, from memory or over files, and the list of its phases."""
    made: list[Broadcast] = []

    def make(memory: bool) -> tuple[Broadcast, list[str]]:
        paths, model, mesh = RunPaths(tmp_path / "run"), PolicyModel(make_model()), one_process("cpu")
        for folder in (paths.endpoints, paths.weights):
            folder.mkdir(parents=True)
        phases: list[str] = []

        def working(phase: str, step: int | None = None) -> nullcontext[None]:
            phases.append(f"{phase}, step {step}")
            return nullcontext()

        publisher = Publisher(model, mesh, paths, ModelFiles({}), torch.float32)
        made.append(Broadcast(publisher, Offers(model, mesh, paths, torch.float32, TIMEOUT) if memory else None, working))
        return made[0], phases

    yield make
    made[0].close()
    GROUPS.clear()


@pytest.mark.parametrize("memory", [False, True], ids=["files", "memory"])
def test_a_preemption_ends_the_wait_and_a_version_in_memory_goes_to_the_disk(broadcast: Make, memory: bool) -> None:
    weights, phases = broadcast(memory)
    paths = weights.publisher.paths
    weights.offer(3)
    assert paths.offer.exists() == memory

    def preempted() -> None:
        raise Preempted

    with pytest.raises(Preempted):
        weights.serve_while(lambda tick: tick(), preempted)
    weights.leave_on_disk(3)
    assert versions(paths.weights) == ([3] if memory else [])
    assert phases == (["sending version 3, step 2", "writing version 3, step None"] if memory else [])
    assert weights.times.keys() == {"time/write_weights", "time/send_weights"}


def test_servers_that_call_during_a_wait_interrupt_it_and_get_the_version(broadcast: Make) -> None:
    weights, phases = broadcast(True)
    assert weights.offers is not None
    weights.offer(3)
    phases.clear()
    paths, servers = weights.offers.paths, []
    waits: list[str] = []

    def wait(tick: Callable[[], None]) -> str:
        waits.append("begun")
        if not servers:
            servers.append(Server(paths, 3))
        while servers[0].sums is None and servers[0].error is None:
            tick()
        return "batch"

    assert weights.serve_while(wait, lambda: None) == "batch"
    (server,) = servers
    assert server.ended().error is None
    assert all(torch.equal(server.tensors[name], tensor) for name, tensor in weights.publisher.model.named_weights())
    assert len(waits) == 2
    assert phases == ["sending version 3, step 3"]


def test_servers_that_call_within_a_step_get_the_version_while_heartbeats_go_on(broadcast: Make) -> None:
    """Such a transfer may take `weight_broadcast.timeout`, which is longer than a process may be silent."""
    weights, phases = broadcast(True)
    assert weights.offers is not None
    weights.offer(3)
    phases.clear()
    weights.serve()
    assert phases == [], "nobody has called"
    server = Server(weights.offers.paths, 3)
    wait_for(weights.offers.called, "the server's call", 20)
    weights.serve()
    assert server.ended().error is None
    assert phases == ["sending version 3, step 3"]


def test_servers_that_have_called_get_the_version_also_where_the_batch_is_there_already(broadcast: Make) -> None:
    weights, _ = broadcast(True)
    assert weights.offers is not None
    weights.offer(3)
    server = Server(weights.offers.paths, 3)
    wait_for(weights.offers.called, "the server's call", 20)
    assert weights.serve_while(lambda tick: "batch", lambda: None) == "batch"
    assert server.ended().error is None
