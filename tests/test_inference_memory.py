"""An engine that takes weights from a trainer's memory, on real vLLM on CPU: exact, attested, and whole after a transfer that broke."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inference_server import EXACT, START, MemoryTrainer, Run, from_memory, prompts, running, sample, split_over_two, under_load
from run_servers import Servers

from rlx.inference.endpoints import Endpoint
from rlx.inference.protocol import InferenceError, PolicyState, UpdateRefused, WeightsGone
from rlx.inference.telling import Manner
from rlx.parallel.transfer import Announced, Group
from rlx.types import Turn
from rlx.waiting import UNFIT
from rlx.weights.subscribe import Subscriber

pytestmark = pytest.mark.slow

VANISHES = f"""
from rlx.inference.server import worker
tensors, tried = worker.tensors, []
def first(folder):
    if folder.name == 'step_2' and not tried:
        tried.append(folder)
        raise FileNotFoundError('it was deleted')
    return tensors(folder)
worker.tensors = first
{START}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = from_memory(Run(tmp_path_factory.mktemp("run"), tied=True))
    run.start()
    run.ready()
    yield run
    run.stop()


def test_weights_from_memory_are_exact_in_flight_and_survive_a_broken_transfer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, ids = MemoryTrainer(run), prompts(16, seed=2)
    send = Group.send
    broken: list[Any] = []

    def breaks(group: Group, announced: Announced, tensors: Any) -> None:
        """Everything was sent, but the trainer does not know that."""
        send(group, announced, tensors)
        broken.append(group)
        raise RuntimeError("lost")

    async def conversation() -> list[Turn]:
        async with Servers(run.ready(), request_timeout=120) as client:
            await client.fleet.wait_ready(300)

            async def change() -> None:
                for version in (1, 2, 3):
                    await running(client, 8)
                    await asyncio.sleep(0.3)
                    trainer.offer(version)
                    if version == 2:
                        monkeypatch.setattr(Group, "send", breaks)
                        with pytest.raises(WeightsGone, match="did not arrive"):
                            await trainer.update(client)
                        monkeypatch.setattr(Group, "send", send)
                        assert (await client.fleet.states())[0].version == 1, "half of a version is none"
                    await trainer.update(client)
                    assert (await client.fleet.states())[0].attested == 1.0

            return await under_load(client, ids, change)

    turns = asyncio.run(conversation())
    assert broken
    assert {version for turn in turns for version in turn.versions.tolist()} == {0, 1, 2, 3}
    assert run.worst(turns, 1.0) < EXACT


def test_a_version_that_the_trainer_does_not_have_is_refused_and_the_old_one_is_served(run: Run) -> None:
    trainer = MemoryTrainer(run)
    trainer.offer(5)
    old = Subscriber(run.paths).latest()
    trainer.offer(6)

    async def conversation() -> list[int]:
        async with Servers(run.ready(), request_timeout=120) as client:
            await client.fleet.wait_ready(300)
            assert old is not None
            telling = asyncio.create_task(client.fleet.update(old, 30.0))
            while not telling.done():
                await asyncio.to_thread(trainer.offers.send)
                await asyncio.sleep(0.002)
            with pytest.raises(WeightsGone, match="the trainer has version 6, not version 5"):
                await telling
            return await client.fleet.versions()

    assert asyncio.run(conversation()) == [0]


def test_short_requests_that_came_after_a_broken_transfer_do_not_hold_up_the_next_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is paused then, so they cannot finish under the old version, as updates let short requests do."""
    trainer, ids = MemoryTrainer(run), prompts(4, seed=3)
    trainer.offer(7)  # those of the tests before are files by now
    send = Group.send

    def breaks(group: Group, announced: Announced, tensors: Any) -> None:
        send(group, announced, tensors)
        raise RuntimeError("lost")

    async def conversation() -> list[Turn]:
        async with Servers(run.ready(), request_timeout=120, manner=Manner(drain_tokens=16)) as client:
            await client.fleet.wait_ready(300)
            monkeypatch.setattr(Group, "send", breaks)
            with pytest.raises(WeightsGone, match="did not arrive"):
                await trainer.update(client)
            monkeypatch.setattr(Group, "send", send)
            short = [asyncio.create_task(sample(client, one, seed, max_tokens=8)) for seed, one in enumerate(ids)]
            await asyncio.sleep(0.5)
            assert not any(task.done() for task in short)
            await asyncio.wait_for(trainer.update(client), 25)
            return await asyncio.gather(*short)

    turns = asyncio.run(conversation())
    assert {version for turn in turns for version in turn.versions.tolist()} == {7}
    assert run.worst(turns, 1.0) < EXACT


def refuses_what_changed_on_its_way(run: Run, version: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of the run ends over this tensor of this version."""
    trainer = MemoryTrainer(run)
    trainer.offer(version)
    send = Group.send

    def damaged(group: Group, announced: Announced, tensors: Any) -> None:
        assert name in announced.names
        send(group, announced, ((sent, tensor + (sent == name)) for sent, tensor in tensors))

    monkeypatch.setattr(Group, "send", damaged)

    async def conversation() -> None:
        async with Servers(run.ready(), request_timeout=120, restart_timeout=5) as client:
            await client.fleet.wait_ready(300)
            with pytest.raises(InferenceError, match=rf"1 of \d+ tensors differ: {re.escape(name)}"):
                await trainer.update(client)

    asyncio.run(conversation())
    assert run.process is not None
    assert run.process.wait(60) == UNFIT


def test_a_tensor_that_changed_on_its_way_ends_the_server(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last test of the shared server: it breaks it."""
    refuses_what_changed_on_its_way(run, 8, "model.norm.weight", monkeypatch)


@pytest.mark.long
def test_a_tensor_that_the_engine_packs_and_that_changed_on_its_way_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can compare it once it is served."""
    run = from_memory(Run(tmp_path, tied=True, experts=4))
    run.start()
    refuses_what_changed_on_its_way(run, 1, "model.layers.0.mlp.experts.0.gate_proj.weight", monkeypatch)


@pytest.mark.long
def test_two_workers_survive_a_broken_transfer_and_a_folder_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both workers fail. The executor reads one of their answers, so what comes after would get the answers of what came before."""
    run = split_over_two(from_memory(Run(tmp_path, tied=True)))
    trainer, send = MemoryTrainer(run), Group.send
    run.start(VANISHES)

    def breaks(group: Group, announced: Announced, tensors: Any) -> None:
        group.abort()
        raise RuntimeError("lost")

    async def conversation(endpoints: list[Endpoint]) -> tuple[list[Turn], PolicyState]:
        async with Servers(endpoints, request_timeout=120, restart_timeout=5) as client:
            await client.fleet.wait_ready(300)
            trainer.offer(1)
            monkeypatch.setattr(Group, "send", breaks)
            with pytest.raises(WeightsGone, match="did not arrive"):
                await trainer.update(client)
            monkeypatch.setattr(Group, "send", send)
            await trainer.update(client)
            turns = [await sample(client, prompts(1)[0], 0)]
            with pytest.raises(UpdateRefused, match="version 1 is still served: FileNotFoundError: it was deleted"):
                await client.update(run.version(2), 2)
            await client.update(run.version(2), 2)
            return [*turns, await sample(client, prompts(1)[0], 0)], (await client.fleet.states())[0]

    turns, state = asyncio.run(conversation(run.ready()))
    run.stop()
    assert (state.version, state.attested) == (2, 1.0)
    assert [set(turn.versions.tolist()) for turn in turns] == [{1}, {2}]
    assert run.worst(turns, 1.0) < EXACT


@pytest.mark.long
def test_half_of_a_version_waits_for_a_trainer_in_a_long_step_and_ends_a_server_that_gets_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are not wrong, so the exit code lets it be started again."""
    run, limit = from_memory(Run(tmp_path, tied=True)), 3.0
    trainer, send = MemoryTrainer(run), Group.send
    run.start()

    def breaks(group: Group, announced: Announced, tensors: Any) -> None:
        send(group, announced, tensors)
        raise RuntimeError("lost")

    async def conversation() -> Turn:
        async with Servers(run.ready(), request_timeout=120, restart_timeout=5, look=0.2, run="mine") as client:
            await client.fleet.wait_ready(300)

            async def broken(version: int) -> None:
                trainer.offer(version)
                monkeypatch.setattr(Group, "send", breaks)
                with pytest.raises(WeightsGone, match="did not arrive"):
                    await trainer.update(client, limit)
                monkeypatch.setattr(Group, "send", send)

            await broken(1)
            steps, until = trainer.offers.send, time.monotonic() + 2 * limit
            monkeypatch.setattr(trainer.offers, "send", lambda: steps() if time.monotonic() > until else None)
            await trainer.update(client, limit)
            turn = await sample(client, prompts(1)[0], 0)
            await broken(2)
            return turn

    turn = asyncio.run(conversation())
    assert set(turn.versions.tolist()) == {1}
    assert run.process is not None
    assert run.process.wait(60) == 1
    assert "No version came in the next 3 s (weight_broadcast.timeout)" in run.log.read_text()
