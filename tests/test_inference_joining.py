"""Servers that come to a run whose versions travel in memory, while the trainer sends nothing between two updates."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from run_servers import Servers
from server_stand_in import Stand, play, until

from rlx.types import WeightVersion

pytestmark = pytest.mark.usefixtures("quick_clients")


def in_memory(version: int) -> WeightVersion:
    return WeightVersion(version=version, kind="memory", where="localhost:1")


@dataclass
class ShardedTrainer:
    """Sends right after a step and never within one, and its next batch is always there: as `weights.memory.Offers` then does."""

    version: int = 0
    failed: set[int] = field(default_factory=set)  # versions for which a server that was told did not call
    calls: list[tuple[int, int, asyncio.Future[bool]]] = field(default_factory=list)  # version, together, whether it was sent

    async def call(self, version: int, together: int) -> bool:
        answer = asyncio.get_running_loop().create_future()
        self.calls.append((version, together, answer))
        return await answer

    def offer(self, version: int) -> None:
        self.version = version
        self._refuse()

    async def send_soon(self) -> None:
        """To the servers that call together."""
        await until(lambda: self.calls)
        for _ in range(50):
            self._refuse()
            if len(self.calls) + (self.version in self.failed) >= max((together for _, together, _ in self.calls), default=1):
                break
            await asyncio.sleep(0.01)
        for _, _, answer in self.calls:
            answer.set_result(True)
        self.calls.clear()

    def _refuse(self) -> None:
        for version, _, answer in self.calls:
            if version != self.version:
                answer.set_result(False)
        self.calls = [call for call in self.calls if not call[2].done()]


class Asks(Stand):
    """A server that asks this trainer for its versions."""

    def __init__(self, trainer: ShardedTrainer) -> None:
        super().__init__()
        self.trainer, self.fails_always = trainer, False

    async def update(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if self.fails_always:
            self.trainer.failed.add(asked["version"])
            return web.json_response({"error": "no"}, status=422)
        if asked["version"] != self.version and not await self.trainer.call(asked["version"], asked["together"]):
            return web.json_response({"error": "the trainer has another version"}, status=410)
        return await super().update(request)


async def step(client: Servers, trainer: ShardedTrainer) -> None:
    trainer.offer(trainer.version + 1)
    updating = asyncio.ensure_future(client.fleet.update(in_memory(trainer.version), 20.0))
    await trainer.send_soon()
    await updating
    await asyncio.sleep(0.15)  # the step: a few looks at the servers


async def restarted(client: Servers, stand: Stand) -> None:
    await stand.__aexit__()
    await until(lambda: client.fleet.size == 1)
    stand.version = 0
    await stand.__aenter__()


def test_a_server_that_comes_in_a_step_gets_the_next_version_with_the_others() -> None:
    trainer = ShardedTrainer()

    async def scene(client: Servers, serves: Asks, comes: Asks) -> None:
        await step(client, trainer)
        await restarted(client, comes)
        await until(lambda: trainer.calls)  # it asks within the step, and is refused after it
        for _ in range(4):
            await step(client, trainer)
        await until(lambda: client.fleet.size == 2)  # the trainer sends nothing more
        assert (comes.version, serves.version) == (5, 5)

    play(scene, Asks(trainer), Asks(trainer), look=0.03, restart_timeout=60.0)


def test_an_update_needs_no_server_that_does_not_serve_yet_and_what_such_a_server_refuses_is_no_error() -> None:
    trainer = ShardedTrainer()

    async def scene(client: Servers, serves: Asks, comes: Asks) -> None:
        await step(client, trainer)
        await restarted(client, comes)
        comes.fails_always = True
        for _ in range(3):
            await step(client, trainer)
        assert (client.fleet.size, comes.version, serves.version) == (1, 0, 4)
        assert trainer.failed >= {2, 3, 4}, "it was told, too"

    play(scene, Asks(trainer), Asks(trainer), look=0.03)


def test_a_server_that_has_the_version_before_the_others_is_not_taken_for_one_of_another_run() -> None:
    """Such a server would be set back to version 0."""
    trainer = ShardedTrainer()

    async def scene(client: Servers, serves: Asks, comes: Asks) -> None:
        await step(client, trainer)
        await restarted(client, comes)
        await until(lambda: trainer.calls)
        serves.stuck = True  # after it was sent
        trainer.offer(2)
        updating = asyncio.ensure_future(client.fleet.update(in_memory(2), 20.0))
        await trainer.send_soon()
        await until(lambda: client.fleet.size == 2)
        assert (comes.version, updating.done()) == (2, False)
        serves.stuck = False
        await updating
        assert (client.fleet.size, comes.version, serves.version) == (2, 2, 2)

    play(scene, Asks(trainer), Asks(trainer), look=0.03, run="a run")
