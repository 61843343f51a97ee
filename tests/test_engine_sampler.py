"""Requests to stand-in servers: which server gets one, and which tokens are used."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest
from run_servers import RUN, SAMPLING
from server_stand_in import Stand, publish, serving, until

from rlx.inference.endpoints import Endpoint
from rlx.inference.fleet import Fleet
from rlx.inference.sampler import Sampler
from rlx.inference.wire import (
    StaleServer,
    TakenServer,
)
from rlx.types import WeightVersion

pytestmark = pytest.mark.usefixtures("quick_clients")


# -- which tokens are used


async def test_a_completion_becomes_a_turn_with_the_version_of_every_token(tmp_path: Path) -> None:
    async with serving(Stand()) as (client, stand):
        await client.update(publish(tmp_path / "3", 3), 3)
        stand.holds = True
        turning = asyncio.ensure_future(client.generate([1, 2, 3], {"max_tokens": 3, "seed": 5, "temperature": 0.5}, "a"))
        await until(lambda: stand.in_flight)
        await client.update(publish(tmp_path / "4", 4), 4)
        stand.holds = False
        turn = await turning
        assert (turn.prompt_ids.tolist(), turn.completion_ids.tolist(), turn.versions.tolist()) == ([1, 2, 3], [3, 2, 1], [3, 4, 4])
        assert turn.logprobs.tolist() == pytest.approx([-3 / 7, -2 / 7, -1 / 7])
        assert (turn.prompt_ids.dtype, turn.logprobs.dtype, turn.versions.dtype) == (np.int32, np.float32, np.int32)
        assert (turn.temperature, turn.finish_reason) == (0.5, "stop")
        assert stand.requests[0]["sampling_params"]["seed"] == 5


async def test_a_server_that_restarts_has_the_version_before_its_tokens_are_used_and_loads_it_once(tmp_path: Path) -> None:
    async with serving(Stand(), look=60, verify_every=1000) as (client, stand):
        await client.update(publish(tmp_path / "2", 2), 2)
        await stand.stop()
        waiting = client.many(20)
        await until(lambda: client.sampler.away > 0.1)
        stand.calls.clear()
        await stand.start()
        turns = await asyncio.gather(*waiting)
        assert {version for turn in turns for version in turn.versions.tolist()} == {2}
        assert (stand.calls.count("rlx_load"), stand.calls.count("rlx_compare")) == (1, 1)
        away = client.sampler.away
        await asyncio.sleep(0.1)
        assert client.sampler.away == away, "the outage is over"


async def test_an_outage_ends_with_the_last_request_that_waits_for_a_server() -> None:
    """Else it would count for ever where nothing more is asked: rollouts that time out later are played again because of it."""

    async with serving(Stand(), look=60) as (client, stand):
        await stand.stop()
        (waiting,) = client.many(1)
        await until(lambda: client.sampler.away > 0.1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        away = client.sampler.away
        await asyncio.sleep(0.1)
        assert client.sampler.away == away


async def test_another_processs_sampler_follows_what_the_runs_own_knows(tmp_path: Path) -> None:
    async with serving(Stand()) as (client, _stand), Sampler([Endpoint("http://nowhere", "")], 1) as follower:
        follower.take(client.sampler.servers())
        client.sampler.listeners.append(follower.take)
        assert (await follower.generate([1, 2], SAMPLING, "a")).versions.tolist() == [0, 0]
        await client.update(publish(tmp_path / "2", 2), 2)
        assert follower.version == 2
        assert (await follower.generate([1, 2], SAMPLING, "b")).versions.tolist() == [2, 2]


async def test_a_server_that_cannot_get_the_version_again_is_an_error_that_says_why_after_the_time_for_restarts(tmp_path: Path) -> None:
    async with serving(Stand(), restart_timeout=0.4, look=60) as (client, stand):
        await client.update(publish(tmp_path / "2", 2), 2)
        await stand.stop()
        await stand.start()
        stand.errors["rlx_check"] = {"error": "no such folder"}
        with pytest.raises(StaleServer, match=r"version default, and the run has version 2.*not restored: .*no such folder"):
            await client.generate([1], SAMPLING, "a")
        assert 3 < stand.calls.count("rlx_check") < 30, "with a pause between two attempts"


async def test_a_sampler_of_another_process_waits_until_the_fleet_has_noticed_a_restart_by_itself(tmp_path: Path) -> None:
    """It has endpoint files only. The server restarts at another address."""

    file = tmp_path / "inference_0.json"

    def place(stand: Stand) -> Endpoint:
        file.write_text(json.dumps({"url": stand.url, "api_key": "key"}))
        return Endpoint(stand.url, "key", file)

    async with Stand() as first, Stand() as second:
        endpoint = place(first)
        async with Fleet([endpoint], look=0.1, run=RUN) as fleet, Sampler([endpoint], 60, run=RUN) as elsewhere:
            await fleet.wait_ready(60)
            await fleet.update(WeightVersion(version=5, kind="files", where=str(publish(tmp_path / "5", 5))))
            elsewhere.version = 5
            await first.stop()
            place(second)
            turn = await elsewhere.generate([1, 2], SAMPLING, "a")
            assert turn.versions.tolist() == [5, 5]
        await first.start()


async def test_a_sampler_whose_server_nobody_updates_says_so_in_bounded_time() -> None:
    async with Stand() as stand, Sampler([stand.endpoint], 60, restart_timeout=0.3, run=RUN) as elsewhere:
        began = time.monotonic()
        with pytest.raises(StaleServer, match="sampled with version default, and the run has version 0"):
            await elsewhere.generate([1], SAMPLING, "a")
        assert 0.3 < time.monotonic() - began < 60


async def test_tokens_of_another_runs_version_end_the_run_at_once() -> None:
    async with serving(Stand(), look=60) as (client, stand):
        stand.label = "3@ffffffff"
        with pytest.raises(TakenServer, match=r"version 3 of another run \(ffffffff; this one is 0a1b2c3d\)"):
            await client.generate([1], SAMPLING, "a")
        assert len(stand.requests) == 1


async def test_on_servers_of_others_every_label_counts_and_none_does_no_harm() -> None:
    async with serving(Stand(extension=False), adopt=True) as (client, stand):
        assert (await client.generate([1], SAMPLING, "a")).versions.tolist() == [0]
        stand.label = "7@ffffffff"
        assert (await client.generate([1], SAMPLING, "a")).versions.tolist() == [7]


async def test_an_adapter_is_the_model_of_a_request_and_a_server_that_lost_it_is_restored(tmp_path: Path) -> None:
    async with serving(Stand(), look=60) as (client, stand):
        await client.update(publish(tmp_path / "0", 0, adapter=True), 0)
        assert (await client.generate([1], SAMPLING, "a")).versions.tolist() == [0]
        await client.update(publish(tmp_path / "1", 1, adapter=True), 1)
        await stand.stop()
        await stand.start()
        assert (await client.generate([1, 2], SAMPLING, "a")).versions.tolist() == [1, 1]
        assert stand.served == [f"0@{RUN}", f"1@{RUN}"]


# -- which server


async def test_requests_go_to_the_least_loaded_server_and_equal_affinity_to_one() -> None:
    async with serving(Stand(0.05), Stand(0.05), Stand(0.05)) as (client, *stands):
        await asyncio.gather(*client.many(30))
        assert [len(stand.requests) for stand in stands] == [10, 10, 10]
        await asyncio.gather(*[client.generate([1], SAMPLING, "a", 99) for _ in range(12)])
        assert sorted(len(stand.requests) for stand in stands) == [10, 10, 22]


async def test_what_a_dead_server_had_begun_goes_elsewhere_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Stand(), Stand(), look=60) as (client, first, second):
        first.holds = True
        playing = client.many()
        await until(lambda: first.in_flight == 4)
        await first.stop()
        with monkeypatch.context() as patience:
            patience.setattr("rlx.inference.sampler.PAUSE", 3600)
            await asyncio.wait_for(asyncio.gather(*playing), 60)
        assert len(second.served) == 8
        assert client.sampler.away == 0, "no outage"
        await first.start()


@pytest.mark.parametrize("lost", [False, True])
async def test_a_server_that_is_taken_away_ends_its_requests_and_those_of_a_lost_one_go_elsewhere(lost: bool) -> None:
    async with serving(Stand(), Stand(), look=60) as (client, first, second):
        first.holds = True
        playing = client.many()
        await until(lambda: first.in_flight == len(second.served) == 4)
        client.sampler.change(endpoints=[second.endpoint], lost=[first.endpoint.key] if lost else [])
        if not lost:
            first.holds = False
        await asyncio.wait_for(asyncio.gather(*playing), 60)
        await until(lambda: (len(second.served), first.aborted) == ((8, 4) if lost else (4, 0)))
        await asyncio.gather(*client.many())
        assert len(first.served) == (0 if lost else 4), "nothing new"


def test_no_server_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"inference\.base_url"):
        Sampler([], 1)
