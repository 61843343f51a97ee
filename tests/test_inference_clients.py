"""Sampler and fleet against small HTTP servers that follow the protocol and fail on demand."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
from run_servers import Servers
from server_stand_in import Clock, Stand, play, until

from rlx.inference.endpoints import Endpoint
from rlx.inference.fleet import Fleet
from rlx.inference.protocol import (
    InferenceError,
    RequestRefused,
    ServerUnreachable,
    StaleServer,
    UpdateRefused,
    WeightsGone,
)
from rlx.inference.sampler import Sampler
from rlx.types import WeightVersion

SAMPLING = {"max_tokens": 3}
pytestmark = pytest.mark.usefixtures("quick_clients")


def test_an_answer_becomes_a_turn_with_a_version_for_every_token():
    async def scene(client: Servers, stand: Stand) -> None:
        turn = await client.generate([1, 2, 3], {"max_tokens": 3, "seed": 5, "temperature": 0.5}, "a")
        assert turn.prompt_ids.tolist() == [1, 2, 3]
        assert turn.completion_ids.tolist() == [3, 2, 1]
        assert turn.logprobs.tolist() == pytest.approx([-3 / 7, -2 / 7, -1 / 7])
        assert turn.versions.tolist() == [0, 1, 1]
        assert (turn.prompt_ids.dtype, turn.logprobs.dtype, turn.versions.dtype) == (np.int32, np.float32, np.int32)
        assert stand.requests[0].sampling.seed == 5

    play(scene, Stand())


def test_requests_go_to_the_least_loaded_server_and_equal_affinity_to_one():
    async def scene(client: Servers, *stands: Stand) -> None:
        await asyncio.gather(*[client.generate([1], SAMPLING, "a", affinity) for affinity in range(30)])
        assert [len(stand.requests) for stand in stands] == [10, 10, 10]
        await asyncio.gather(*[client.generate([1], SAMPLING, "a", 99) for _ in range(12)])
        assert sorted(len(stand.requests) for stand in stands) == [10, 10, 22]

    play(scene, Stand(0.05), Stand(0.05), Stand(0.05))


def test_an_update_reaches_all_servers_at_once_and_statistics_are_of_all():
    async def scene(client: Servers, *stands: Stand) -> None:
        for stand in stands:
            stand.waiting, stand.stuck = 2, True
        updating = asyncio.ensure_future(client.update(Path("weights"), 3))
        await until(lambda: all(stand.updating for stand in stands))
        for stand in stands:
            stand.stuck = False
        await updating
        assert client.fleet.version == 3
        assert await client.fleet.versions() == [3, 3]
        sums = {"perf/servers": 2, "perf/running": 0, "perf/waiting": 4, "perf/preemptions": 6}
        assert await client.fleet.stats() == {"perf/kv_cache_usage": 0.25} | sums

    play(scene, Stand(), Stand())


def test_an_update_that_one_server_refuses_is_an_error_and_no_new_version():
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        second.refuse = "checksum"
        with pytest.raises(UpdateRefused, match=f"{second.port}: checksum"):
            await client.update(Path("weights"), 1)
        assert client.fleet.version == 0

    play(scene, Stand(), Stand())


def test_an_update_that_takes_too_long_names_the_key():
    async def scene(client: Servers, stand: Stand) -> None:
        with pytest.raises(ServerUnreachable, match=r"weight_broadcast\.timeout"):
            await client.update(Path("weights"), 1, timeout=0.1)

    play(scene, Stand(5))


def test_a_server_that_starts_again_is_given_the_version_before_it_serves():
    async def scene(client: Servers, stand: Stand) -> None:
        await client.update(Path("weights"), 2)
        await stand.__aexit__()
        waiting = [asyncio.create_task(client.generate([1, 2], SAMPLING, "a", affinity)) for affinity in range(5)]
        await asyncio.sleep(0.15)
        stand.version = 0
        await stand.__aenter__()
        await asyncio.gather(*waiting)
        assert stand.served == [2] * 5

    play(scene, Stand())


def test_a_server_that_starts_again_when_the_weights_are_gone_is_an_error():
    async def scene(client: Servers, stand: Stand) -> None:
        await client.update(Path("weights"), 2)
        stand.version, stand.refuse = 0, "no such folder"
        with pytest.raises(StaleServer, match=r"version 2: .*no such folder"):
            await client.generate([1], SAMPLING, "a")

    play(scene, Stand())


def test_a_server_that_starts_again_elsewhere_is_found_by_its_file(tmp_path: Path):
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        file = tmp_path / "inference_0.json"

        def publish(stand: Stand) -> None:
            file.write_text(json.dumps({"url": stand.endpoint.url, "api_key": "key"}))

        publish(first)
        async with Servers([Endpoint(first.endpoint.url, "key", file)], request_timeout=60) as alone:
            await alone.generate([1], SAMPLING, "a")
            await first.__aexit__()
            publish(second)
            await alone.generate([1], SAMPLING, "b")
        assert [request.request_id for request in second.requests] == ["b"]
        await first.__aenter__()

    play(scene, Stand(), Stand())


def test_a_server_that_starts_again_at_the_same_address_with_another_key_is_asked_with_that_key(tmp_path: Path):
    """It accepts connections before its file has the new key."""

    async def whole() -> None:
        file = tmp_path / "inference_0.json"
        async with Stand() as stand:
            record = {"url": stand.endpoint.url, "api_key": "key"}
            file.write_text(json.dumps(record))
            async with Servers([Endpoint(stand.endpoint.url, "key", file)], request_timeout=60) as client:
                await client.update(Path("weights"), 2)
                await client.generate([1], SAMPLING, "a")
                await stand.__aexit__()
                file.unlink()
                stand.version, stand.key = 0, "another"
                await stand.__aenter__()
                waiting = asyncio.create_task(client.generate([1, 2], SAMPLING, "b"))
                await until(lambda: stand.refused > 4)
                file.write_text(json.dumps(record | {"api_key": "another"}))
                await waiting
                assert stand.served == [2, 2]

    asyncio.run(whole())


def test_requests_move_away_from_a_server_that_does_not_answer():
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        await asyncio.gather(*[client.generate([1], SAMPLING, "a", affinity) for affinity in range(8)])
        await first.__aexit__()
        await asyncio.gather(*[client.generate([1], SAMPLING, "a", affinity) for affinity in range(8)])
        assert len(second.served) == 12
        await first.__aenter__()

    play(scene, Stand(0.02), Stand(0.02))


def test_a_server_that_stays_away_is_an_error_in_bounded_time():
    async def scene(client: Servers, stand: Stand) -> None:
        await stand.__aexit__()
        started = time.monotonic()
        with pytest.raises(ServerUnreachable, match=f"{stand.port} does not answer"):
            await client.generate([1], SAMPLING, "a")
        assert 0.2 < time.monotonic() - started < 60
        with pytest.raises(ServerUnreachable, match=r"not ready after 0\.2 s"):
            await client.fleet.wait_ready(0.2)
        await stand.__aenter__()

    play(scene, Stand(), restart_timeout=0.2)


def test_a_request_that_takes_too_long_names_the_key_and_is_aborted():
    async def scene(client: Servers, stand: Stand) -> None:
        while not stand.requests:  # on a busy machine the time may be over before the connection is open
            with pytest.raises(ServerUnreachable, match=r"inference\.request_timeout"):
                await client.generate([1], SAMPLING, "a")
        await until(lambda: (stand.in_flight, stand.aborted) == (0, len(stand.requests)))

    play(scene, Stand(30), request_timeout=0.2)


def test_waiting_takes_servers_of_an_earlier_run_back_to_the_initial_model():
    async def scene(client: Servers, stand: Stand) -> None:
        stand.version = 17
        await client.fleet.wait_ready(60)
        assert stand.version == 0

    play(scene, Stand())


def test_no_server_at_all_is_refused():
    with pytest.raises(ValueError, match=r"inference\.base_url"):
        Sampler([], 1)
    assert issubclass(StaleServer, InferenceError)


def test_requests_of_one_moment_share_a_message_and_one_connection():
    async def scene(client: Servers, stand: Stand) -> None:
        await client.generate([1], SAMPLING, "a")  # opens the connection
        turns = await asyncio.gather(*[client.generate([n, n + 1], SAMPLING, "a") for n in range(64)])
        assert [turn.completion_ids.tolist() for turn in turns] == [[n + 1, n] for n in range(64)]
        assert (stand.messages, len(stand.transports)) == (2, 1)

    play(scene, Stand())


def test_a_wrong_key_is_said_at_once():
    async def whole() -> None:
        async with Stand() as stand, Servers([Endpoint(stand.endpoint.url, "guess")], request_timeout=60) as client:
            with pytest.raises(RequestRefused, match="check the API key"):
                await client.generate([1], SAMPLING, "a")

    asyncio.run(whole())


def test_a_sampler_of_another_process_waits_until_the_fleet_has_noticed_by_itself(tmp_path: Path):
    """It has only endpoint files. The server restarts with version 0 at another address. The sampler accepts no token of version 0."""

    async def whole() -> None:
        file = tmp_path / "inference_0.json"

        def publish(stand: Stand) -> Endpoint:
            file.write_text(json.dumps({"url": stand.endpoint.url, "api_key": "key"}))
            return Endpoint(stand.endpoint.url, "key", file)

        async with Stand() as first, Stand() as second:
            endpoint = publish(first)
            async with Fleet([endpoint], look=0.1) as fleet, Sampler([endpoint], request_timeout=60) as elsewhere:
                await fleet.update(WeightVersion(version=5, kind="files", where="weights"))
                elsewhere.version = 5
                await first.__aexit__()
                publish(second)
                turn = await elsewhere.generate([1, 2], SAMPLING, "a")
                assert turn.versions[0] == 5
                assert second.served == [5]
            await first.__aenter__()

    asyncio.run(whole())


def test_a_sampler_whose_server_nobody_brings_up_to_date_says_so_in_bounded_time():
    async def whole() -> None:
        async with Stand() as stand, Sampler([stand.endpoint], request_timeout=60, restart_timeout=0.2) as elsewhere:
            elsewhere.version = 2
            started = time.monotonic()
            with pytest.raises(StaleServer, match="older version than 2 and was not updated"):
                await elsewhere.generate([1], SAMPLING, "a")
            assert 0.2 < time.monotonic() - started < 60
            assert stand.served == []

    asyncio.run(whole())


def test_the_fleet_goes_on_looking_when_a_server_cannot_be_restored(caplog: pytest.LogCaptureFixture):
    async def scene(client: Servers, stand: Stand) -> None:
        await client.update(Path("weights"), 2)
        stand.version, stand.refuse = 0, "no such folder"
        await until(lambda: "no such folder" in caplog.text)
        tried = len(stand.updates)
        await until(lambda: len(stand.updates) > tried + 2)
        assert [record.getMessage().count("no such folder") for record in caplog.records].count(1) == 1, "logged once"
        stand.refuse = None
        await until(lambda: stand.version == 2)

    play(scene, Stand(), look=0.05)


def test_weights_that_left_the_trainers_memory_are_an_error_of_their_own_and_a_server_is_restored_from_where_they_are_now():
    offered, written = WeightVersion(version=1, kind="memory", where="host:1"), WeightVersion(version=1, kind="files", where="step_1")

    async def scene(client: Servers, stand: Stand) -> None:
        stand.gone = 1
        with pytest.raises(WeightsGone, match="the trainer has another version"):
            await client.fleet.update(offered)
        assert client.fleet.version == 0
        await client.fleet.update(offered, 7.0)
        assert (stand.updates[-1]["kind"], stand.updates[-1]["together"], stand.updates[-1]["timeout"]) == ("memory", 1, 7.0)
        client.fleet.look_up = {1: written}.get
        stand.version, stand.gone = 0, 1
        await until(lambda: stand.version == 1)
        assert [update["weight_dir"] for update in stand.updates[-2:]] == ["step_1", "step_1"], "asked again"

    play(scene, Stand(), look=0.05)


def test_time_in_which_the_servers_wait_for_the_trainers_step_does_not_count(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr("rlx.inference.telling.time", clock)

    async def scene(client: Servers, *stands: Stand) -> None:
        def all_of(**state: bool) -> None:
            for stand in stands:
                vars(stand).update(state)

        async def step() -> None:
            """Let the time that an update has pass several times."""
            await until(lambda: all(stand.updating for stand in stands))
            for _ in range(3):
                clock.passed += 21
                await asyncio.sleep(0.1)

        all_of(asking=True, stuck=True)
        await until(lambda: all(server.asks for server in client.fleet._servers))
        updating = asyncio.ensure_future(client.update(Path("weights"), 1, timeout=20.0))
        await step()
        assert not updating.done()
        all_of(stuck=False)
        await updating
        all_of(asking=False, stuck=True)
        await until(lambda: not any(server.asks for server in client.fleet._servers))
        updating = asyncio.ensure_future(client.update(Path("weights"), 2, timeout=20.0))
        await step()
        with pytest.raises(ServerUnreachable, match=r"weight_broadcast\.timeout"):
            await updating
        all_of(stuck=False)

    play(scene, Stand(), Stand(), look=0.05)


def test_a_server_that_missed_the_trainer_is_left_out_once_another_has_the_version():
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        second.gone = 1
        await client.update(Path("weights"), 1)
        assert (client.fleet.version, client.fleet.size, second.version) == (1, 1, 0)
        await until(lambda: client.fleet.size == 2)
        assert second.version == 1

    play(scene, Stand(), Stand(), look=0.1)


def test_of_several_servers_that_fail_at_once_one_failure_is_raised_and_no_group_of_exceptions():
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        first.refuse = second.refuse = "no space left on device"
        with pytest.raises(UpdateRefused, match="no space left on device") as raised:
            await client.update(Path("weights"), 1)
        assert "ExceptionGroup" not in "".join(traceback.format_exception(raised.value))

    play(scene, Stand(), Stand())
