"""The inference role around its engine. Engine and server are replaced, so these tests do not import vLLM."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch_configs import config

from rlx.heartbeat import Heartbeat, read_heartbeats
from rlx.paths import RunPaths
from rlx.roles import inference
from rlx.waiting import wait_for


class Stop(Exception):
    pass


def test_a_server_whose_model_takes_long_to_load_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RunPaths(tmp_path)
    monkeypatch.setattr("rlx.heartbeat.INTERVAL", 0.02)
    beats: list[dict] = []

    class Engine:
        @staticmethod
        async def start(*_: Any, **__: Any) -> None:
            for _ in range(3):  # blocks the event loop, as vLLM does
                beats.append(wait_for(lambda: (now := read_heartbeats(paths)["inference_0"]) not in beats and now, "another beat", 60))
            raise Stop

    monkeypatch.setitem(sys.modules, "rlx.inference.server.app", SimpleNamespace(PolicyApp=None, Server=None))
    monkeypatch.setitem(sys.modules, "rlx.inference.server.engine", SimpleNamespace(PolicyEngine=Engine))
    monkeypatch.setattr(inference, "engine_arguments", lambda *_: {})
    with socket.socket() as sock, pytest.raises(Stop):
        asyncio.run(inference.serve(config("cpu"), 0, tmp_path / "model", sock, paths, Heartbeat(paths, "inference_0")))
    assert {beat["phase"] for beat in beats} == {f"loading {tmp_path / 'model'}"}
    assert beats[0]["time"] < beats[1]["time"] < beats[2]["time"]


def test_a_server_that_hangs_while_it_loads_stops_its_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.heartbeat.INTERVAL", 0.02)
    heartbeat = Heartbeat(RunPaths(tmp_path), "inference_0")

    class Engine:
        @staticmethod
        async def start(*_: Any, **__: Any) -> None:
            wait_for(lambda: all(thread.name != "heartbeat" for thread in threading.enumerate()), "its silence", 60)
            beat = heartbeat.path.read_text()
            time.sleep(0.2)
            assert heartbeat.path.read_text() == beat
            raise Stop

    monkeypatch.setitem(sys.modules, "rlx.inference.server.app", SimpleNamespace(PolicyApp=None, Server=None))
    monkeypatch.setitem(sys.modules, "rlx.inference.server.engine", SimpleNamespace(PolicyEngine=Engine))
    monkeypatch.setattr(inference, "engine_arguments", lambda *_: {})
    cfg = config("cpu")
    cfg.inference.startup_timeout = 0.1
    with socket.socket() as sock, pytest.raises(Stop):
        asyncio.run(inference.serve(cfg, 0, tmp_path / "model", sock, heartbeat.paths, heartbeat))


@pytest.mark.parametrize(("layout", "code"), [("gpu2", 1), ("cpu", None)])
def test_a_server_on_a_gpu_ends_at_its_start_where_triton_cannot_compile(
    layout: str, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(*_: Any, **__: Any) -> None:
        raise Stop

    for name in ("die_with_parent", "answer"):  # the test's own process goes on
        monkeypatch.setattr(inference, name, lambda *_: None)
    monkeypatch.setattr(inference, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=15, SIGINT=2))
    monkeypatch.setattr(inference, "os", SimpleNamespace(register_at_fork=lambda **_: None, environ={}, getpid=os.getpid))
    monkeypatch.setattr(inference, "load_play", lambda _: config(layout))
    monkeypatch.setattr(inference, "listen", lambda *_: None)
    monkeypatch.setattr(inference, "wait_for_model", wait)
    monkeypatch.setattr(inference, "CHECK", (sys.executable, "-c", "raise SystemExit('Triton cannot compile')"))
    monkeypatch.setitem(sys.modules, "rlx.inference.server.app", SimpleNamespace())
    monkeypatch.setattr(sys, "argv", ["inference", "--run-dir", str(tmp_path)])
    if code is None:
        with pytest.raises(Stop):  # it goes on
            inference.main()
    else:
        assert inference.main() == code


def test_a_check_of_triton_that_hangs_ends_the_server_and_is_no_longer_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checking = subprocess.Popen((sys.executable, "-c", "import time; time.sleep(60)"))
    assert not inference.compiled(checking, 0.1, Heartbeat(RunPaths(tmp_path), "inference_0"))
    assert checking.returncode == -9
    assert "in 0.1 s (inference.startup_timeout)" in capfd.readouterr().err
