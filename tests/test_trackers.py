"""MLflow and Trackio as their libraries are called, with stand-ins for these, the page for Prometheus, and which role forwards."""

from __future__ import annotations

import json
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_tracking_services import run_tracker, write_metrics

from rlx.config.load import compose
from rlx.config.roots import SFT, TRAIN, Root
from rlx.metrics import MetricsWriter
from rlx.parallel.rendezvous import Place
from rlx.paths import RunPaths
from rlx.tracking import open_tracker, tracks


class StandIn:
    """A stand-in of a service's library: every call is recorded with its name, and returns it or what `results` say."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []
        self.results = results

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            self.calls.append((name, args, named))
            return self.results.get(name, self)

        return call

    def of(self, name: str) -> list[tuple]:
        return [args for called, args, _ in self.calls if called == name]


def test_mlflow_gets_every_attempt_as_one_run_with_names_that_it_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    library = StandIn({"search_runs": [], "create_run": run, "get_experiment_by_name": None, "create_experiment": "7"})
    library.entities = SimpleNamespace(Metric=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", library)
    paths = RunPaths(tmp_path)
    run_tracker(paths, compose(["logger=mlflow", "logger.mlflow.uri=http://tracker"], {}).cfg)
    assert library.of("set_tracking_uri") == [("http://tracker",)]
    (_, metrics), *_ = library.of("log_batch")
    assert metrics[0][0::3] == ("reward/mean", 0)
    assert [file for _, _, file in library.of("log_text")] == ["rollouts/step_000000.json"]
    MetricsWriter(paths.metrics, "eval").write(2, {"eval/sums/avg@1": 0.5})
    library.results["search_runs"] = [run]
    tracker = open_tracker(compose(["logger=mlflow"], {}).cfg, paths)
    assert tracker is not None
    tracker.close()
    assert len(library.of("create_run")) == 1, "the second attempt goes on with the first one's run"
    assert library.of("log_batch")[-1][1][0][0] == "eval/sums/avg_1", "MLflow refuses other signs"
    assert library.of("search_runs")[0] == library.of("search_runs")[1], "it is found by the run's own id"


def test_trackio_gets_metrics_samples_and_histograms_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = StandIn({})
    monkeypatch.setitem(sys.modules, "trackio", library)
    run_tracker(RunPaths(tmp_path), compose(["logger=trackio", "run.name=mine"], {}).cfg)
    assert [named["step"] for name, _, named in library.calls if name == "log"] == [0, 0, 1, 1, 0, 0]
    (init,) = (named for name, _, named in library.calls if name == "init")
    assert (init["name"].startswith("mine-"), init["resume"], init["space_id"]) == (True, "allow", None)
    assert len(library.of("Histogram")) == 3
    assert library.of("finish") == [()]


def test_prometheus_gets_the_newest_values_with_the_runs_key_alone(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    tracker = open_tracker(compose(["logger=prometheus"], {}).cfg, paths)
    assert tracker is not None
    write_metrics(paths)
    tracker.forward()
    file = paths.endpoints / "metrics.json"
    assert file.stat().st_mode & 0o777 == 0o600
    found = json.loads(file.read_text())
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(found["url"])
    asked = urllib.request.Request(found["url"], headers={"Authorization": f"Bearer {found['api_key']}"})
    with urllib.request.urlopen(asked) as answer:
        page = answer.read().decode()
    assert f'rlx_reward_mean{{run="{tmp_path.name}"}} 1.25' in page
    assert f'rlx_step{{run="{tmp_path.name}"}} 1.0' in page
    host, port = found["url"].removeprefix("http://").removesuffix("/metrics").split(":")
    with socket.create_connection((host, int(port))):  # a client that says nothing
        urllib.request.urlopen(asked, timeout=10).close()
        tracker.close()
    assert not file.exists()


@pytest.mark.parametrize(
    ("root", "keys", "role"),
    [
        (TRAIN, [], "orchestrator"),
        (TRAIN, ["replay=x"], "trainer"),
        (TRAIN, ["bench=true"], "trainer"),
        (SFT, ["data=fake"], "trainer"),
        (SFT, ["data=fake", "bench=true"], "trainer"),
        (SFT, ["data=fake", "env=reverse_text", "eval.interval=5"], "evaluator"),
    ],
)
def test_one_role_forwards_the_metrics_of_all(root: Root, keys: list[str], role: str) -> None:
    cfg = compose([*keys, "dry_run=true"], {}, root).cfg
    assert [name for name in ("orchestrator", "evaluator", "trainer", "trainer_1") if tracks(cfg, name)] == [role]


def test_of_the_trainers_ranks_the_first_forwards() -> None:
    cfg = compose(["data=fake", "dry_run=true"], {}, SFT).cfg
    places = [Place.of({"RANK": str(rank), "WORLD_SIZE": "2"}) for rank in (0, 1)]
    assert [tracks(cfg, place.name) for place in places] == [True, False]
