"""Servers that answer, but do not load a version in time: their engines hang, or the trainer's transfer to them broke."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from run_servers import Servers
from server_stand_in import Stand, play, until
from test_inference_clients import SAMPLING
from test_inference_members import IN_TURN

from rlx.inference.protocol import ServerUnreachable, WeightsGone
from rlx.types import WeightVersion


def in_memory(version: int) -> WeightVersion:
    return WeightVersion(version=version, kind="memory", where="localhost:1")


def test_a_server_that_hangs_in_an_update_is_left_out_and_serves_again_once_it_has_the_version(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        first.delay, first.stuck = 0.3, True
        playing = [asyncio.ensure_future(client.generate([1], SAMPLING, "a", affinity)) for affinity in range(8)]
        await until(lambda: first.in_flight == 4)
        first.delay = 0.0
        await asyncio.wait_for(client.update(Path("weights"), 1, timeout=1.0), 60)
        assert (client.fleet.version, client.fleet.size, first.version, second.version) == (1, 1, 0, 1)
        assert f"version 1 is served without {first.endpoint.name}" in caplog.text
        assert "took no version 1 in 1 s (weight_broadcast.timeout=1)" in caplog.text
        await asyncio.gather(*playing)
        first.stuck = False
        await until(lambda: client.fleet.size == 2)
        assert first.version == 1
        second.stuck = True  # now the other one hangs: the first is waited for like any server
        await asyncio.wait_for(client.update(Path("weights"), 2, timeout=1.0), 60)
        assert (first.version, second.version) == (2, 1)
        second.stuck = False

    play(scene, Stand(), Stand(), look=0.1)


def test_an_update_that_no_server_takes_is_an_error_that_names_them_and_the_key() -> None:
    async def scene(client: Servers, *stands: Stand) -> None:
        for stand in stands:
            stand.stuck = True
        with pytest.raises(ServerUnreachable) as caught:
            await asyncio.wait_for(client.update(Path("weights"), 1, timeout=0.5), 60)
        assert all(stand.endpoint.url in str(caught.value) for stand in stands)
        assert "took no version 1 in 0.5 s (weight_broadcast.timeout=0.5)" in str(caught.value)
        for stand in stands:
            stand.stuck = False

    play(scene, Stand(), Stand(), look=60)
    play(scene, Stand(), Stand(), look=60, manner=IN_TURN)


def test_in_turn_a_server_that_hangs_costs_its_own_time_alone() -> None:
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        first.stuck = True
        await asyncio.wait_for(client.update(Path("weights"), 1, timeout=1.0), 60)
        assert (client.fleet.size, first.version, second.version) == (1, 0, 1)
        first.stuck = False

    play(scene, Stand(), Stand(), look=60, manner=IN_TURN)


def test_a_transfer_that_breaks_at_its_own_limit_ends_the_update_before_the_fleets_does_and_the_next_one_serves_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The transfer ends `timeout` seconds after a server began to hang, which is later than `timeout` seconds after the fleet began."""

    async def scene(client: Servers, hangs: Stand, left: Stand) -> None:
        hangs.stuck, left.gone, left.delay = True, 1, 2.5
        with pytest.raises(WeightsGone):
            await asyncio.wait_for(client.fleet.update(in_memory(1), 2.0), 60)
        left.delay, began = 0.0, time.monotonic()
        await asyncio.wait_for(client.fleet.update(in_memory(1), 20.0), 60)
        assert time.monotonic() - began < 10, "it has had its time, and does not get it again"
        assert (client.fleet.version, client.fleet.size, hangs.version, left.version) == (1, 1, 0, 1)
        assert f"version 1 is served without {hangs.endpoint.name}: {hangs.endpoint.name} answers, but loads no version" in caplog.text
        hangs.stuck = False
        await until(lambda: client.fleet.size == 2)

    play(scene, Stand(), Stand(), look=0.1)


def test_time_does_not_count_while_a_server_waits_for_the_trainers_step_though_another_hangs() -> None:
    async def scene(client: Servers, hangs: Stand, waits: Stand) -> None:
        hangs.stuck, waits.asking, waits.delay = True, True, 4.0
        updating = asyncio.ensure_future(client.fleet.update(in_memory(1), 1.0))
        await until(lambda: waits.loads)
        waits.asking, waits.delay = False, 0.0
        await asyncio.wait_for(updating, 60)
        assert (client.fleet.size, hangs.version, waits.version) == (1, 0, 1)
        hangs.stuck = False

    play(scene, Stand(), Stand(), look=0.1)
