"""Two hosts by hand: `rlx pod` in two network namespaces, which share the file system and one wire, as two machines do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from main_job import read_metrics
from two_hosts import ADDRESSES, WIRE, two_hosts

from rlx.plan.process_spec import read_plan

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def hosts() -> Iterator[list[list[str]]]:
    with two_hosts() as found:
        yield found


def test_a_server_on_one_host_samples_with_the_weights_of_a_trainer_on_the_other(
    hosts: list[list[str]], tmp_path: Path, model_cache: Path
) -> None:
    pod = ["-m", "rlx.cli", "pod", "--job", "mine", "--nodes", "2", "--volume", str(tmp_path)]
    keys = ["hardware=cpu", "hardware.nodes=2", "max_steps=3", "max_async_level=0", "orchestrator.batch_size=32", "model.dtype=float32"]
    at = ",".join(f"{address}:8470" for address in ADDRESSES)
    started = []
    for index, inside in enumerate(hosts):
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "RLX_CACHE": str(model_cache)}
        environment |= {"JOB_COMPLETION_INDEX": str(index), "JOB_UID": "7", "GLOO_SOCKET_IFNAME": WIRE}
        with (tmp_path / f"host{index}.log").open("wb") as log:
            words = [*inside, sys.executable, *pod, "--hosts", at, "train", *keys]
            started.append(subprocess.Popen(words, env=environment, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT))
    try:
        told = [tmp_path / "host0.log", *(tmp_path / "mine" / "logs" / "attempt_0" / f"{role}.log" for role in ("inference_0", "trainer"))]
        code = started[0].wait(800)
        assert code == 0, "\n".join(file.read_text()[-3000:] for file in told if file.exists())
        assert started[1].wait(120) == 0
    finally:
        for each in started:
            each.kill()
    run = tmp_path / "mine"
    processes = {spec.role: spec.node for spec in read_plan(run / "plan.yaml")}
    assert processes["inference"] != processes["trainer"], processes
    trained = [record for record in read_metrics(run) if record["source"] == "trainer"]
    assert [record["step"] for record in trained] == [0, 1, 2]
    assert max(record["mismatch/kl"] for record in trained) < 1e-6
