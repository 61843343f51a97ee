"""Servers whose weights belong to one run: what another run, and an evaluation that changes nothing, can do with them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from run_servers import Servers
from server_stand_in import Stand, play

from rlx.inference.protocol import HELD, RequestRefused


def test_the_server_of_a_live_run_is_not_changed_by_another_run():
    """Else both would play with weights that are not theirs, and would not notice if the numbers of the versions are equal."""

    async def whole() -> None:
        async with Stand() as stand:
            async with Servers([stand.endpoint], run="/outputs/first") as first:
                await first.fleet.wait_ready(60)
                await first.update(Path("weights"), 5)
                async with Servers([stand.endpoint], run="/outputs/second") as second:
                    with pytest.raises(RequestRefused, match=r"belong to the run /outputs/first, .*inference\.base_url"):
                        await second.fleet.wait_ready(60)
                    with pytest.raises(RequestRefused, match="belong to the run /outputs/first"):
                        await second.update(Path("others"), 5)
                async with Servers([stand.endpoint]) as nameless:
                    with pytest.raises(RequestRefused, match="belong to the run /outputs/first"):
                        await nameless.fleet.wait_ready(60)  # it would take the server back to version 0
                    await nameless.fleet.wait_ready(60, adopt=True)
                    assert nameless.fleet.version == stand.version == 5
            async with Servers([stand.endpoint], run="/outputs/second") as second:  # the first has left
                await second.fleet.wait_ready(60)
                assert stand.version == 0

    asyncio.run(whole())


def test_a_server_is_free_when_its_run_was_not_heard_from_for_a_while_and_a_run_goes_on_saying_that_it_is_there():
    async def scene(client: Servers, stand: Stand) -> None:
        await client.fleet.wait_ready(60)
        stand.now += HELD / 2
        assert stand.holder.claim("/outputs/second") is not None
        stand.now += HELD
        assert stand.holder.claim("/outputs/second", keep=False) is None, "free"
        while stand.holder.claim("/outputs/second", keep=False) is None:  # until the next check of the first run's fleet
            await asyncio.sleep(0.02)
        assert stand.holder.run == "/outputs/first"

    play(scene, Stand(), run="/outputs/first", look=0.1)


def test_a_fleet_that_adopted_servers_never_changes_them(caplog: pytest.LogCaptureFixture):
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        first.version = second.version = 3
        await client.fleet.wait_ready(60, adopt=True)
        second.version = 4  # its owner goes on
        while "has version 4 now, and version 3 is played" not in caplog.text:
            await asyncio.sleep(0.02)
        assert (first.version, second.version) == (3, 4)

    play(scene, Stand(), Stand(), look=0.05)
