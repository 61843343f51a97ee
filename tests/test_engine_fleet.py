"""The servers of a run, as stand-ins: restarts, servers that join and leave, other runs, and servers of others."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest
from run_servers import RUN, SAMPLING, Servers
from server_stand_in import UPDATE, Stand, Version, serving, until

from rlx.config.schema import Config
from rlx.inference.endpoints import Endpoint, endpoint_file, free_port, present_servers, publish_endpoint, read_endpoints
from rlx.inference.replica import memory_of
from rlx.inference.wire import (
    InferenceError,
    RequestRefused,
    ServerUnreachable,
    TakenServer,
)
from rlx.paths import RunPaths
from rlx.polling import WaitTimeout

pytestmark = pytest.mark.usefixtures("quick_clients")

# -- servers that come and go


def config_with(*urls: str) -> Config:
    config = Config(max_steps=1, seq_len=8)
    config.inference.base_url = list(urls)
    return config


class Files:
    """The endpoint files of a run."""

    def __init__(self, folder: Path) -> None:
        self.paths = RunPaths(folder)
        self.paths.endpoints.mkdir()

    def add(self, name: str, stand: Stand) -> Endpoint:
        file = self.paths.endpoints / f"inference_{name}.json"
        file.write_text(json.dumps({"url": stand.url, "api_key": "key"}))
        return Endpoint(stand.url, "key", file)

    def find(self) -> list[Endpoint]:
        return present_servers(config_with(), self.paths)


async def test_a_server_whose_file_appears_gets_the_version_then_serves_and_leaves_with_its_file(tmp_path: Path, version: Version) -> None:
    files = Files(tmp_path)
    async with (
        Stand(0.02) as first,
        Stand(0.02) as second,
        Servers([files.add("0", first)], 60, look=0.05, find=files.find) as client,
    ):
        await client.ready()
        second.label = "17@ffffffff"  # it served another run
        await client.update(version(3), 3)
        file = files.add("extra", second).file
        await until(lambda: client.fleet.size == 2)
        assert second.label == f"3@{RUN}"
        await asyncio.gather(*client.many())
        assert (len(first.served), second.served) == (4, [f"3@{RUN}"] * 4)
        second.holds = True
        staying = client.many()
        await until(lambda: second.in_flight == 4)
        file.unlink()
        await until(lambda: client.fleet.size == 1)
        second.holds = False
        await asyncio.gather(*staying)
        assert len(second.served) == 8, "what it had begun, it ends"
        await asyncio.gather(*client.many())
        assert len(second.served) == 8
        await client.update(version(4), 4)
        assert (first.version, second.version) == (4, 3)


async def test_the_last_server_is_never_removed_and_files_that_cannot_be_used_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Files(tmp_path)
    (files.paths.endpoints / "inference_bad.json").write_text("{")
    (files.paths.endpoints / "inference_odd.json").write_text('{"url": "localhost:8000", "api_key": "key"}')
    async with Stand() as stand, Stand() as late, Servers([stand.endpoint], 60, look=0.02, find=files.find) as client:
        await client.ready()
        await until(lambda: "does not answer: localhost:8000" in caplog.text)
        await client.generate([1], SAMPLING, "a")
        assert client.fleet.size == 1
        files.add("late", late)
        await until(lambda: [endpoint.url for endpoint in client.sampler.servers().endpoints] == [late.url])
    assert "inference_bad.json does not describe an inference server" in caplog.text


async def test_a_server_with_another_model_is_refused_at_the_start_and_joins_with_the_first_version(
    tmp_path: Path, version: Version, caplog: pytest.LogCaptureFixture
) -> None:
    """Later versions are compared with what was trained, so only version 0 could be another model unnoticed."""

    files = Files(tmp_path)
    async with Stand() as first, Stand() as second:
        second.state |= {"identity": "b", "model": "other"}
        async with Servers([first.endpoint, second.endpoint], 60) as client:
            with pytest.raises(InferenceError, match=r"started with other weights: .* other"):
                await client.ready()
        async with Servers([files.add("0", first)], 60, look=0.05, find=files.find) as client:
            await client.ready()
            files.add("extra", second)
            await until(lambda: "started with other weights" in caplog.text)
            await asyncio.gather(*client.many())
            assert (client.fleet.size, second.served) == (1, [])
            await client.update(version(1), 1)
            await until(lambda: client.fleet.size == 2)
            assert second.label == f"1@{RUN}"


async def test_a_server_that_hangs_is_left_out_until_it_answers_and_metrics_do_not_wait_for_it() -> None:
    async with serving(Stand(), Stand(), look=0.1, hung=0.5) as (client, first, second):
        first.holds = True
        first.hangs |= {"/v1/models", "/metrics"}
        playing = client.many()
        assert (await asyncio.wait_for(client.fleet.stats(), 60))["perf/servers"] == 1
        await asyncio.wait_for(asyncio.gather(*playing), 60)
        assert len(second.served) == 8
        first.hangs.clear()
        await until(lambda: client.fleet.size == 2)


async def test_a_look_asks_a_server_that_has_the_version_once(version: Version) -> None:
    async with serving(Stand(), look=0.02) as (client, stand):
        await client.update(version(1), 1)
        stand.calls.clear()
        await until(lambda: len(stand.calls) > 12)
        assert all(abs(stand.calls.count(name) - len(stand.calls) / 3) < 2 for name in ("/v1/models", "rlx_state", "/weight_info"))
        assert stand.changes == []


async def test_the_fleet_goes_on_trying_a_server_that_cannot_load_and_logs_it_once(
    version: Version, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Stand(), look=0.05) as (client, stand):
        await client.update(version(2), 2)
        stand.errors["rlx_check"] = {"error": "no such folder"}
        await stand.stop()
        await stand.start()
        await until(lambda: "no such folder" in caplog.text)
        tried = stand.calls.count("rlx_check")
        await until(lambda: stand.calls.count("rlx_check") > tried + 2)
        assert caplog.text.count("no such folder") == 1
        stand.errors.clear()
        await until(lambda: stand.version == 2)


# -- the start, other runs, and servers of others


async def test_the_start_brings_servers_of_earlier_runs_back_to_their_model_and_labels_new_ones(version: Version) -> None:
    async with Stand() as used, Stand() as new:
        async with Servers([used.endpoint], 60, run="ffffffff") as client:
            await (await client.ready()).update(version(5), 5)
        used.calls.clear()
        async with Servers([used.endpoint, new.endpoint], 60) as client:
            await client.ready()
        assert used.changes == [*UPDATE[:3], "rlx_compare", *UPDATE[3:]]
        assert (used.folder, used.label) == ("model", f"0@{RUN}")
        assert (new.changes, new.label) == (UPDATE[3:], f"0@{RUN}")
        async with Servers([new.endpoint], 60, run="eeeeeeee") as client:
            client.fleet.initial = lambda model: {"model": "warm"}[model]  # it started while the warm start trained
            await client.ready()
        assert (new.folder, new.label) == ("warm", "0@eeeeeeee")


async def test_a_run_ends_when_another_run_has_changed_a_server() -> None:
    async with serving(Stand(), look=0.05) as (client, stand):
        holding = asyncio.ensure_future(client.fleet.held())
        await asyncio.sleep(0.2)
        assert not holding.done()
        stand.label = "1@ffffffff"
        with pytest.raises(TakenServer, match="version 1 of another run"):
            await asyncio.wait_for(holding, 60)


async def test_a_start_without_a_server_with_a_wrong_key_or_without_the_extension_says_what_to_do() -> None:
    async with Stand(extension=False) as stand:
        async with Servers([stand.endpoint], 60) as client:
            with pytest.raises(RequestRefused, match=r"does not know `rlx_state`(.|\n)*--worker-extension-cls"):
                await client.ready()
        async with Servers([Endpoint(stand.url, "guess")], 60) as client:
            with pytest.raises(RequestRefused, match=r"inference\.api_key"):
                await client.ready()
    async with Servers([stand.endpoint], 60) as client:
        with pytest.raises(ServerUnreachable, match=rf"{stand.url} was not ready after 0\.2 s"):
            await client.ready(0.2)


async def test_servers_of_others_need_no_extension_and_are_never_changed() -> None:
    async with Stand(extension=False) as first, Stand(extension=False) as second:
        endpoints = [first.endpoint, second.endpoint]
        async with Servers(endpoints, 60, adopt=True, look=0.02) as client:
            await client.ready()
            assert (client.fleet.version, client.fleet.context) == (0, 64)
            await asyncio.gather(*client.many())
            await asyncio.sleep(0.1)
            assert first.changes == second.changes == []
            assert (await client.fleet.states())[0].model == "model"
        first.label = "7@ffffffff"
        async with Servers(endpoints, 60, adopt=True) as client:
            with pytest.raises(InferenceError, match=r"different versions: \['7@ffffffff', 'default'\]"):
                await client.ready()
        async with Servers(endpoints[:1], 60, adopt=True) as client:
            assert (await client.ready()).fleet.version == 7


async def test_statistics_are_of_all_servers() -> None:
    async with serving(Stand(), Stand()) as (client, *stands):
        for stand in stands:
            stand.waiting = 2
        assert await client.fleet.stats() == {
            "perf/servers": 2,
            "perf/kv_cache_usage": 0.25,
            "perf/running": 0,
            "perf/waiting": 4,
            "perf/preemptions": 6,
            "perf/answered": 0,
            "perf/prefix_cache_hits": 0.25,
            "perf/weights_compared": 0.0,
        }
        stands[1].state |= {"peak_memory": 3 << 30, "memory": 80 << 30}
        assert memory_of(await client.fleet.states()) == {"perf/peak_memory_gb": 3, "perf/device_memory_gb": 80}


# -- addresses


def test_a_published_endpoint_is_private_and_read_back(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    port = free_port("127.0.0.1")
    assert publish_endpoint(endpoint_file(paths, 1), Endpoint(f"http://127.0.0.1:{port}", "secret")) == f"http://127.0.0.1:{port}"
    assert stat.S_IMODE(endpoint_file(paths, 1).stat().st_mode) == 0o600
    with pytest.raises(WaitTimeout, match="inference server 0"):
        read_endpoints(paths, 2)
    publish_endpoint(endpoint_file(paths, 0), Endpoint("http://127.0.0.1:1", "other"))
    assert [endpoint.api_key for endpoint in read_endpoints(paths, 2)] == ["other", "secret"]
