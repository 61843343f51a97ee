"""The inference role around its engine. Engine and server are replaced, so these tests do not import vLLM."""

from __future__ import annotations

import asyncio
import socket
import sys
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
