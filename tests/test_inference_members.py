"""Servers that join, leave, die, hang or fail for a while, beside others that serve."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from run_servers import Servers
from server_stand_in import Stand, play, until
from test_inference_clients import SAMPLING

from rlx.config.schema import Config
from rlx.inference.endpoints import Endpoint, present_servers
from rlx.inference.protocol import InferenceError, RequestRefused, ServerUnreachable
from rlx.inference.telling import Manner
from rlx.paths import RunPaths

IN_TURN = Manner(in_turn=True)
pytestmark = pytest.mark.usefixtures("quick_clients")


def versions(stand: Stand) -> set[int]:
    return set(stand.served)


def publish(paths: RunPaths, name: str, stand: Stand) -> Path:
    file = paths.endpoints / f"inference_{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"url": stand.endpoint.url, "api_key": "key"}))
    return file


def config_with(*urls: str) -> Config:
    config = Config(max_steps=1, seq_len=8)
    config.inference.base_url = list(urls)
    return config


def test_a_server_whose_file_appears_is_given_the_version_then_serves_and_leaves_with_its_file(tmp_path: Path) -> None:
    async def whole() -> None:
        paths = RunPaths(tmp_path)
        async with Stand(0.02) as first, Stand(0.02) as second:
            found = [Endpoint(first.endpoint.url, "key", publish(paths, "0", first))]
            second.version = 17  # it served another run
            async with Servers(found, 60, look=0.05, find=lambda: present_servers(config_with(), paths)) as client:
                await client.update(Path("weights"), 3)
                file = publish(paths, "extra", second)
                await until(lambda: client.fleet.size == 2)
                assert second.version == 3
                await asyncio.gather(*[client.generate([1], SAMPLING, "a", affinity) for affinity in range(8)])
                assert (len(first.served), len(second.served), versions(second)) == (4, 4, {3})
                second.holds = True
                staying = [asyncio.ensure_future(client.generate([1], SAMPLING, "a", affinity)) for affinity in range(8)]
                await until(lambda: second.in_flight == 4)
                file.unlink()
                await until(lambda: client.fleet.size == 1)
                second.holds = False
                await asyncio.gather(*staying)
                assert len(second.served) == 8, "what it had begun, it ends"
                await asyncio.gather(*[client.generate([1], SAMPLING, "a", affinity) for affinity in range(8)])
                assert len(second.served) == 8
                await client.update(Path("weights"), 4)
                assert (first.version, second.version) == (4, 3)

    asyncio.run(whole())


def test_a_server_that_was_taken_away_and_is_back_first_ends_what_it_had_begun(tmp_path: Path) -> None:
    """It goes back to the initial weights when it joins. What still runs there would get tokens of version 0."""

    async def whole() -> None:
        paths = RunPaths(tmp_path)
        async with Stand(0.02) as first, Stand(0.02) as second:
            found = [Endpoint(each.endpoint.url, "key", publish(paths, name, each)) for name, each in (("0", first), ("1", second))]
            async with Servers(found, 60, look=0.05, find=lambda: present_servers(config_with(), paths), run="a run") as client:
                await client.update(Path("weights"), 3)
                second.holds = True
                staying = [asyncio.ensure_future(client.generate([1], SAMPLING, "a", affinity)) for affinity in range(8)]
                await until(lambda: second.in_flight == 4)
                Path(found[1].key).unlink()
                await until(lambda: client.fleet.size == 1)
                publish(paths, "1", second)
                claims = second.claims
                await until(lambda: second.claims > claims + 2)
                second.holds = False
                await asyncio.gather(*staying)
                assert versions(second) == {3}
                await until(lambda: client.fleet.size == 2)

    asyncio.run(whole())


def test_a_server_with_another_model_does_not_join_at_version_0_and_is_refused_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def whole() -> None:
        paths = RunPaths(tmp_path)
        async with Stand() as first, Stand() as second:
            found = [Endpoint(first.endpoint.url, "key", publish(paths, "0", first))]
            second.identity = "b"
            async with Servers(found, 60, look=0.05, find=lambda: present_servers(config_with(), paths)) as client:
                await client.fleet.wait_ready(60)
                publish(paths, "extra", second)
                await until(lambda: "does not join at version 0" in caplog.text)
                await asyncio.gather(*[client.generate([1], SAMPLING, "a", affinity) for affinity in range(8)])
                assert (client.fleet.size, second.served) == (1, [])
                second.identity = "a"  # it was started again with the run's model
                await until(lambda: client.fleet.size == 2)
                second.identity = "b"
                await client.update(Path("weights"), 1)
                assert client.fleet.size == 2, "the version's weights were loaded, and compared with what was trained"
            async with Servers([first.endpoint, second.endpoint], 60) as client:
                with pytest.raises(InferenceError, match="began with other weights than"):
                    await client.fleet.wait_ready(60)

    asyncio.run(whole())


def test_the_last_server_is_never_removed_and_a_file_that_cannot_be_read_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def whole() -> None:
        paths = RunPaths(tmp_path)
        find = lambda: present_servers(config_with(), paths)  # noqa: E731
        async with Stand() as stand, Servers([stand.endpoint], 60, look=0.02, find=find) as client:
            await asyncio.sleep(0.1)
            await client.generate([1], SAMPLING, "a")
        file = publish(paths, "0", stand)
        (paths.endpoints / "inference_1.json").write_text("{")
        assert present_servers(config_with("http://a:1"), paths) == [Endpoint("http://a:1", ""), Endpoint(stand.endpoint.url, "key", file)]
        assert "inference_1.json does not describe an inference server" in caplog.text

    asyncio.run(whole())


def test_requests_on_a_server_that_dies_go_elsewhere_at_once_and_updates_do_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        first.holds = True
        playing = [asyncio.ensure_future(client.generate([1], SAMPLING, "a", affinity)) for affinity in range(8)]
        await until(lambda: first.in_flight == 4)
        await first.__aexit__()
        first.holds = False
        with monkeypatch.context() as patience:
            patience.setattr("rlx.inference.sampler.PAUSE", 3600)  # there is no pause before another server is asked
            await asyncio.wait_for(asyncio.gather(*playing), 60)
        await asyncio.wait_for(client.update(Path("weights"), 1), 60)
        assert (client.fleet.version, second.version) == (1, 1)
        assert client.fleet.size == 1
        assert (await client.fleet.stats())["perf/servers"] == 1
        first.version = 0
        first.served.clear()  # what it answered before it died
        await first.__aenter__()
        await until(lambda: client.fleet.size == 2)
        assert first.version == 1
        await asyncio.gather(*[client.generate([1], SAMPLING, "a", affinity) for affinity in range(20, 28)])
        assert versions(first) == {1}

    play(scene, Stand(0.02), Stand(0.02), look=0.05)


def test_requests_wait_while_all_of_several_servers_are_gone_and_are_answered_by_the_first_that_is_back() -> None:
    """Both are found gone by checks that run side by side. The last one is never left out, so requests always have one to ask."""

    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        await client.update(Path("weights"), 1)
        first.delay = second.delay = 60.0
        playing = [asyncio.ensure_future(client.generate([1], SAMPLING, "a", affinity)) for affinity in range(8)]
        await until(lambda: first.in_flight == second.in_flight == 4)
        for stand in (first, second):
            await stand.__aexit__()
        await until(lambda: all(server.gone for server in client.fleet._servers))
        await asyncio.sleep(0.2)  # several looks
        assert not any(one.done() for one in playing)
        second.delay = 0.0
        await second.__aenter__()
        await asyncio.wait_for(asyncio.gather(*playing, client.generate([1], SAMPLING, "b")), 60)
        assert versions(second) == {1}
        await first.__aenter__()

    play(scene, Stand(), Stand(), look=0.05)


def test_servers_in_turn_are_updated_one_at_a_time() -> None:
    async def scene(client: Servers, *stands: Stand) -> None:
        updating, at_once, old = asyncio.ensure_future(client.update(Path("weights"), 1)), [], []
        while not updating.done():
            at_once.append(sum(stand.updating for stand in stands))
            old.append(sum(stand.version == 0 for stand in stands))
            await asyncio.sleep(0.002)
        await updating
        assert set(at_once) <= {0, 1}
        assert {3, 2, 1} <= set(old), "two serve while the third is updated"
        assert client.fleet.version == 1
        assert {update["together"] for stand in stands for update in stand.updates} == {1}

    play(scene, Stand(0.1), Stand(0.1), Stand(0.1), manner=IN_TURN)


def test_an_update_in_turn_does_not_wait_for_a_server_that_dies_and_waits_for_any_if_all_are_gone() -> None:
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        await first.__aexit__()  # noticed in its own turn
        await asyncio.wait_for(client.update(Path("weights"), 1), 60)
        assert (client.fleet.version, client.fleet.size, second.version) == (1, 1, 1)
        await first.__aenter__()
        await until(lambda: client.fleet.size == 2)
        for stand in (first, second):
            await stand.__aexit__()
        updating = asyncio.ensure_future(client.update(Path("weights"), 2))
        await until(lambda: all(server.gone for server in client.fleet._servers))
        await asyncio.sleep(0.2)  # several looks
        assert not updating.done()
        await first.__aenter__()
        await asyncio.wait_for(updating, 60)
        assert (client.fleet.version, first.version, second.version) == (2, 2, 1)

    play(scene, Stand(0.05), Stand(0.05), manner=IN_TURN, look=0.05)


def test_requests_on_a_server_that_hangs_go_elsewhere_and_it_serves_again_when_it_answers() -> None:
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        await client.update(Path("weights"), 1)
        first.delay, first.hangs = 3600, True
        playing = [asyncio.ensure_future(client.generate([1], SAMPLING, "a", affinity)) for affinity in range(8)]
        await asyncio.wait_for(asyncio.gather(*playing), 60)
        assert len(second.served) == 8
        await client.update(Path("weights"), 2)
        assert (client.fleet.size, second.version) == (1, 2)
        first.delay, first.hangs = 0, False
        await until(lambda: client.fleet.size == 2)
        assert first.version == 2

    play(scene, Stand(), Stand(), look=0.1, hung=1.0)


def test_a_server_that_fails_requests_and_updates_for_a_while_costs_nothing_but_time() -> None:
    async def scene(client: Servers, stand: Stand) -> None:
        stand.fails = 2
        turn = await client.generate([1, 2], SAMPLING, "a")
        assert turn.completion_ids.tolist() == [2, 1]
        stand.fails = 1
        await client.update(Path("weights"), 1)
        assert stand.version == 1

    play(scene, Stand())


def test_a_request_that_every_server_fails_is_an_error_in_bounded_time() -> None:
    async def scene(client: Servers, *stands: Stand) -> None:
        for stand in stands:
            stand.fails = 1000
        started = time.monotonic()
        with pytest.raises(InferenceError, match=r"\(500\): out of luck"):
            await client.generate([1], SAMPLING, "a")
        assert 0.2 < time.monotonic() - started < 60
        assert sum(len(stand.requests) for stand in stands) < 10, "with a pause between two attempts"

    play(scene, Stand(), Stand(), restart_timeout=0.2)


def test_a_server_that_cannot_load_the_version_is_left_to_the_others() -> None:
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        await client.update(Path("weights"), 2)
        first.version, first.refuse = 0, "no such folder"
        await asyncio.gather(*[client.generate([1], SAMPLING, "a", affinity) for affinity in range(8)])
        assert (len(first.served), versions(second)) == (0, {2})

    play(scene, Stand(), Stand(), look=60)


def test_metrics_of_the_servers_do_not_wait_for_one_that_hangs() -> None:
    async def scene(client: Servers, first: Stand, second: Stand) -> None:
        first.hangs = True
        assert (await asyncio.wait_for(client.fleet.stats(), 60))["perf/servers"] == 1
        with pytest.raises(ServerUnreachable, match=r"did not report its devices in 0\.5 s"):
            await asyncio.wait_for(client.fleet.devices(), 60)

    play(scene, Stand(), Stand(), look=60, hung=0.5)


def test_a_server_whose_address_is_nonsense_does_not_end_the_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def whole() -> None:
        paths = RunPaths(tmp_path)
        async with Stand() as stand, Stand() as late:
            found = [Endpoint(stand.endpoint.url, "key", publish(paths, "0", stand))]
            async with Servers(found, 60, look=0.02, find=lambda: present_servers(config_with(), paths)) as client:
                (paths.endpoints / "inference_bad.json").write_text('{"url": "localhost:8000", "api_key": "key"}')
                await until(lambda: "does not answer" in caplog.text)
                publish(paths, "late", late)
                await until(lambda: client.fleet.size == 2)

    asyncio.run(whole())


def test_a_parameter_that_cannot_be_sent_fails_its_own_request_alone() -> None:
    async def scene(client: Servers, stand: Stand) -> None:
        good = asyncio.ensure_future(client.generate([1, 2], SAMPLING, "a"))
        with pytest.raises(RequestRefused, match="cannot be sent"):
            await client.generate([1], {**SAMPLING, "top_k": 2**70}, "b")
        assert (await good).completion_ids.tolist() == [2, 1]

    play(scene, Stand(0.05))


@pytest.mark.slow
def test_requests_and_updates_wait_for_a_lone_server_longer_than_their_own_limits_and_that_time_is_counted() -> None:
    async def scene(client: Servers, stand: Stand) -> None:
        await client.update(Path("weights"), 1)
        assert client.sampler.away == 0.0
        asked = asyncio.ensure_future(client.generate([1], SAMPLING, "a"))
        await until(lambda: stand.in_flight)
        await stand.__aexit__()
        updating = asyncio.ensure_future(client.update(Path("weights"), 2, timeout=60))
        await until(lambda: client.fleet._limit)
        at_first = client.fleet._limit.end
        await until(lambda: client.sampler.away > 2)
        assert not asked.done()
        assert not updating.done()
        assert client.fleet._limit.end > at_first + 1, "the outage does not count"
        stand.version, stand.delay = 0, 0.0
        await stand.__aenter__()
        await asyncio.gather(asked, updating)
        assert stand.version == 2
        assert stand.served[-1] >= 1
        away = client.sampler.away
        await asyncio.sleep(0.1)
        assert client.sampler.away == away, "the outage is over"

    play(scene, Stand(0.3), request_timeout=2, restart_timeout=300, look=60)


def test_the_time_in_which_a_server_worked_before_it_died_is_no_outage() -> None:
    async def scene(client: Servers, stand: Stand) -> None:
        asked = asyncio.ensure_future(client.generate([1], SAMPLING, "a"))
        await until(lambda: stand.in_flight)
        await asyncio.sleep(0.4)
        died = time.monotonic()
        await stand.__aexit__()
        await until(lambda: client.sampler.away)
        assert client.sampler.away <= time.monotonic() - died
        asked.cancel()

    play(scene, Stand(60.0), restart_timeout=300, look=60)


def test_a_server_that_stays_away_is_an_error_after_the_time_that_servers_have_to_start() -> None:
    async def scene(client: Servers, stand: Stand) -> None:
        await stand.__aexit__()
        started = time.monotonic()
        with pytest.raises(ServerUnreachable, match="does not answer"):
            await client.generate([1], SAMPLING, "a")
        assert time.monotonic() - started > 1.1
        await stand.__aenter__()

    play(scene, Stand(), request_timeout=1, restart_timeout=1.2, look=60)  # even a busy machine sees a closed port within 1 s
