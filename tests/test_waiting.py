"""Waits between processes: what does not count as waiting, how a process says that it is busy, and who waits for what."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from policy_stand_in import load, tiny_chat
from test_orchestrator_run import StandInServers, StandInTrainer, config_of

from rlx.aio import first_failure
from rlx.config.schema import Config
from rlx.data.source import OrchestratorSource
from rlx.envs.load import give_policy, load_tokenizer
from rlx.heartbeat import FETCHING, SILENT, WAITING_FOR_MODEL, AtWork, Heartbeat, read_heartbeats
from rlx.inference.endpoints import read_endpoints
from rlx.parallel.mesh import one_process
from rlx.paths import RunPaths
from rlx.polling import Pause, Preempted, WaitTimeout, wait_for
from rlx.roles.orchestrator import Orchestrator
from rlx.roles.prepare import follow
from rlx.shared.membership import LivenessLock, is_present
from rlx.trace import Turn
from rlx.train.watch import Watch
from rlx.weights import hub


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def seconds_until_given_up(wait) -> float:  # type: ignore[no-untyped-def]
    began = time.monotonic()
    with pytest.raises(WaitTimeout):
        wait()
    return time.monotonic() - began


def test_excused_time_does_not_count(clock: Clock) -> None:
    until = clock.now + 30
    excused = seconds_until_given_up(lambda: wait_for(lambda: False, "it", 10, excused=lambda: clock.now < until))
    assert excused == pytest.approx(40, rel=0.02)
    assert seconds_until_given_up(lambda: wait_for(lambda: False, "it", 10, excused=lambda: False)) == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize(("phase", "longer"), [(WAITING_FOR_MODEL, True), (f"{FETCHING} me/large", True), ("loading", False)])
def test_a_server_is_waited_for_as_long_as_it_says_that_its_model_is_not_there(
    clock: Clock, tmp_path: Path, phase: str, longer: bool
) -> None:
    paths = RunPaths(tmp_path)
    server = Heartbeat(paths, "inference_0")
    until = clock.now + 60

    def beat() -> None:
        if clock.now < until:
            server.beat(phase)

    took = seconds_until_given_up(lambda: read_endpoints(paths, 1, timeout=10, tick=beat))
    assert took == pytest.approx(60 + SILENT + 10 if longer else 10, rel=0.02)


def test_the_initial_model_is_waited_for_as_long_as_somebody_makes_it(clock: Clock, tmp_path: Path) -> None:
    paths, config = RunPaths(tmp_path), Config(max_steps=1)
    config.inference.startup_timeout = 10
    prepare = Heartbeat(paths, "prepare")
    until = clock.now + 60

    def beat(phase: str) -> None:
        assert phase == WAITING_FOR_MODEL
        if clock.now < until:
            prepare.beat("waiting for another run that makes the same model")

    assert seconds_until_given_up(lambda: load_tokenizer(config, paths, beat)) == pytest.approx(60 + SILENT + 10, rel=0.02)


def test_a_trainer_waits_for_the_initial_model_as_long_as_somebody_makes_it(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "TIMEOUT", 10)
    paths, until = RunPaths(tmp_path), clock.now + 60
    watch, prepare = Watch(paths, "trainer", first=True, grace=1.0), Heartbeat(paths, "prepare")
    monkeypatch.setattr(watch, "tick", lambda: clock.now < until and prepare.beat("loading environments"))
    took = seconds_until_given_up(lambda: hub.initial_model(Config(max_steps=1), paths, one_process("cpu"), watch))
    assert took == pytest.approx(60 + SILENT + 10, rel=0.02)


def test_a_warm_start_whose_trainer_says_nothing_is_as_silent_as_its_trainer(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = clock.now
    trainer = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now > began + 100:
            trainer.kill()

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(SystemExit):
        follow(trainer, RunPaths(tmp_path / "warm"), 5, Heartbeat(RunPaths(tmp_path), "prepare"))
    beat = read_heartbeats(RunPaths(tmp_path))["prepare"]
    assert (beat["phase"], beat["time"]) == ("starting the warm start", began)


def test_a_sign_of_life_that_is_not_there_yet_is_never_looked_up_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system that was asked for an absent name may go on answering for a minute that the name does not exist."""
    paths, looked_up, open_file, open_fd = RunPaths(tmp_path), [], io.open, os.open
    paths.heartbeats.mkdir()
    paths.membership.mkdir()
    monkeypatch.setattr(io, "open", lambda path, *arguments, **keys: looked_up.append(path) or open_file(path, *arguments, **keys))
    monkeypatch.setattr(os, "open", lambda path, *arguments, **keys: looked_up.append(path) or open_fd(path, *arguments, **keys))
    assert not is_present(paths)
    assert not AtWork(paths, "prepare")()
    assert looked_up == []
    LivenessLock(paths)
    Heartbeat(paths, "prepare").beat("warm start")
    assert is_present(paths)
    assert AtWork(paths, "prepare")()
    assert looked_up != []


def test_a_file_that_somebody_left_behind_is_no_work(clock: Clock, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert not AtWork(paths, "prepare")()
    Heartbeat(paths, "prepare").beat("warm start")
    at_work = AtWork(paths, "prepare")
    assert at_work()
    clock.sleep(SILENT + 1)
    assert not at_work()


def test_a_process_in_a_long_call_goes_on_beating_and_stops_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.heartbeat.INTERVAL", 0.02)
    paths = RunPaths(tmp_path)
    heartbeat = Heartbeat(paths, "inference_0")
    with heartbeat.during("fetching me/large"):
        first = read_heartbeats(paths)["inference_0"]
        second = wait_for(lambda: (now := read_heartbeats(paths)["inference_0"])["time"] > first["time"] and now, "another beat", 60)
    assert (first["phase"], second["phase"]) == ("fetching me/large",) * 2
    ended = heartbeat.path.read_text()
    time.sleep(0.1)
    assert json.loads(heartbeat.path.read_text()) == json.loads(ended)


def test_a_call_that_takes_longer_than_its_limit_stops_beating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.heartbeat.INTERVAL", 0.02)
    now = [0.0]
    monkeypatch.setattr("rlx.heartbeat.time.monotonic", lambda: now[0])
    heartbeat = Heartbeat(RunPaths(tmp_path), "inference_0")
    others = set(threading.enumerate())
    with heartbeat.during("loading a model", limit=1.0):
        (beating,) = set(threading.enumerate()) - others
        first = heartbeat.path.read_text()
        while heartbeat.path.read_text() == first:
            time.sleep(0.01)
        now[0] = 1.1
        beating.join(60)
        assert not beating.is_alive()
        last = heartbeat.path.read_text()
        time.sleep(0.1)
        assert heartbeat.path.read_text() == last


def test_a_poll_is_late_by_one_percent_of_the_wait_at_most_and_by_100_ms(clock: Clock) -> None:
    pause = Pause(0.002)
    found = {}
    for waited in (0.0, 0.1, 0.5, 2.0, 60.0):
        clock.now = 1000.0 + waited
        found[waited] = round(pause.seconds(), 6)
    assert found == {0.0: 0.002, 0.1: 0.002, 0.5: 0.005, 2.0: 0.02, 60.0: 0.1}


def test_a_trainer_that_waits_asks_the_file_system_a_few_times_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second minute of waiting for a batch: the folder of batches ten times a second, the run's four times, that of heartbeats twice.

    No absent name is looked up, neither to open it nor otherwise.
    """
    paths = RunPaths(tmp_path)
    paths.batches.mkdir()
    paths.heartbeats.mkdir()
    watch = Watch(paths, "trainer", first=True, grace=1.0)
    clock = Clock(monkeypatch)
    watch.beat = lambda *_: None  # it writes a file every half second
    asked: list[tuple[float, str]] = []
    listing, look_up, open_file = os.listdir, os.stat, io.open

    def counted(folder: str) -> list[str]:
        asked.append((clock.now, f"list {Path(folder).name}"))
        return listing(folder)

    def looked_up(path, *arguments, **keys):  # type: ignore[no-untyped-def]
        if not isinstance(path, int) and str(tmp_path) in str(path):
            asked.append((clock.now, f"look up {path}"))
        return look_up(path, *arguments, **keys)

    monkeypatch.setattr(os, "listdir", counted)

    def opened(path, *arguments, **keys):  # type: ignore[no-untyped-def]
        asked.append((clock.now, f"open {path}"))
        return open_file(path, *arguments, **keys)

    monkeypatch.setattr(os, "stat", looked_up)
    monkeypatch.setattr(io, "open", opened)
    with pytest.raises(WaitTimeout):
        OrchestratorSource(paths, one_process("cpu"), 120.0).receive(3, watch.tick)
    monkeypatch.undo()
    last = [what for when, what in asked if when > 1060.0]
    assert set(last) == {"list batches", "list heartbeats", f"list {tmp_path.name}"}
    assert last.count("list batches") <= 60 * 10 + 1
    assert last.count("list heartbeats") <= 60 * 2 + 1
    assert len(last) <= 60 * 17
    first = [what for when, what in asked if when <= 1001.0]
    assert first.count("list batches") >= 100, "a batch that comes soon is seen at once"


def test_a_step_is_given_up_by_the_clock_of_its_own_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system's clock is a day behind, so the notice seems to be that old."""
    paths, mesh, clock = RunPaths(tmp_path), one_process("cpu"), Clock(monkeypatch)
    watch = Watch(paths, "trainer", first=True, grace=5.0)
    paths.ask_to_give_way()
    os.utime(paths.preempt, (time.time() - 86400,) * 2)
    watch.raise_if_grace_over(mesh)
    clock.now += 4.0
    watch.raise_if_grace_over(mesh)
    clock.now += 2.0
    with pytest.raises(Preempted):
        watch.raise_if_grace_over(mesh)


def test_only_rank_0_looks_for_the_notice(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    first, other = (Watch(paths, "trainer", first=first, grace=1.0) for first in (True, False))
    paths.ask_to_give_way()
    assert (first.preemption_requested(), other.preemption_requested()) == (True, False)


async def test_the_heartbeat_says_who_waits_for_what(tmp_path: Path) -> None:
    said = asyncio.Event()

    class Waiting(StandInServers):
        async def generate(self, *asked: Any) -> Turn:
            await said.wait()
            return await super().generate(*asked)

    class Slow(StandInTrainer):
        async def run(self) -> None:
            for phase in ("rollouts 0/8", "waiting for weights 1"):
                while read_heartbeats(self.paths).get("orchestrator", {}).get("phase") != phase:
                    await asyncio.sleep(0.05)
                said.set()
            await super().run()

    config = config_of(max_steps=2)
    paths = RunPaths(tmp_path)
    envs = {"e": load("rlx_reverse_text", sampling={"max_tokens": 12, "temperature": 1.0})}
    served: Any = Waiting()
    give_policy(envs, config, tiny_chat(), served)

    orchestrator = Orchestrator(config, paths, envs, served, served, Heartbeat(paths, "orchestrator"))
    await asyncio.wait_for(first_failure(orchestrator.run(), Slow(paths, config).run()), 120)
