"""Faults around one server on real vLLM: wrong and too many requests, clients that hang up or do not read, processes that are killed."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from inference_server import CONTEXT, EXACT, Run, lives, prompts, running, sample, sample_all, wait_until
from run_servers import Servers

from rlx.inference import wire
from rlx.inference.client import Client
from rlx.inference.endpoints import endpoint_file
from rlx.inference.wire import ContextTooLong, InferenceError, RequestRefused
from rlx.runs.status import last_lines
from rlx.trace import Turn

pytestmark = [pytest.mark.slow, pytest.mark.long]
Engines = Callable[[str], Run]


@pytest.fixture
def run(engines: Engines) -> Run:
    return engines("tied")


REFUSED: list[tuple[list[int], dict[str, Any], type[Exception], str]] = [
    ([10, 5000], {}, RequestRefused, r"\(400\): .*out of vocabulary"),
    ([10, -1], {}, RequestRefused, r"\(400\)"),
    ([], {}, RequestRefused, r"\(400\)"),
    ([10] * CONTEXT, {}, ContextTooLong, rf"the prompt has {CONTEXT} tokens, the servers' context {CONTEXT}: no room for a new token"),
    ([10, 11], {"nucleus": 0.9}, RequestRefused, "unknown field `nucleus`"),
    ([10, 11], {"max_tokens": 0}, RequestRefused, "`max_tokens`|max_tokens"),
    ([10, 11], {"temperature": -1.0}, RequestRefused, r"\(400\): .*temperature"),
    ([10, 11], {"top_p": 1.5}, RequestRefused, r"\(400\): .*top_p"),
]


def test_wrong_requests_are_refused_with_a_reason_and_disturb_no_other(run: Run) -> None:
    async def scene(client: Servers) -> list[Turn]:
        others = [asyncio.create_task(sample(client, ids, seed)) for seed, ids in enumerate(prompts(16))]
        for ids, sampling, error, reason in REFUSED:
            with pytest.raises(error, match=reason):
                await sample(client, ids, 0, **sampling)
        return await asyncio.gather(*others)

    assert run.worst(run.talk(scene)) < EXACT


def test_a_completion_ends_with_the_context(run: Run) -> None:
    turns = run.talk(lambda client: sample_all(client, prompts(16, CONTEXT - 4), max_tokens=500))
    full = [turn for turn in turns if turn.finish_reason == "length"]
    assert full
    assert {len(turn.completion_ids) for turn in full} == {4}
    assert run.worst(turns) < EXACT


def test_requests_of_a_client_that_hangs_up_leave_the_engine(run: Run) -> None:
    async def scene(client: Servers) -> Turn:
        asked = {"max_tokens": 200, "min_tokens": 200}
        work = [asyncio.create_task(sample(client, ids, seed, **asked)) for seed, ids in enumerate(prompts(8))]
        await running(client, 8)
        for task in work[1:]:
            task.cancel()
        async with asyncio.timeout(60):
            while (await client.fleet.stats())["perf/running"] != 1:
                await asyncio.sleep(0.02)
        assert not work[0].done()
        return await work[0]

    turn = run.talk(scene)
    assert len(turn.completion_ids) == 200
    assert run.worst([turn], min_tokens=200) < EXACT


def test_two_thousand_connections_at_once_all_get_their_completion(run: Run) -> None:
    async def scene(client: Servers) -> tuple[list[Turn], int]:
        most = 0

        async def count() -> None:
            nonlocal most
            port = int(run.ready()[0].url.rpartition(":")[2])
            while True:
                there = [one for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr.port == port]
                most = max(most, len(there))
                await asyncio.sleep(0.2)

        counting = asyncio.create_task(count())
        turns = await sample_all(client, prompts(2000, 12), max_tokens=2)
        counting.cancel()
        return turns, most

    turns, connections = run.talk(scene, request_timeout=300)
    assert connections >= 2000
    assert Counter(turn.finish_reason for turn in turns).total() == 2000
    assert run.worst(turns[::20]) < EXACT


def test_a_client_that_does_not_read_holds_up_no_other(run: Run) -> None:
    (endpoint,) = run.ready()

    async def scene(client: Servers) -> tuple[list[Turn], bytes]:
        mine = socket.socket()
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        mine.connect(("127.0.0.1", int(endpoint.url.rpartition(":")[2])))
        reader, writer = await asyncio.open_connection(sock=mine, limit=1024)
        sampling = {"max_tokens": 200, "min_tokens": 200, "logprobs": 0, "detokenize": False}
        body = json.dumps({"token_ids": prompts(1)[0], "sampling_params": sampling, "stream": True})
        head = f"POST {wire.GENERATE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.api_key}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await running(client, 1)
        turns = await sample_all(client, prompts(16))
        async with asyncio.timeout(60):  # the engine is done with it
            while (await client.fleet.stats())["perf/running"]:
                await asyncio.sleep(0.05)
        answer = await reader.read(-1)
        writer.close()
        return turns, answer

    turns, answer = run.talk(scene)
    assert run.worst(turns) < EXACT
    assert answer.rstrip().endswith(b"data: [DONE]\r\n\r\n0") or b"data: [DONE]" in answer
    assert sum(len(json.loads(line[6:])["choices"][0]["token_ids"]) for line in answer.splitlines() if line.startswith(b"data: {")) == 200


def test_every_route_asks_for_the_secret(run: Run) -> None:
    (endpoint,) = run.ready()

    async def scene() -> tuple[int, Counter[int]]:
        async with Client() as client, aiohttp.ClientSession(endpoint.url) as anyone:
            paths = json.loads(await client.ask(endpoint, "/openapi.json"))["paths"]
            routes = [(method.upper(), path) for path, methods in paths.items() for method in methods]
            routes += [("GET", path) for path in ("/openapi.json", "/docs", "/redoc", "/metrics", "/nowhere")]
            statuses: Counter[int] = Counter()
            for method, path in routes:
                for key in (None, "Bearer wrong", f"Bearer {endpoint.api_key}x", endpoint.api_key):
                    async with anyone.request(method, path, headers={"Authorization": key} if key else {}) as answer:
                        statuses[answer.status] += 1
                        assert await answer.read() == b""
            for path in ("/v1/realtime", "/nowhere"):
                with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
                    await anyone.ws_connect(path)
            assert {wire.GENERATE, "/pause", "/resume", wire.RPC, wire.SET_LABEL, wire.MODELS} <= paths.keys()
            return len(routes), statuses

    routes, statuses = asyncio.run(scene())
    assert routes > 40
    assert statuses == {401: 4 * routes}


def part_of(run: Run, name: str) -> psutil.Process:
    """A process of the server: vLLM names its own."""
    server = psutil.Process(run.process.pid).children()[0]
    return server if name == "server" else next(one for one in server.children(recursive=True) if name in "".join(one.cmdline()))


@pytest.mark.parametrize(("kind", "name"), [("tied", "EngineCore"), pytest.param("split", "server", marks=pytest.mark.nightly)])
def test_a_killed_process_ends_the_whole_server_and_is_a_failure(engines: Engines, kind: str, name: str) -> None:
    """vLLM itself exits with code 0 when its engine dies. No request gets a part of a completion."""
    run = engines(kind)
    processes = psutil.Process(run.process.pid).children(recursive=True)

    async def scene(client: Servers) -> None:
        asked = {"max_tokens": 200, "min_tokens": 200}
        work = [asyncio.create_task(sample(client, ids, seed, **asked)) for seed, ids in enumerate(prompts(8))]
        await running(client, 8)
        part_of(run, name).send_signal(signal.SIGKILL)
        for task in work:
            with pytest.raises(InferenceError, match=r"does not answer|EngineCore|failed a request"):
                await task

    run.talk(scene, restart_timeout=1)
    assert run.process.wait(120) == 1
    wait_until(lambda: not any(map(lives, processes)), "the end of all its processes", 60)
    ended = f"vLLM ended while it served, with exit code {-signal.SIGKILL if name == 'server' else 0}; its own message is above"
    died = "vLLM's engine has died; its own message is above"  # what the role says if it asks between the two deaths
    assert any(words in run.log.read_text() for words in ([ended] if name == "server" else [ended, died]))
    assert not endpoint_file(run.paths, 0).exists()


def test_an_engine_that_hangs_ends_its_server_although_the_server_itself_answers(engines: Engines) -> None:
    run = engines("tied")
    processes = psutil.Process(run.process.pid).children(recursive=True)

    async def scene(client: Servers) -> None:
        work = asyncio.create_task(sample(client, prompts(1)[0], 0, max_tokens=200, min_tokens=200))
        await running(client, 1)
        part_of(run, "EngineCore").suspend()
        with pytest.raises(InferenceError, match="does not answer"):
            await work

    run.talk(scene, restart_timeout=1)
    assert run.process.wait(120) == 1
    wait_until(lambda: not any(map(lives, processes)), "the end of all its processes", 60)
    assert re.search(r"the engine hangs: no token for \d+ s \(inference.hung_timeout=30\)", run.log.read_text())


def test_the_error_of_an_engine_that_cannot_start_is_the_last_line_that_a_run_shows(tmp_path: Path) -> None:
    """The process that waits for the engine prints forty lines after that."""
    run = Run(tmp_path, tied=True, vllm={"kv_cache_memory_bytes": 1000})
    assert run.start().wait(600) == 1
    assert "ValueError: No available memory for the cache blocks" in last_lines(run.log, 3)[-1]
