"""Waits between processes: what does not count as waiting, and how a process says that it is busy."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from rlx.config.schema import Config
from rlx.envs.load import load_tokenizer
from rlx.heartbeat import FETCHING, WAITING_FOR_MODEL, AtWork, Heartbeat, read_heartbeats
from rlx.inference.endpoints import read_endpoints
from rlx.paths import RunPaths
from rlx.waiting import WaitTimeout, wait_for


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.heartbeat.INTERVAL", 0.02)
    monkeypatch.setattr("rlx.heartbeat.SILENT", 0.15)


def seconds_until_given_up(wait) -> float:  # type: ignore[no-untyped-def]
    began = time.monotonic()
    with pytest.raises(WaitTimeout):
        wait()
    return time.monotonic() - began


def test_excused_time_does_not_count() -> None:
    until = time.monotonic() + 0.3
    assert seconds_until_given_up(lambda: wait_for(lambda: False, "it", 0.1, excused=lambda: time.monotonic() < until)) > 0.39
    assert seconds_until_given_up(lambda: wait_for(lambda: False, "it", 0.1, excused=lambda: False)) < 0.3


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("phase", "longer"), [(WAITING_FOR_MODEL, True), (f"{FETCHING} me/large", True), ("loading", False)])
def test_a_server_is_waited_for_as_long_as_it_says_that_its_model_is_not_there(tmp_path: Path, phase: str, longer: bool) -> None:
    paths = RunPaths(tmp_path)
    server = Heartbeat(paths, "inference_0")
    until = time.monotonic() + 0.4

    def beat() -> None:
        if time.monotonic() < until:
            server.beat(phase)

    took = seconds_until_given_up(lambda: read_endpoints(paths, 1, timeout=0.1, tick=beat))
    assert (took > 0.5) == longer, f"given up after {took:.2f} s"


@pytest.mark.usefixtures("quick")
def test_the_initial_model_is_waited_for_as_long_as_somebody_makes_it(tmp_path: Path) -> None:
    paths, config = RunPaths(tmp_path), Config(max_steps=1)
    config.inference.startup_timeout = 0.1
    prepare = Heartbeat(paths, "prepare")
    until = time.monotonic() + 0.4

    def beat(phase: str) -> None:
        assert phase == WAITING_FOR_MODEL
        if time.monotonic() < until:
            prepare.beat("waiting for another run that makes the same model")

    assert seconds_until_given_up(lambda: load_tokenizer(config, paths, beat)) > 0.5


@pytest.mark.usefixtures("quick")
def test_a_file_that_somebody_left_behind_is_no_work(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert not AtWork(paths, "prepare")()
    Heartbeat(paths, "prepare").beat("warm start")
    at_work = AtWork(paths, "prepare")
    assert at_work()
    time.sleep(0.2)
    assert not at_work()


@pytest.mark.usefixtures("quick")
def test_a_process_in_a_long_call_goes_on_beating_and_stops_with_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    heartbeat = Heartbeat(paths, "inference_0")
    with heartbeat.during("fetching me/large"):
        first = read_heartbeats(paths)["inference_0"]
        time.sleep(0.15)
        second = read_heartbeats(paths)["inference_0"]
    assert (first["phase"], second["phase"]) == ("fetching me/large",) * 2
    assert second["time"] > first["time"]
    ended = heartbeat.path.read_text()
    time.sleep(0.1)
    assert json.loads(heartbeat.path.read_text()) == json.loads(ended)
