"""How inference servers start and end, on real vLLM on CPU. Each test starts its own server."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from inference_server import EXACT, Run, prompts, running, same, sample, under_load, wait_until
from run_servers import Servers

from rlx.inference.endpoints import Endpoint, endpoint_file
from rlx.runs.status import last_lines
from rlx.types import Turn
from rlx.waiting import UNFIT

pytestmark = pytest.mark.slow


def test_a_port_that_is_taken_is_said_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = Run(tmp_path, tied=True, port=port)
        process = run.start()
        assert process.wait(600) == 1
    said = run.log.read_text()
    assert f"127.0.0.1:{port}" in said
    assert "inference.port" in said
    assert "Traceback" not in said


APART = """
from rlx.roles import inference
inference.runs_in_process = lambda config: False
inference.end_at_once(inference.main)
"""


def test_the_error_of_an_engine_with_a_process_of_its_own_is_the_last_line_that_a_run_shows(tmp_path: Path) -> None:
    """On CUDA every engine has one. The process that waits for it prints forty lines after the engine's error."""
    run = Run(tmp_path, tied=True, vllm={"kv_cache_memory_bytes": 1000})
    assert run.start(APART).wait(600) == 1
    assert re.search(r"EngineCore.*ValueError: No available memory for the cache blocks", last_lines(run.log, 3)[-1])


@pytest.mark.long
def test_a_client_outlives_a_server_that_starts_again(tmp_path: Path) -> None:
    """The second server has another port, another key and version 0. The client gets no token of version 0, and seeds still work."""
    run = Run(tmp_path, tied=True)
    run.start()
    folder = run.version(4)

    async def conversation(endpoints: list[Endpoint]) -> tuple[list[Turn], list[Turn], list[int]]:
        async with Servers(endpoints, request_timeout=280, restart_timeout=270) as client:
            await client.fleet.wait_ready(300)
            await client.update(folder, 4)
            before = await asyncio.gather(*[sample(client, ids, seed) for seed, ids in enumerate(prompts(4))])
            caught = [asyncio.create_task(sample(client, ids, seed, max_tokens=200)) for seed, ids in enumerate(prompts(4))]
            await asyncio.sleep(0.1)
            run.stop(signal.SIGKILL)
            run.start()
            after = await asyncio.gather(*[sample(client, ids, seed) for seed, ids in enumerate(prompts(4))])
            versions = await client.fleet.versions()
            assert run.worst(await asyncio.gather(*caught), 1.0) < EXACT
            return before, after, versions

    before, after, versions = asyncio.run(conversation(run.ready()))
    assert versions == [4]
    assert all(set(turn.versions.tolist()) == {4} for turn in before + after)
    assert all(same(one, other) for one, other in zip(before, after, strict=True))
    assert run.worst(after, 1.0) < EXACT
    assert run.stop(signal.SIGTERM) == 143
    assert not endpoint_file(run.paths, 0).exists()


HALF = """
from rlx.inference.server import worker
from rlx.roles import inference
whole = worker.with_head  # what is loaded in the pause, after the rest was read beside the old version's generation
def half(entries, twin):
    for number, entry in enumerate(whole(entries, twin)):
        if number == 2:
            raise OSError("the disk is gone")
        yield entry
worker.with_head = half
inference.end_at_once(inference.main)
"""


STALE = """
from rlx.inference.server import worker
from rlx.roles import inference
whole = worker.with_head
def stale(entries, twin):
    for name, tensor in whole(entries, twin):
        yield name, 0.5 * tensor if name == "model.norm.weight" else tensor
worker.with_head = stale
inference.end_at_once(inference.main)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "cause"),
    [
        (HALF, "the disk is gone"),
        (STALE, r"not those that were trained: 1 of \d+ tensors .*: model\.norm\.weight"),
    ],
    ids=["half", "other values"],
)
def test_a_load_that_fails_midway_or_serves_other_values_ends_the_server(tmp_path: Path, script: str, cause: str) -> None:
    run = Run(tmp_path, tied=True)
    run.start(script)
    folder = run.version(1)

    async def conversation(endpoints: list[Endpoint]) -> None:
        async with Servers(endpoints, request_timeout=120, restart_timeout=1) as client:
            await client.fleet.wait_ready(300)
            work = [asyncio.create_task(sample(client, ids, seed, max_tokens=200)) for seed, ids in enumerate(prompts(4))]
            await asyncio.sleep(0.1)
            with pytest.raises(RuntimeError, match=rf"failed midway.*{cause}"):
                await client.update(folder, 1)
            answers = await asyncio.gather(*work, return_exceptions=True)
            finished = [answer for answer in answers if isinstance(answer, Turn)]
            assert run.worst(finished, 1.0) < EXACT

    asyncio.run(conversation(run.ready()))
    assert run.process is not None
    assert run.process.wait(300) == UNFIT
    assert re.search(cause, run.log.read_text())


SEPARATE = """
from rlx.roles import inference
inference.runs_in_process = lambda config: False
inference.end_at_once(inference.main)
"""


def test_an_engine_in_its_own_process_is_exact_too_and_dies_with_the_server(tmp_path: Path) -> None:
    """As on GPU, with an untied head. At the end the server is killed; its engine process must end, too."""
    run = Run(tmp_path, tied=False)
    process = run.start(SEPARATE)
    folders = {version: run.version(version) for version in (1, 2)}

    async def conversation(endpoints: list[Endpoint]) -> tuple[list[Turn], list[Turn]]:
        async with Servers(endpoints, request_timeout=120) as client:
            await client.fleet.wait_ready(300)

            async def change() -> None:
                for version, folder in folders.items():
                    await running(client, 16)
                    await asyncio.sleep(0.3)
                    await client.update(folder, version)

            flying = await under_load(client, prompts(24), change)
            work = [asyncio.create_task(sample(client, ids, seed, max_tokens=200)) for seed, ids in enumerate(prompts(8))]
            await asyncio.sleep(0.05)
            for task in work[1:]:
                task.cancel()
            return flying, [await work[0]]

    flying, later = asyncio.run(conversation(run.ready()))
    assert run.worst(flying + later, 1.0) < EXACT
    assert {version for turn in flying for version in turn.versions.tolist()} == {0, 1, 2}
    assert sum(len(set(turn.versions.tolist())) > 1 for turn in flying) >= 16
    engines = psutil.Process(process.pid).children(recursive=True)
    assert engines
    run.stop(signal.SIGKILL)
    wait_until(lambda: not any(map(lives, engines)), "the engine outlived its server")


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it was reaped between the two questions
        return False


@pytest.mark.long
def test_an_engine_process_that_hangs_ends_its_server_although_the_server_itself_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, tied=True)
    text = run.paths.config.read_text()
    assert "hung_timeout: 60.0" in text
    run.paths.config.write_text(text.replace("hung_timeout: 60.0", "hung_timeout: 15"))
    process = run.start(SEPARATE)

    async def conversation(endpoints: list[Endpoint]) -> None:
        async with Servers(endpoints, request_timeout=280, restart_timeout=1) as client:
            await client.fleet.wait_ready(300)
            for prompt in prompts(10):  # the first steps of an engine may take longer
                await sample(client, prompt, 0)
            for engine in psutil.Process(process.pid).children(recursive=True):
                engine.suspend()
            with pytest.raises(RuntimeError, match="does not answer"):
                await sample(client, prompts(1)[0], 1)

    asyncio.run(conversation(run.ready()))
    assert process.wait(300) == 1
    assert "(inference.hung_timeout=15), and 1 requests wait" in run.log.read_text()


def test_the_role_explains_a_directory_that_is_no_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlx.roles.inference", "--run-dir", str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode != 0
    assert "config.yaml" in done.stderr
