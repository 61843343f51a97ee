"""The inference role around its server. A small script stands in for vLLM's command line."""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch_configs import config
from ports import free_ports

from rlx.config.schema import Config
from rlx.heartbeat import Heartbeat, read_heartbeats
from rlx.inference import arguments
from rlx.inference.endpoints import endpoint_file
from rlx.paths import RunPaths
from rlx.polling import wait_for
from rlx.roles import inference

# It answers a route with the content of the file of this name. A file `503` has it answer 503, `closed` stop to listen, and `end` end.
STAND_IN = """
import os, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
folder = Path(sys.argv[2])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        file = folder / self.path.strip("/")
        right = self.headers["Authorization"] == "Bearer " + os.environ["RLX_SECRET"]
        status = 503 if (folder / "503").exists() else 200 if file.exists() else 404
        self.send_response(status if right else 401)
        self.end_headers()
        self.wfile.write(file.read_bytes() if right and file.exists() else b"")
    def log_message(self, *args):
        pass

def watch():
    while not (folder / "end").exists():
        time.sleep(0.01)
        if (folder / "closed").exists():
            server.socket.close()
    os._exit(0)

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
threading.Thread(target=watch).start()
server.serve_forever()
"""
METRICS = "vllm:num_requests_running {running}\nvllm:generation_tokens_total {made}\n"


class Role:
    """A `Server` of the role in a thread, with its stand-in's folder."""

    def __init__(self, tmp_path: Path) -> None:
        self.answers, self.paths, self.config = tmp_path / "answers", RunPaths(tmp_path / "run"), config("cpu")
        self.answers.mkdir()
        self.paths.endpoints.mkdir(parents=True)
        self.answer("health", "")
        self.code: int | None = None
        self.server: inference.EngineProcess | None = None
        self.file = endpoint_file(self.paths, 0)

    def answer(self, route: str, content: str) -> None:
        (self.answers / route).write_text(content)

    def start(self) -> None:
        self.server = inference.EngineProcess(self.config, 0, "the/model", self.paths, Heartbeat(self.paths, "inference_0"))
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.code = self.server.run()

    def ended(self) -> int | None:
        self.thread.join(60)
        return self.code


@pytest.fixture
def role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Role]:
    monkeypatch.setattr(inference, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=15, SIGINT=2, SIG_IGN=None))
    for name in ("ALIVE", "START_POLL_SECONDS", "METRICS_SECONDS"):
        monkeypatch.setattr(inference, name, 0.02)
    monkeypatch.setattr("rlx.heartbeat.INTERVAL", 0.02)
    role = Role(tmp_path)

    def command(config: Config, model: str, host: str, port: int, replica: int) -> list[str]:
        return [sys.executable, "-c", STAND_IN, str(port), str(role.answers)]

    monkeypatch.setattr(arguments, "command", command)
    yield role
    if role.server is not None:
        role.server.stop()
        role.thread.join(60)


def test_a_server_is_published_when_it_answers_and_its_address_goes_with_it(role: Role) -> None:
    (role.answers / "health").unlink()
    role.start()
    beats: list[Any] = []
    for _ in range(3):  # while vLLM loads
        beats.append(wait_for(lambda: (now := read_heartbeats(role.paths).get("inference_0")) not in [*beats, None] and now, "a beat", 60))
    assert {beat["phase"] for beat in beats} == {"loading the/model"}
    assert not role.file.exists()
    role.answer("health", "")
    wait_for(role.file.exists, "its address", 60)
    assert stat.S_IMODE(role.file.stat().st_mode) == 0o600
    found = json.loads(role.file.read_text())
    assert found["url"].startswith("http://127.0.0.1:")
    assert len(found["api_key"]) >= 32
    wait_for(lambda: read_heartbeats(role.paths)["inference_0"]["phase"] == "serving", "that it serves", 60)
    role.server.stop()
    assert not role.file.exists()
    assert role.server.process.poll() is not None
    assert role.ended() == 1


@pytest.mark.parametrize("when", ["before it served", "while it served"])
def test_an_exit_that_was_not_asked_for_is_a_failure_with_exit_code_0_too(
    role: Role, when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if when == "before it served":
        (role.answers / "health").unlink()
    role.start()
    if when == "while it served":
        wait_for(role.file.exists, "its address", 60)
    role.answer("end", "")
    assert role.ended() == 1
    assert f"vLLM ended {when}, with exit code 0; its own message is above" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["503", "closed"])
def test_a_server_whose_engine_died_is_a_failure_although_it_has_not_ended(
    role: Role, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    role.start()
    wait_for(role.file.exists, "its address", 60)
    role.answer(how, "")
    assert role.ended() == 1
    assert "vLLM's engine has died; its own message is above" in capsys.readouterr().err
    assert role.server.process.poll() is None


def test_a_server_that_does_not_serve_in_time_is_a_failure(role: Role, capsys: pytest.CaptureFixture[str]) -> None:
    (role.answers / "health").unlink()
    role.config.inference.startup_timeout = 0.3
    role.start()
    assert role.ended() == 1
    assert "vLLM did not serve the/model after 0.3 s (inference.startup_timeout)" in capsys.readouterr().err


def test_an_engine_that_makes_no_token_for_requests_that_run_hangs(role: Role, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is idle, makes tokens, or is paused does not."""
    role.config.inference.hung_timeout = 0.5
    role.answer("metrics", METRICS.format(running=0, made=0))
    role.start()
    role.thread.join(1)
    for made in range(10):
        role.answer("metrics", METRICS.format(running=3, made=made))
        role.thread.join(0.1)
    role.answer("is_paused", '{"is_paused":true}')
    role.thread.join(1)
    assert role.code is None
    assert read_heartbeats(role.paths)["inference_0"]["progress"] == 9
    role.answer("is_paused", '{"is_paused":false}')
    assert role.ended() == 1
    assert "the engine hangs: no token for " in capsys.readouterr().err


def test_a_port_that_another_process_has_is_named_if_it_was_asked_for(role: Role, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise the role tries another one."""
    (role.answers / "health").unlink()
    (port,) = free_ports(1)
    for asked in (0, port):
        role.config.inference.port = asked
        role.answer("end", "")
        with socket.create_server(("127.0.0.1", port)):  # the stand-in ends at once
            role.start()
            assert role.ended() == 1
            assert role.server.port_was_taken == bool(asked)
        assert (f"port {port} is taken.\n  fix: set inference.port to a free port" in capsys.readouterr().err) == bool(asked)


class Stop(Exception):
    pass


@pytest.mark.parametrize(("layout", "code"), [("gpu2", 1), ("cpu", None)])
def test_a_server_on_a_gpu_ends_at_its_start_where_triton_cannot_compile(
    layout: str, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(*_: Any, **__: Any) -> None:
        raise Stop

    def found(_: object) -> Config:
        return config(layout)

    for name in ("die_with_parent", "answer"):  # the test's own process goes on
        monkeypatch.setattr(inference, name, lambda *_: None)
    monkeypatch.setattr(inference, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=15, SIGINT=2))
    monkeypatch.setattr(inference, "load_play", found)
    monkeypatch.setattr(inference, "wait_for_model", wait)
    monkeypatch.setattr(inference, "CHECK", (sys.executable, "-c", "raise SystemExit('Triton cannot compile')"))
    monkeypatch.setattr(sys, "argv", ["inference", "--run-dir", str(tmp_path)])
    if code is None:
        with pytest.raises(Stop):  # it goes on
            inference.main()
    else:
        assert inference.main() == code


def test_a_check_of_triton_that_hangs_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inference, "CHECK", (sys.executable, "-c", "import time; time.sleep(60)"))
    assert not inference.can_compile(0.3, Heartbeat(RunPaths(tmp_path), "inference_0"))
    assert "in 0.3 s (inference.startup_timeout)" in capfd.readouterr().err


def test_the_role_explains_a_directory_that_is_not_a_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlx.roles.inference", "--run-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode != 0
    assert "config.yaml does not exist" in done.stderr
