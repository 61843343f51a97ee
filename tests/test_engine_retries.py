"""Requests to stand-in servers: what is retried, for how long, and what is an error at once."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from run_servers import RUN, SAMPLING, Servers
from server_stand_in import CONTEXT, Stand, publish, serving, until

from rlx.inference import client as http
from rlx.inference.endpoints import Endpoint
from rlx.inference.sampler import Sampler
from rlx.inference.wire import (
    GENERATE,
    ContextTooLong,
    InferenceError,
    RequestRefused,
    ServerUnreachable,
)

pytestmark = pytest.mark.usefixtures("quick_clients")


@pytest.mark.parametrize(
    "wrong",
    [{"logprobs": None}, {"logprobs": {"content": [{"logprob": float("nan")}]}}, {"weight_versions": None}, {"finish_reason": "error"}],
)
async def test_a_completion_without_logprobs_or_versions_is_not_used_and_another_server_is_asked(wrong: dict[str, Any]) -> None:
    async with serving(Stand(0.02), Stand(0.02), look=60) as (client, first, second):
        first.completion = wrong
        await asyncio.gather(*client.many())
        assert len(second.served) == 8


async def test_500_and_a_connection_closed_without_a_response_cost_nothing_but_time() -> None:
    async with serving(Stand()) as (client, stand):
        stand.fails[GENERATE], stand.drops[GENERATE] = 2, 2
        assert (await client.generate([1, 2], SAMPLING, "a")).completion_ids.tolist() == [2, 1]
        assert len(stand.requests) == 5


async def test_a_request_that_every_server_fails_is_an_error_in_bounded_time() -> None:
    async with serving(Stand(), Stand(), restart_timeout=0.3) as (client, *stands):
        for stand in stands:
            stand.fails[GENERATE] = 1000
        began = time.monotonic()
        with pytest.raises(InferenceError, match=r"\(500\): out of luck"):
            await client.generate([1], SAMPLING, "a")
        assert 0.3 < time.monotonic() - began < 60
        assert sum(len(stand.requests) for stand in stands) < 20, "with a pause between two attempts"
        assert client.sampler.away == 0, "servers that answer are no outage"


async def test_requests_wait_for_a_lone_server_longer_than_their_own_limit_and_that_time_is_counted() -> None:
    async with serving(Stand(60), request_timeout=0.8, restart_timeout=300, look=60) as (client, stand):
        asked = client.many(3)
        await until(lambda: stand.in_flight == 3)
        await asyncio.sleep(0.4)
        died = time.monotonic()
        await stand.stop()
        await until(lambda: client.sampler.away > 1)
        assert client.sampler.away <= time.monotonic() - died, "it worked until it died"
        assert not any(one.done() for one in asked)
        stand.delay = 0.0
        await stand.start()
        await asyncio.gather(*asked)


async def test_requests_wait_while_all_of_several_servers_are_gone_and_the_first_that_is_back_serves_them(tmp_path: Path) -> None:
    async with serving(Stand(), Stand(), look=0.05, restart_timeout=300) as (client, first, second):
        await client.update(publish(tmp_path / "1", 1), 1)
        first.holds = second.holds = True
        playing = client.many()
        await until(lambda: first.in_flight == second.in_flight == 4)
        for stand in (first, second):
            await stand.stop()
        await until(lambda: client.sampler.away > 0.3)  # several looks of the fleet
        assert client.fleet.size, "the last one is not left out: requests always have one to ask"
        second.holds = False
        await second.start()
        turns = await asyncio.wait_for(asyncio.gather(*playing), 60)
        assert {version for turn in turns for version in turn.versions.tolist()} == {1}
        await first.start()


async def test_a_server_that_stays_away_is_an_error_after_the_time_that_servers_have_to_restart() -> None:
    async with serving(Stand(), request_timeout=1, restart_timeout=1.2, look=60) as (client, stand):
        await stand.stop()
        began = time.monotonic()
        with pytest.raises(ServerUnreachable, match=f"{stand.url} does not answer"):
            await client.generate([1], SAMPLING, "a")
        assert 1.2 < time.monotonic() - began < 60
        await stand.start()


async def test_so_is_a_host_that_vanished_which_does_not_even_refuse_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECT", 0.3)

    full, waiting = socket.socket(), [socket.socket() for _ in range(3)]
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    for one in waiting:  # with these its queue is full, and the kernel drops further attempts
        one.setblocking(False)
        one.connect_ex(full.getsockname())
    url = f"http://127.0.0.1:{full.getsockname()[1]}"
    async with Sampler([Endpoint(url, "key")], 60, restart_timeout=1.0, run=RUN) as sampler:
        with pytest.raises(ServerUnreachable, match=url):
            await asyncio.wait_for(sampler.generate([1], SAMPLING, "a"), 30)
    for one in (*waiting, full):
        one.close()


async def test_a_wrong_key_is_an_error_at_once() -> None:
    async with Stand() as stand, Sampler([Endpoint(stand.url, "guess")], 60, run=RUN) as sampler:
        with pytest.raises(RequestRefused, match=r"\(401\): it refuses the key(.|\n)*inference\.api_key"):
            await sampler.generate([1], SAMPLING, "a")
        assert stand.refused == 1


async def test_a_server_that_restarts_at_the_same_address_with_another_key_is_waited_for_until_its_file_has_it(tmp_path: Path) -> None:
    file = tmp_path / "inference_0.json"
    async with Stand() as stand:
        record = {"url": stand.url, "api_key": "key"}
        file.write_text(json.dumps(record))
        async with Servers([Endpoint(stand.url, "key", file)], request_timeout=60) as client:
            await client.ready()
            await client.update(publish(tmp_path / "2", 2), 2)
            await stand.stop()
            file.unlink()
            stand.key = "another"
            await stand.start()
            waiting = asyncio.ensure_future(client.generate([1, 2], SAMPLING, "b"))
            await until(lambda: stand.refused > 4)
            file.write_text(json.dumps(record | {"api_key": "another"}))
            assert (await waiting).versions.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "why"),
    [
        ([1] * CONTEXT, {}, ContextTooLong, f"the prompt has {CONTEXT} tokens, the servers' context {CONTEXT}"),
        ([1], {"top_q": 1}, RequestRefused, "top_q"),
        ([1], {"max_tokens": 0}, RequestRefused, "max_tokens"),
    ],
)
async def test_what_no_server_can_take_is_not_sent(prompt: list[int], sampling: dict[str, Any], error: type[Exception], why: str) -> None:
    async with serving(Stand()) as (client, stand):
        good = asyncio.ensure_future(client.generate([1, 2], SAMPLING, "a"))
        with pytest.raises(error, match=why):
            await client.generate(prompt, SAMPLING | sampling, "b")
        assert (await good).completion_ids.tolist() == [2, 1]
        assert len(stand.requests) == 1


async def test_a_request_that_a_server_refuses_is_an_error_at_once() -> None:
    async with serving(Stand(), Stand()) as (client, *stands):
        with pytest.raises(RequestRefused, match=r"\(400\): The decoder prompt"):
            await client.generate([-1], SAMPLING, "a")
        assert sum(len(stand.requests) for stand in stands) == 1


async def test_a_request_that_takes_too_long_names_the_key_and_is_aborted() -> None:
    async with serving(Stand(30), request_timeout=0.5) as (client, stand):
        with pytest.raises(ServerUnreachable, match=r"did not finish request abc in 0\.5 s \(inference\.request_timeout\)"):
            await client.generate([1], SAMPLING, "abc")
        await until(lambda: (stand.in_flight, stand.aborted) == (0, len(stand.requests)))


async def test_a_cancelled_request_is_aborted_on_its_server() -> None:
    async with serving(Stand(holds=True)) as (client, stand):
        asked = client.many(3)
        await until(lambda: stand.in_flight == 3)
        asked[0].cancel()
        await until(lambda: stand.aborted == 1)
        stand.holds = False
        await asyncio.gather(*asked[1:])
        assert asked[0].cancelled()
