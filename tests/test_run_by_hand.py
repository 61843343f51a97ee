"""A run whose roles are started one by one, each by its own command, on one host or on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from inference_server import make_model
from main_job import read_metrics, reproducible_lines
from two_hosts import ADDRESSES, WIRE, command, two_hosts

pytestmark = [pytest.mark.slow]
SHORT = ("max_steps=3", "max_async_level=0", "orchestrator.batch_size=32")
LIMIT = 600  # seconds: it only ends what hangs


class Hand:
    """Processes of one run directory, each with a log beside it."""

    def __init__(self, run_dir: Path, *keys: str) -> None:
        self.run_dir, self.keys = run_dir, keys
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, *words: str, host: Sequence[str] = (), variables: dict[str, str] | None = None) -> None:
        name = "-".join([role, *words]).replace("--replica-", "")
        line = [*host, sys.executable, "-m", "rlx.cli", role, f"run.dir={self.run_dir}", *self.keys, *words]
        with self.log(name).open("wb") as log:
            environment = os.environ | {"HF_HUB_OFFLINE": "1"} | (variables or {})
            self.started[name] = subprocess.Popen(line, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def log(self, name: str) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}-{name}.log")

    def wait(self) -> None:
        """Until every role but the server's has ended well."""
        waiting = [name for name in self.started if name != "inference"]
        deadline = time.monotonic() + LIMIT
        while waiting:
            for name in [each for each in waiting if self.started[each].poll() is not None]:
                assert self.started[name].returncode == 0, f"{name}:\n{self.log(name).read_text()[-4000:]}"
                waiting.remove(name)
            assert time.monotonic() < deadline, "\n".join(f"{name}:\n{self.log(name).read_text()[-2000:]}" for name in self.started)
            time.sleep(0.1)

    def end(self) -> None:
        for process in self.started.values():
            process.kill()
            process.wait()


@contextmanager
def by_hand(run_dir: Path, *keys: str) -> Iterator[Hand]:
    hand = Hand(run_dir, *keys)
    try:
        yield hand
    finally:
        hand.end()


@pytest.mark.long
def test_four_role_commands_do_what_train_does_and_the_server_outlives_them(start, tmp_path: Path, model_cache: Path) -> None:
    """Of a run on policy every number is the same."""
    with by_hand(tmp_path / "mine", *SHORT) as hand:
        for role in ("prepare", "inference", "orchestrator", "trainer"):
            hand.start(role, variables={"RLX_CACHE": str(model_cache)})
        hand.wait()
        assert hand.started["inference"].poll() is None
    assert (hand.run_dir / "logs" / "latest" / "env_reverse_text_0.log").exists()
    job = start("train", *SHORT)
    assert job.wait() == 0, job.text()

    def of_sources(lines: list[dict[str, object]]) -> dict[str, list[dict[str, object]]]:
        return {source: [line for line in lines if line["source"] == source] for source in ("orchestrator", "trainer")}

    by_train = of_sources(job.reproducible_lines())
    assert [line["step"] for line in by_train["trainer"]] == [0, 1, 2]
    assert of_sources(reproducible_lines(hand.run_dir)) == by_train


@pytest.mark.long
def test_role_commands_on_two_hosts_find_each_other(tmp_path: Path) -> None:
    """A server on the first host, the orchestrator on the second, and a model sharded over a trainer rank on each.

    Each host has an interface that leads nowhere, so the one between them must be named.
    """
    make_model(tmp_path / "experts", tied=True, seed=0, experts=4)
    model = ("model=tiny_trained", f"model.name={tmp_path / 'experts'}", "model.num_experts=4")
    layout = ("hardware=cpu", "hardware.nodes=3", "hardware.trainer_processes=2")
    places = ((0, "inference"), (1, "orchestrator"), (1, "trainer"), (0, "trainer --replica 1"))
    with two_hosts() as hosts, by_hand(tmp_path / "mine", *SHORT, *model, *layout) as hand:
        for host in hosts:
            command(*host, "ip", "link", "add", "name", "other0", "type", "veth", "peer", "name", "other1")
            command(*host, "ip", "address", "add", "10.78.0.1/24", "dev", "other0")
            for name in ("other0", "other1"):
                command(*host, "ip", "link", "set", name, "up")
        for index, role in places:
            variables = {"RLX_HOST": ADDRESSES[index], "GLOO_SOCKET_IFNAME": WIRE}
            hand.start(*role.split(), host=hosts[index], variables=variables)
        hand.wait()
        found = json.loads((hand.run_dir / "endpoints" / "inference_0.json").read_text())
    assert found["url"].startswith(f"http://{ADDRESSES[0]}:")
    trained = [line for line in read_metrics(hand.run_dir) if line["source"] == "trainer"]
    assert [line["step"] for line in trained] == [0, 1, 2]
    assert max(line["mismatch/kl"] for line in trained) < 1e-6, "the server samples with what both ranks have trained"
