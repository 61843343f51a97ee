"""Servers that belong to another run: at the start, in the middle of a run, and when they join."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from run_servers import Servers
from server_stand_in import Stand, play, until

from rlx.inference.protocol import HELD, LEFT, RequestRefused, TakenServer
from rlx.weights.subscribe import version_at

OTHER = "/runs/b"
pytestmark = pytest.mark.usefixtures("quick_clients")


def taken_over(stand: Stand, version: int) -> None:
    """Another run claims the server as one does whose owner was not heard from, and changes its weights."""
    stand.holder.run, stand.version = OTHER, version


def test_a_run_ends_when_another_run_has_taken_a_server_on_which_it_plays() -> None:
    async def scene(client: Servers, *stands: Stand) -> None:
        await client.fleet.wait_ready(60)
        await client.update(Path("weights"), 3)
        taken_over(stands[0], 3)
        with pytest.raises(TakenServer, match=rf"belong to the run {OTHER}"):
            await asyncio.wait_for(client.fleet.held(), 30)
        stands[0].holder.run = ""
        with pytest.raises(TakenServer):  # although it is free again: its version has the right number and the wrong weights
            await client.fleet.states()

    play(scene, Stand(), run="/runs/a", look=0.02)
    play(scene, Stand(), Stand(), run="/runs/a", look=0.02)


def test_a_server_that_joins_while_it_is_another_runs_serves_once_it_is_free_and_has_the_runs_weights() -> None:
    async def whole() -> None:
        async with Stand() as first, Stand() as second:
            found = [first.endpoint]
            async with Servers(found, 60, look=0.02, find=lambda: list(found), run="/runs/a") as client:
                await client.fleet.wait_ready(60)
                await client.update(Path("weights"), 3)
                taken_over(second, 3)
                loads = second.loads
                found.append(second.endpoint)
                await asyncio.sleep(0.1)
                assert client.fleet.size == 1
                second.holder.run = ""
                await until(lambda: client.fleet.size == 2)
                assert (second.version, second.loads - loads) == (3, 1), "the other run's version 3 is not ours"

    asyncio.run(whole())


def test_the_start_waits_for_a_server_whose_run_was_killed() -> None:
    async def scene(client: Servers, stand: Stand) -> None:
        stand.holder.claim(OTHER)
        waiting = asyncio.ensure_future(client.fleet.wait_ready(60))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        stand.now = 61.0
        await waiting
        assert stand.holder.run == "/runs/a"

    play(scene, Stand(), run="/runs/a", look=60)


def test_a_server_is_soon_free_when_the_connection_of_its_run_has_closed() -> None:
    async def scene(client: Servers, stand: Stand) -> None:
        await client.fleet.wait_ready(60)
        stand.now = LEFT + 1
        assert stand.holder.claim(OTHER) is not None, "it may not have connected yet"
        await client.generate([5, 6], {"max_tokens": 2}, "r")
        stand.now = HELD - 1
        assert stand.holder.claim(OTHER) is not None, "it has a connection"
        await client.sampler.__aexit__()
        await until(lambda: stand.holder.claim(OTHER) is None)
        assert stand.holder.claim("/runs/a") is not None

    play(scene, Stand(), run="/runs/a", look=3600)


def test_the_start_does_not_wait_for_ever_for_a_server_whose_run_is_alive(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlx.inference.fleet.FREED", 0.1)

    async def scene(client: Servers, stand: Stand) -> None:
        stand.holder.claim(OTHER)
        with pytest.raises(RequestRefused, match=rf"belong to the run {OTHER}"):
            await client.fleet.wait_ready(60)
        assert "It is asked for 0.1 s" in caplog.text

    play(scene, Stand(), run="/runs/a", look=60)


def test_a_server_that_takes_long_to_restore_does_not_keep_the_others_from_being_claimed() -> None:
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        await client.fleet.wait_ready(60)
        await client.fleet.update(version_at(Path("weights"), 1))
        first.delay, first.version = 3600, 0  # it started again, and loads for a long time
        await until(lambda: first.updating)
        claims = second.claims
        await until(lambda: second.claims > claims + 2)

    play(scene, Stand(), Stand(), run="/runs/a", look=0.02)
