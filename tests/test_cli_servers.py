"""`rlx servers` adds and removes the servers of a running run; `rlx push` makes a model card of a run's record."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from launch_configs import config

from rlx.cli import main
from rlx.config.schema import RunConfig
from rlx.inference.endpoints import Endpoint, endpoint_file, present_servers, publish_endpoint
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths
from rlx.plan.make import make_plan
from rlx.runs.run import Run
from rlx.runs.run_dir import create


class Health(BaseHTTPRequestHandler):
    """A server that asks for the key `right`."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer right" else 401)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    cfg = replace(config("cpu"), run=RunConfig(name="run", dir=str(tmp_path / "run")))
    paths, lock = create(cfg, ["loss=grpo"], make_plan(cfg, tmp_path / "run"))
    lock.close()
    return paths


def urls_of(run: RunPaths) -> list[str]:
    return [endpoint.url for endpoint in present_servers(Run(run.root).config, run)]  # type: ignore[arg-type]


def test_a_server_is_added_to_a_running_run_and_removed(
    run: RunPaths, server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Endpoint("http://127.0.0.1:9", "k")
    publish_endpoint(endpoint_file(run, 0), own)
    monkeypatch.setenv("RLX_SECRET", "right")
    assert main(["servers", "add", str(run.root), server]) == 2, "it does not run"
    monkeypatch.setattr(Run, "state", lambda self: "running")
    assert main(["servers", "add", str(run.root), server, "--key-var", "ABSENT"]) == 2
    assert "refuses the secret (401)" in capsys.readouterr().err
    for _ in range(2):
        assert main(["servers", "add", str(run.root), f"{server}/"]) == 0
    assert main(["servers", "add", str(run.root), own.url]) == 0
    assert sorted(urls_of(run)) == sorted([server, own.url]), "each is there once"
    (file,) = run.endpoints.glob("inference_added_*.json")
    assert (file.stat().st_mode & 0o777, json.loads(file.read_text())["api_key"]) == (0o600, "right")
    capsys.readouterr()
    assert main(["servers", "list", str(run.root)]) == 0
    said = capsys.readouterr().out
    assert f"{server}   serves" in said
    assert "right" not in said
    assert main(["servers", "remove", str(run.root), server]) == 0
    assert main(["servers", "remove", str(run.root), own.url]) == 2
    assert "is the run's last server" in capsys.readouterr().err
    assert urls_of(run) == [own.url]


@pytest.mark.parametrize("argv", [["add"], ["list", "http://x"], ["remove"]])
def test_wrong_arguments_of_servers_are_named(argv: list[str], run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["servers", argv[0], str(run.root), *argv[1:]]) == 2
    assert "URL" in capsys.readouterr().err


def test_a_model_card_says_where_the_weights_come_from(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(2, 14):  # a fork begins at its source's step; later steps are of later versions
        MetricsWriter(run.metrics, "orchestrator").write(step, {"reward/mean": 0.25 if step < 7 else 0.75 if step < 12 else 0.0})
    MetricsWriter(run.metrics, "eval").write(12, {"eval/math/avg@1": 0.5})
    assert main(["push", str(run.root), "me/mine", "--dry-run"]) == 2, "there are no weights"
    capsys.readouterr()
    (run.weights / "step_12").mkdir(parents=True)
    monkeypatch.setattr("rlx.weights.files.versions", lambda _: [12])
    monkeypatch.setattr("rlx.weights.files.verify", lambda _: {})
    assert main(["push", str(run.root), "me/mine", "--dry-run"]) == 0
    card = capsys.readouterr().out
    assert card.startswith("---\nlibrary_name: transformers\n")
    for line in ("# mine", "| mean reward, first and last 5 steps | 0.250 → 0.750 |", "| math avg@1 | 0.500 |", "| environments | math |"):
        assert line in card
    assert "| commit |" in card
