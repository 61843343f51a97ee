"""What `rlx pod`, the command of the containers on Kubernetes, adds to a run's command line, and how its hosts end."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_kubernetes_chart import container_of, rendered

from rlx.cli import pod
from rlx.config.load import compose, to_yaml
from rlx.config.roots import TRAIN
from rlx.paths import RunPaths
from rlx.polling import LEFT
from rlx.runs.status import Status, read_status

Pod = Callable[..., Any]


@pytest.fixture
def in_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    """`in_pod(**values)`: the configuration that host 0 composes from the chart's objects, with their ConfigMap in `tmp_path`."""
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    said: list[tuple[Namespace, list[str]]] = []

    def remember(given: Namespace, overrides: list[str]) -> int:
        said.append((given, overrides))
        return 0

    monkeypatch.setattr(pod, "_host", remember)

    def composed(**values: Any) -> Any:
        objects = rendered(**values)
        if "ConfigMap" in objects:
            (tmp_path / "config.yaml").write_text(objects["ConfigMap"]["data"]["config.yaml"])
        assert pod.run([str(tmp_path) if each == "/etc/rlx" else each for each in container_of(objects)["args"]]) == 0
        return compose(pod.arguments(*said[-1], TRAIN), None, TRAIN).cfg

    return composed


def host(
    index: int, volume: Path, monkeypatch: pytest.MonkeyPatch, nodes: int = 2, by_hand: bool = False, more: tuple[str, ...] = ()
) -> int:
    """Run the command as one host of a Job whose agents have free ports. `by_hand`: with their addresses."""
    monkeypatch.setattr("rlx.launch.agents.PORT", 0)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
    monkeypatch.setenv("JOB_UID", "7")
    monkeypatch.setattr(pod.signal, "signal", lambda *_: None)  # this process keeps its handlers
    hosts = ["--hosts", ",".join(["127.0.0.1:0"] * nodes)] if by_hand else []
    overrides = ["hardware=cpu", "run.name=mine", *more]
    return pod.run(["--job", "mine", "--nodes", str(nodes), "--volume", str(volume), *hosts, "train", *overrides])


@pytest.mark.parametrize(("gpus", "layout"), [(0, "cpu"), (8, "node8")])
def test_the_charts_defaults_start_a_run_on_the_gpus_of_its_pods(in_pod: Pod, gpus: int, layout: str):
    cfg = in_pod(gpusPerNode=gpus)
    assert (cfg.launcher.name, cfg.hardware.name, cfg.run.name, cfg.run.dir) == ("local", layout, "mine", None)


def test_the_charts_own_example_starts(in_pod: Pod):
    assert in_pod(arguments=["loss=gspo", "env=math"]).hardware.name == "cpu"


def test_a_configuration_that_was_written_elsewhere_runs_on_the_volume(in_pod: Pod):
    here = compose(["hardware=cpu", "run.dir=/home/me/outputs/first", "run.name=first"], environ={}).cfg
    cfg = in_pod(config=to_yaml(here))
    assert (cfg.run.name, cfg.run.dir) == ("mine", None), "then the place is <volume>/mine"
    named = in_pod(config=to_yaml(here), arguments=["run.name=other"])
    assert (named.run.name, named.run.dir) == ("other", None)


def test_the_pods_take_secret_keys_from_the_variables_of_their_secrets(in_pod: Pod, monkeypatch: pytest.MonkeyPatch):
    teacher = ["loss=opd", "teacher.base_url=[http://host:8000]"]
    saved = to_yaml(compose(["hardware=cpu", *teacher], environ={}).cfg)
    monkeypatch.setenv("RLX_INFERENCE__API_KEY", "a b")
    monkeypatch.setenv("RLX_TEACHER__API_KEY", "0123")
    for found in (in_pod(config=saved), in_pod(arguments=teacher)):
        assert (found.inference.api_key, found.teacher.api_key) == ("a b", "0123")


def test_a_host_that_is_replaced_as_the_run_ends_learns_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".nodes").mkdir()
    monkeypatch.setattr(pod, "_first", lambda *_: 3)
    assert host(0, tmp_path, monkeypatch) == 3
    assert host(1, tmp_path, monkeypatch) == 3
    monkeypatch.setattr(pod, "_first", lambda *_: LEFT)
    assert host(0, tmp_path, monkeypatch) == LEFT
    assert [each.name for each in (tmp_path / ".nodes").iterdir()] == [], "a preempted run goes on, and its hosts with it"


def test_a_host_that_starts_before_the_first_one_does_not_end_with_the_last_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".nodes").mkdir()
    monkeypatch.setattr(pod, "_first", lambda *_: 0)
    assert host(0, tmp_path, monkeypatch, by_hand=True) == 0
    looks: list[str | None] = []

    def serve(agent: object, index: int, end: Callable[[], str | None]) -> int:
        looks.append(end())
        monkeypatch.setattr(pod, "_first", lambda *_: 3)
        assert host(0, tmp_path, monkeypatch, by_hand=True) == 3, "the first host comes, runs the next attempt, and fails"
        looks.append(end())
        return int(str(looks[-1]).split()[0])

    monkeypatch.setattr(pod, "_serve", serve)
    assert host(1, tmp_path, monkeypatch, by_hand=True) == 3
    assert looks[0] is None


def test_a_restart_waits_for_lost_hosts_and_a_first_start_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Exit code 1 would end the Job, and with it a run that has checkpoints, because a node is slow or dead."""
    monkeypatch.setattr("rlx.launch.agents.wait_for_agents", lambda *_: "mine-1.mine did not answer")
    assert host(0, tmp_path, monkeypatch) == 1
    paths = RunPaths(tmp_path / "mine")
    paths.logs(0).mkdir(parents=True)
    paths.kubernetes.write_text('{"job": "mine", "uid": "6"}')
    assert host(0, tmp_path, monkeypatch) == 1, "a run of another Job"
    paths.kubernetes.write_text('{"job": "mine", "uid": "7"}')
    assert host(0, tmp_path, monkeypatch) == LEFT
    assert "mine-1.mine did not answer" in capsys.readouterr().err
    Status(state="completed").write(paths)
    assert host(0, tmp_path, monkeypatch) == 0, "its first pod was lost as the run ended, and the others have left"


def test_a_run_whose_lost_host_never_comes_fails_and_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlx.launch.agents.wait_for_agents", lambda *_: "mine-1.mine did not answer")
    paths = RunPaths(tmp_path / "mine")
    paths.logs(0).mkdir(parents=True)
    paths.kubernetes.write_text('{"job": "mine", "uid": "7"}')
    Status(state="preempted", attempt=0).write(paths)
    starts = [host(0, tmp_path, monkeypatch, more=("launcher.max_requeues=3",)) for _ in range(2)]
    (paths.checkpoints / "step_5").mkdir(parents=True)
    (paths.checkpoints / "step_5" / "COMPLETE").touch()
    starts += [host(0, tmp_path, monkeypatch, more=("launcher.max_requeues=3",)) for _ in range(5)]
    assert starts == [LEFT] * 6 + [1], "a new step, and they are counted anew"
    status = read_status(paths)
    assert (status.state, status.cause.reason) == (
        "failed",
        "mine-1.mine did not answer; the Job was started 4 times without progress, more than launcher.max_requeues=3",
    )
    for _ in range(5):
        assert host(0, tmp_path, monkeypatch, by_hand=True, more=("launcher.max_requeues=3",)) == LEFT, "people decide themselves"
