"""Real servers with two data-parallel engines: weights, versions, pauses and deaths reach both, also if the second is on another host."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from inference_server import EXACT, START, MemoryTrainer, Run, from_memory, prompts, running, sample, under_load
from run_servers import Servers
from two_hosts import ADDRESSES, WIRE, inside, two_hosts

from rlx.config.load import load_run, to_yaml
from rlx.inference.endpoints import Endpoint, endpoint_file
from rlx.inference.protocol import InferenceError
from rlx.process import HOST
from rlx.types import Turn
from rlx.waiting import UNFIT

pytestmark = [pytest.mark.slow, pytest.mark.long]
PROMPTS = prompts(6)


def of_experts(root: Path, **hardware: int) -> Run:
    run = Run(root, tied=True, experts=4)
    config = load_run(root)
    config.hardware.data_parallel = 2
    for name, value in hardware.items():
        setattr(config.hardware, name, value)
    run.paths.config.write_text(to_yaml(config))
    return run


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """This process is on the first of two hosts."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", WIRE)
    with two_hosts() as found, inside(found[0]):
        yield found


def test_weights_and_pauses_reach_an_engine_on_another_host_and_its_death_ends_the_server(
    hosts: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token has the log-probability that Hugging Face gives under the version that the token claims, whichever engine sampled it."""
    run = from_memory(of_experts(tmp_path, data_parallel_local=1, nodes=2))
    monkeypatch.setenv(HOST, ADDRESSES[0])  # as the supervisor sets it
    head = run.start()
    command = [*hosts[1], sys.executable, "-m", "rlx.roles.headless", "--run-dir", str(tmp_path)]
    with (tmp_path / "headless.log").open("wb") as log:
        part = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {HOST: ADDRESSES[1], "HF_HUB_OFFLINE": "1"})
    trainer = MemoryTrainer(run, 60.0, ADDRESSES[0])

    async def conversation(endpoints: list[Endpoint]) -> None:
        async with Servers(endpoints, request_timeout=120, restart_timeout=1) as servers:
            await servers.fleet.wait_ready(120)

            async def change() -> None:
                await running(servers, len(PROMPTS))
                await servers.update(run.version(1), 1)
                trainer.offer(2)
                await trainer.update(servers)

            turns = await under_load(servers, PROMPTS, change)
            assert {0, 2} <= {version for turn in turns for version in turn.versions.tolist()}
            assert run.worst(turns, 1.0) < EXACT
            state = (await servers.fleet.states())[0]
            assert (state.version, state.attested > 0) == (2, True), "a CPU engine packs experts, and cannot compare them"

    try:
        asyncio.run(conversation(run.ready()))
        part.send_signal(signal.SIGKILL)
        assert head.wait(60) == 1
    finally:
        for process in (head, part):
            process.kill()
            process.wait()
    assert f"a part of this server is gone, headless_0 on {ADDRESSES[1]}: its connection closed" in run.log.read_text()
    assert not endpoint_file(run.paths, 0).exists()


ENGINE_1_WRONG = f"""
from rlx.inference.server import worker
attest = worker.PolicyWorker.attest_policy
def wrong(self, trained, *beside):
    if self.vllm_config.parallel_config.data_parallel_index == 1 and self.reading.folder.name == 'step_2':
        self.model_runner.get_model().model.norm.weight[3] += 1e-3
    return attest(self, trained, *beside)
worker.PolicyWorker.attest_policy = wrong
{START}
"""


def test_wrong_weights_in_the_second_engine_of_one_process_end_the_server_before_it_generates_a_token_of_them(tmp_path: Path) -> None:
    run = of_experts(tmp_path)
    head = run.start(ENGINE_1_WRONG)

    async def conversation(endpoints: list[Endpoint]) -> list[Turn]:
        async with Servers(endpoints, request_timeout=120, restart_timeout=1) as servers:
            await servers.fleet.wait_ready(120)
            await servers.update(run.version(1), 1)
            turns = await asyncio.gather(*(sample(servers, ids, number) for number, ids in enumerate(PROMPTS)))
            with pytest.raises(InferenceError, match=r"failed midway.*1 of \d+ tensors differ: model\.norm\.weight"):
                await servers.update(run.version(2), 2)
            return turns

    try:
        turns = asyncio.run(conversation(run.ready()))
        assert head.wait(60) == UNFIT
    finally:
        head.kill()
        head.wait()
    assert {version for turn in turns for version in turn.versions.tolist()} == {1}
    assert run.worst(turns, 1.0) < EXACT
