"""Updates of all servers of a run, which are stand-ins: in order, in parallel, with servers that fail, and compared afterwards."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from run_servers import RUN, SAMPLING, Servers
from server_stand_in import UPDATE, Clock, Stand, Version, publish, serving, until

from rlx.inference.wire import (
    InferenceError,
    ServerUnreachable,
    UpdateRefused,
    WeightsDiffer,
    WeightsGone,
)
from rlx.types import WeightVersion
from rlx.weights.subscribe import version_at

OUTDATED = {"equal": 90, "different": 10, "served": 100, "names": ["model.norm.weight"], "seconds": 0.01}
pytestmark = pytest.mark.usefixtures("quick_clients")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Limits of updates pass by it. They are long enough for a machine that is slow or stops for a while."""
    made = Clock()
    monkeypatch.setattr("rlx.inference.fleet.time", made)
    return made


async def test_an_update_loads_and_labels_all_servers_in_parallel_and_requests_go_on(version: Version) -> None:
    async with serving(Stand(ranks=2), Stand(), look=60) as (client, *stands):
        for stand in stands:
            stand.calls.clear()
            stand.hangs.add("rlx_load")
            stand.holds = True
        playing = client.many()
        await until(lambda: sum(stand.in_flight for stand in stands) == 8)
        updating = asyncio.ensure_future(client.update(version(3), 3))
        await until(lambda: all("rlx_load" in stand.calls for stand in stands))
        for stand in stands:
            stand.hangs.clear()
            stand.holds = False
        await updating
        await asyncio.gather(*playing)
        for stand in stands:
            assert stand.changes == [*UPDATE[:3], "rlx_compare", *UPDATE[3:]]
            assert stand.bodies["/pause"] == [{"mode": "keep"}]
            assert (stand.label, stand.loaded, stand.folder.rpartition("/")[2]) == (f"3@{RUN}", f"3@{RUN}", "step_3")
        assert (client.fleet.version, client.fleet.compared) == (3, 1.0)
        assert [stand.preemptions for stand in stands] == [7, 7]
        assert (await client.fleet.stats())["perf/preemptions"] == 6, "a pause is none"


async def test_a_version_that_one_server_refuses_is_an_error_and_changes_nothing_there(version: Version) -> None:
    async with serving(Stand(), Stand(ranks=2), look=60) as (client, _first, second):
        second.errors["rlx_check"] = {"error": "1 tensors are not what the trainer wrote"}
        second.calls.clear()
        with pytest.raises(UpdateRefused, match=f"{second.url}, rank 1: 1 tensors are not what the trainer wrote"):
            await client.update(version(1), 1)
        assert (client.fleet.version, second.changes, second.paused) == (0, ["rlx_check"], False)
        second.errors = {"rlx_load": {"error": "was not checked before", "broken": False}}
        with pytest.raises(UpdateRefused, match="was not checked before"):
            await client.update(version(2), 2)
        assert (second.label, second.paused) == (f"0@{RUN}", True), "one of its two ranks has loaded the version"
        second.errors = {}
        await client.fleet.restore(second.endpoint)
        assert (second.label, second.paused) == (f"0@{RUN}", False)


@pytest.mark.parametrize(("number", "why"), [(2, "holds version 2, not 1"), (None, "no file COMPLETE")])
async def test_a_folder_of_another_version_or_without_a_manifest_is_refused(
    number: int | None, why: str, tmp_path: Path, version: Version
) -> None:
    async with serving(Stand()) as (client, _stand):
        with pytest.raises(UpdateRefused, match=why):
            await client.update(tmp_path if number is None else version(number), 1)


async def test_other_weights_than_those_that_were_loaded_end_the_run_and_are_never_used(version: Version) -> None:
    async with serving(Stand(ranks=2), look=0.02, verify_every=1000) as (client, stand):
        stand.errors["rlx_compare"] = OUTDATED
        with pytest.raises(WeightsDiffer, match=r"10 numbers differ on 1 of 2 ranks, most in model\.norm\.weight"):
            await client.update(version(1), 1)
        await until(lambda: stand.calls.count("rlx_compare") > 2)  # a check brings the run's version to it, which differs, too
        assert (stand.paused, stand.label, client.fleet.version) == (True, f"0@{RUN}", 0)
        assert "/resume" not in stand.calls[stand.calls.index("rlx_load") :]
        stand.errors.clear()
        await until(lambda: not stand.paused)
        assert (stand.loaded, stand.label) == (f"0@{RUN}", f"0@{RUN}")


async def test_a_restarted_server_with_other_weights_than_it_loaded_ends_the_run(version: Version) -> None:
    async with serving(Stand(), look=0.05, verify_every=1000) as (client, stand):
        await client.update(version(1), 1)
        stand.errors["rlx_compare"] = OUTDATED
        await stand.stop()
        await stand.start()
        with pytest.raises(WeightsDiffer):
            await asyncio.wait_for(client.fleet.held(), 60)
        assert stand.paused


@pytest.mark.parametrize("others", [[], [Stand()]])
async def test_a_load_that_fails_midway_leaves_the_server_out_and_without_another_the_run_waits_for_its_restart(
    others: list[Stand], version: Version
) -> None:
    async with serving(Stand(), *others, look=0.05) as (client, first, *second):
        first.errors["rlx_load"] = {"error": "the disk is gone", "broken": True}
        updating = asyncio.ensure_future(client.update(version(1), 1))
        await until(lambda: "rlx_load" in first.calls)
        await first.stop()
        if second:
            await asyncio.wait_for(updating, 60)
            assert (client.fleet.version, client.fleet.size) == (1, 1)
        first.errors.clear()
        await first.start()
        await asyncio.wait_for(updating, 60)
        await until(lambda: client.fleet.size == 1 + len(second))
        assert (first.label, first.paused) == (f"1@{RUN}", False)


async def test_500_and_closed_connections_during_an_update_cost_nothing_but_time(version: Version) -> None:
    async with serving(Stand(), look=60, restart_timeout=0.5) as (client, stand):
        for call in ("/pause", "rlx_check", "rlx_load", "/update_weight_version", "/resume"):
            stand.fails[call] = stand.drops[call] = 1
        await client.update(version(1), 1)
        assert (stand.label, stand.paused) == (f"1@{RUN}", False)
        stand.fails["/pause"] = 1000
        with pytest.raises(InferenceError, match="out of luck"):
            await client.update(version(2), 2)


async def test_a_server_that_dies_is_left_out_of_an_update_and_has_the_version_before_it_serves_again(version: Version) -> None:
    async with serving(Stand(0.02), Stand(0.02), look=0.05) as (client, first, second):
        await first.stop()
        await asyncio.wait_for(client.update(version(1), 1), 60)
        assert (client.fleet.size, second.version, (await client.fleet.stats())["perf/servers"]) == (1, 1, 1)
        first.served.clear()
        first.fails["rlx_load"] = 1
        await first.start()
        await until(lambda: client.fleet.size == 2)
        assert first.label == f"1@{RUN}"
        await asyncio.gather(*client.many())
        assert set(first.served) == {f"1@{RUN}"}


async def test_a_server_that_hangs_in_an_update_is_left_out_its_requests_go_elsewhere_and_it_serves_again(
    version: Version, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Stand(), Stand(), look=0.05) as (client, first, second):
        first.holds = True
        playing = client.many()
        await until(lambda: first.in_flight == 4)
        first.hangs.add("rlx_load")
        updating = asyncio.ensure_future(client.update(version(1), 1))
        await until(lambda: second.version == 1 and "rlx_load" in first.calls)
        await asyncio.sleep(0.2)
        assert not updating.done(), "it may only be slow"
        clock.passed += 31
        await asyncio.wait_for(updating, 60)
        await asyncio.gather(*playing)
        assert (len(second.served), client.fleet.size) == (8, 1)
        assert f"{first.endpoint.name} did not load version 1 in 31" in caplog.text
        first.hangs.clear()
        await until(lambda: client.fleet.size == 2)
        assert (first.label, first.paused) == (f"1@{RUN}", False)


async def test_a_server_that_once_did_not_answer_and_is_slow_is_waited_for(version: Version) -> None:
    async with serving(Stand(), Stand(), look=0.05) as (client, first, second):
        first.drops["rlx_state"] = 1
        await until(lambda: first.calls.count("rlx_state") > 4)
        first.hangs.add("rlx_load")
        updating = asyncio.ensure_future(client.update(version(1), 1))
        await until(lambda: second.version == 1 and "rlx_load" in first.calls)
        await asyncio.sleep(0.3)
        first.hangs.clear()
        await updating
        assert (first.version, client.fleet.size) == (1, 2)


async def test_an_update_that_no_server_takes_names_them_and_the_key(version: Version) -> None:
    async with serving(Stand(), Stand(), look=60) as (client, *stands):
        for stand in stands:
            stand.hangs.add("rlx_load")
        with pytest.raises(ServerUnreachable) as caught:
            await asyncio.wait_for(client.update(version(1), 1, timeout=0.5), 60)
        assert all(stand.url in str(caught.value) for stand in stands)
        assert "(weight_broadcast.timeout=0.5)" in str(caught.value)


async def test_a_frozen_server_does_not_stop_the_clock_of_an_update(version: Version) -> None:
    """It takes connections and answers nothing, unlike one that is away until it has restarted."""
    async with serving(Stand(), look=0.05, restart_timeout=0.3) as (client, stand):
        stand.hangs |= {"/v1/models", "rlx_check"}
        await until(lambda: client.fleet._servers[0].hangs)
        with pytest.raises(ServerUnreachable, match=r"weight_broadcast\.timeout=0\.5"):
            await asyncio.wait_for(client.update(version(1), 1, timeout=0.5), 30)


async def test_a_server_that_restarts_with_another_model_gets_no_label_and_serves_nothing() -> None:
    """Version 0 is the only one that a server has without a load, so nothing else would compare it."""
    async with serving(Stand(), Stand(), look=0.05) as (client, _, second):
        await second.stop()
        await until(lambda: client.fleet.size == 1)
        second.state |= {"identity": "b", "model": "other"}
        second.calls.clear()
        await second.start()
        await until(lambda: second.calls.count("rlx_state") > 3)
        assert (second.version, second.changes, client.fleet.size) == (None, [], 1)


async def test_an_update_waits_for_a_lone_server_and_that_time_does_not_count(version: Version, clock: Clock) -> None:
    async with serving(Stand(), look=60, restart_timeout=300, verify_every=1000) as (client, stand):
        await stand.stop()
        updating = asyncio.ensure_future(client.update(version(2), 2, timeout=20))
        await until(lambda: client.fleet._servers[0].silent_since)
        for _ in range(3):
            clock.passed += 30
            await asyncio.sleep(0.1)
        assert not updating.done()
        stand.calls.clear()
        await stand.start()
        await asyncio.wait_for(updating, 60)
        assert stand.calls.count("rlx_compare") == 1, "after a restart"


async def test_a_resume_that_did_not_arrive_is_repeated(version: Version) -> None:
    """The update left the server out after it had the version."""

    async with serving(Stand(), Stand(), look=0.05) as (client, first, _second):
        first.hangs.add("/resume")
        updating = asyncio.ensure_future(client.update(version(1), 1, timeout=1.0))
        await until(lambda: "/resume" in first.calls[-3:])
        await updating
        assert (first.label, first.paused) == (f"1@{RUN}", True)
        first.hangs.clear()
        await until(lambda: client.fleet.size == 2 and not first.paused)


async def test_the_full_compare_comes_first_after_restarts_every_so_many_updates_and_where_it_is_cheap(
    version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compared(client: Servers, stand: Stand, numbers: range) -> list[int]:
        found = []
        for number in numbers:
            before = stand.calls.count("rlx_compare")
            await client.update(version(number), number)
            found += [number] * (stand.calls.count("rlx_compare") - before)
        return found

    async with serving(Stand(), look=60, verify_every=4) as (client, stand):
        stand.errors["rlx_compare"] = {"equal": 50, "different": 0, "served": 100, "names": [], "seconds": 1000.0}
        assert await compared(client, stand, range(1, 10)) == [1, 5, 9]
        assert (await client.fleet.stats())["perf/weights_compared"] == 0.5
        await stand.stop()
        await stand.start()
        await client.generate([1], SAMPLING, "a")
        assert stand.calls.count("rlx_compare") == 4, "after a restart"
        stand.errors["rlx_compare"] |= {"seconds": 0.0}
        assert await compared(client, stand, range(10, 17)) == [13, 14, 15, 16], "it takes less than 5 % of the time between two updates"


async def test_an_adapter_has_a_name_for_each_version_and_old_ones_are_unloaded(tmp_path: Path) -> None:
    async with serving(Stand(), look=60) as (client, stand):
        stand.calls.clear()
        for number in range(4):
            await client.update(publish(tmp_path / str(number), number, adapter=True), number)
            stand.adapters |= {"9@ffffffff": "/another/run"}
        assert stand.adapters.keys() == {f"2@{RUN}", f"3@{RUN}", "9@ffffffff"}
        assert "/pause" not in stand.calls, "requests in flight go on with the adapter that they have"
        await stand.stop()
        updating = asyncio.ensure_future(client.update(publish(tmp_path / "4", 4, adapter=True), 4))
        await until(lambda: client.fleet._servers[0].silent_since)
        await stand.start()
        await updating
        assert [*stand.adapters] == [f"4@{RUN}"]


async def test_a_run_begins_with_the_base_model_although_an_adapter_is_version_0_too(tmp_path: Path) -> None:
    adapter = publish(tmp_path / "0", 0, adapter=True)
    async with Stand() as stand, Servers([stand.endpoint], look=0.05) as client:
        client.fleet.look_up = lambda version: version_at(adapter, version)
        await client.ready()
        assert (stand.label, stand.adapters) == (f"0@{RUN}", {})
        await client.update(adapter, 0)
        await client.generate([1], SAMPLING, "a")
        assert stand.served == [f"0@{RUN}"]
        assert [*stand.adapters] == [f"0@{RUN}"]


# -- versions from the trainer's memory


async def test_the_trainer_sends_a_version_to_paused_servers_and_one_that_it_did_not_reach_gets_the_next(tmp_path: Path) -> None:
    async def send(version: int, failed: str = "") -> list[str]:
        """What the trainer does. Returns the servers."""
        wanted = tmp_path / "weights_wanted.json"
        await until(wanted.exists)
        asked = json.loads(wanted.read_text())
        assert asked["version"] == version
        wanted.unlink()
        (tmp_path / "weights_sent.json").write_text(json.dumps({"version": version, "id": asked["id"], "failed": failed}))
        return [server["url"] for server in asked["servers"]]

    def update(client: Servers, version: int) -> asyncio.Future:
        (tmp_path / "weights.json").write_text(json.dumps({"version": version, "token": ""}))
        return asyncio.ensure_future(client.fleet.update(WeightVersion(version=version, kind="memory", where=str(tmp_path)), 60))

    async with serving(Stand(), Stand(), look=0.05) as (client, first, second):
        updating = update(client, 1)
        assert await send(1, "it left the group") == [first.url, second.url]
        with pytest.raises(WeightsGone, match="did not get version 1: it left the group"):
            await updating
        assert {(stand.label, stand.paused) for stand in (first, second)} == {(f"0@{RUN}", True)}, "they may hold half of the version"
        updating = update(client, 2)
        assert await send(2) == [first.url, second.url]
        await updating
        await until(lambda: client.fleet.size == 2)
        assert (second.label, second.paused) == (f"2@{RUN}", False)
        await second.stop()
        updating = update(client, 3)
        assert await send(3) == [first.url]
        await updating
        await second.start()
        updating = update(client, 4)
        (tmp_path / "weights.json").write_text(json.dumps({"version": 5, "token": ""}))
        with pytest.raises(WeightsGone, match="the trainer has version 5 instead of 4"):
            await updating
