"""Servers that answer, but do not load a version in time: their engines hang, or the trainer's transfer to them broke."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from run_servers import Servers
from server_stand_in import Clock, Stand, play, until
from test_inference_clients import SAMPLING
from test_inference_members import IN_TURN

from rlx.inference.protocol import ServerUnreachable, WeightsGone
from rlx.types import WeightVersion

pytestmark = pytest.mark.usefixtures("quick_clients")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """By which updates are limited. A limit that a test lets pass is long enough for a machine that is slow or stops for a while."""
    made = Clock()
    monkeypatch.setattr("rlx.inference.telling.time", made)
    return made


def in_memory(version: int) -> WeightVersion:
    return WeightVersion(version=version, kind="memory", where="localhost:1")


async def all_but(client: Servers, hangs: Stand) -> None:
    """Return when the others have the version that all are told."""
    places = {server.endpoint.url: server for server in client.fleet._servers}
    await until(lambda: hangs.updating)
    await until(lambda: [url for url, server in places.items() if server.updating.locked()] == [hangs.endpoint.url])


def test_a_server_that_hangs_in_an_update_is_left_out_and_serves_again_once_it_has_the_version(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        first.holds = first.stuck = True
        playing = [asyncio.ensure_future(client.generate([1], SAMPLING, "a", affinity)) for affinity in range(8)]
        await until(lambda: first.in_flight == 4)
        first.holds = False
        updating = asyncio.ensure_future(client.update(Path("weights"), 1, timeout=30.0))
        await all_but(client, first)
        clock.passed += 31
        await asyncio.wait_for(updating, 60)
        assert (client.fleet.version, client.fleet.size, first.version, second.version) == (1, 1, 0, 1)
        assert f"version 1 is served without {first.endpoint.name}" in caplog.text
        assert "took no version 1 in 30 s (weight_broadcast.timeout=30)" in caplog.text
        await asyncio.gather(*playing)
        first.stuck = False
        await until(lambda: client.fleet.size == 2)
        assert first.version == 1
        second.stuck = True  # now the other one hangs: the first is waited for like any server
        updating = asyncio.ensure_future(client.update(Path("weights"), 2, timeout=30.0))
        await all_but(client, second)
        clock.passed += 31
        await asyncio.wait_for(updating, 60)
        assert (first.version, second.version) == (2, 1)
        second.stuck = False

    play(scene, Stand(), Stand(), look=0.05)


def test_an_update_that_no_server_takes_is_an_error_that_names_them_and_the_key() -> None:
    async def scene(client: Servers, *stands: Stand) -> None:
        for stand in stands:
            stand.stuck = True
        with pytest.raises(ServerUnreachable) as caught:
            await asyncio.wait_for(client.update(Path("weights"), 1, timeout=0.1), 60)
        assert all(stand.endpoint.url in str(caught.value) for stand in stands)
        assert "took no version 1 in 0.1 s (weight_broadcast.timeout=0.1)" in str(caught.value)
        for stand in stands:
            stand.stuck = False

    play(scene, Stand(), Stand(), look=60)
    play(scene, Stand(), Stand(), look=60, manner=IN_TURN)


def test_in_turn_a_server_that_hangs_costs_its_own_time_alone(clock: Clock) -> None:
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        first.stuck = True
        updating = asyncio.ensure_future(client.update(Path("weights"), 1, timeout=30.0))
        await all_but(client, first)
        clock.passed += 31
        await asyncio.wait_for(updating, 60)
        assert (client.fleet.size, first.version, second.version) == (1, 0, 1)
        first.stuck = False

    play(scene, Stand(), Stand(), look=60, manner=IN_TURN)


def test_a_transfer_that_breaks_at_its_own_limit_ends_the_update_before_the_fleets_does_and_the_next_one_serves_the_rest(
    caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    """The transfer ends `timeout` seconds after a server began to hang, which is later than `timeout` seconds after the fleet began."""

    async def scene(client: Servers, hangs: Stand, left: Stand) -> None:
        await client.update(Path("weights"), 1)
        hangs.stuck = left.stuck = True
        updating = asyncio.ensure_future(client.fleet.update(in_memory(2), 20.0))
        await until(lambda: hangs.updating and left.updating)
        clock.passed += 25
        await asyncio.sleep(0.2)  # the fleet looks at its limit several times
        left.gone, left.stuck = 1, False
        while not updating.done():
            clock.passed += 2
            await asyncio.sleep(0.05)
        assert isinstance(updating.exception(), WeightsGone)
        began = time.monotonic()
        await asyncio.wait_for(client.fleet.update(in_memory(2), 20.0), 60)
        assert time.monotonic() - began < 10, "it has had its time, and does not get it again"
        assert (client.fleet.version, client.fleet.size, hangs.version, left.version) == (2, 1, 1, 2)
        assert f"version 2 is served without {hangs.endpoint.name}: {hangs.endpoint.name} answers, but loads no version" in caplog.text
        hangs.stuck = False
        await until(lambda: client.fleet.size == 2)

    play(scene, Stand(), Stand(), look=0.05)


def test_a_server_that_is_late_at_version_0_is_not_waited_for_again_until_it_has_started_anew(clock: Clock) -> None:
    """Its version cannot say whether it has: it is 0 before and after."""

    async def scene(client: Servers, first: Stand, hangs: Stand) -> None:
        known = client.fleet._servers[1]
        hangs.stuck = True
        for version in (1, 2):
            updating = asyncio.ensure_future(client.update(Path("weights"), version, timeout=30.0))
            if version == 1:
                await all_but(client, hangs)
                clock.passed += 31
            await asyncio.wait_for(updating, 60)
            asked = await client.fleet._state(known)
            assert (asked.version, known.late, known.gone, first.version) == (0, True, True, version)
            known.serves = True  # it is told the next version like any other
        hangs.start, hangs.stuck = "2", False
        await client.fleet._state(known)
        assert not known.gone

    play(scene, Stand(), Stand(), look=60)


def test_time_does_not_count_while_a_server_waits_for_the_trainers_step_though_another_hangs(clock: Clock) -> None:
    async def scene(client: Servers, hangs: Stand, waits: Stand) -> None:
        hangs.stuck = waits.stuck = waits.asking = True
        known = client.fleet._servers[1]
        updating = asyncio.ensure_future(client.fleet.update(in_memory(1), 10.0))
        await until(lambda: hangs.updating and waits.updating and known.asks)
        for _ in range(3):
            clock.passed += 25  # more than both limits
            await asyncio.sleep(0.1)
        assert not updating.done()
        waits.stuck = waits.asking = False
        await all_but(client, hangs)
        await until(lambda: not known.asks)
        clock.passed += 25
        await asyncio.wait_for(updating, 60)
        assert (client.fleet.size, hangs.version, waits.version) == (1, 0, 1)
        hangs.stuck = False

    play(scene, Stand(), Stand(), look=0.05)
