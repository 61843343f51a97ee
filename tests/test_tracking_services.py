"""Forwarding to the real TensorBoard and W&B (offline); the tests read back the files that these write."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlx.config.load import compose
from rlx.config.schema import Config, TensorboardConfig, WandbConfig
from rlx.config.schema_launch import MlflowConfig
from rlx.metrics import METRICS, MetricsWriter
from rlx.paths import RunPaths
from rlx.polling import wait_for
from rlx.runs.rewind import trim_metrics
from rlx.trackers import FIRST, ForwardProgress, _cell
from rlx.tracking import Tracker, open_tracker, tracked

RECORD = {
    "env": "e",
    "example_id": 3,
    "group": 0,
    "member": 1,
    "prompt": [{"role": "user", "content": "abc"}],
    "completion": [{"role": "assistant", "content": "<b>cba</b>"}],
    "answer": "cba",
    "reward": 1.0,
    "advantage": 0.5,
    "stop": "max_turns_reached",
    "num_tokens": 4,
}


class Recorder:
    """A service that records its calls."""

    name = "recorder"

    def __init__(self, samples: int = 2, interval: int = 10) -> None:
        self.samples, self.interval = samples, interval
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.tables: list[tuple[int, int]] = []
        self.histograms: list[tuple[int, dict[str, list[float]]]] = []
        self.closed = False

    def scalars(self, step: int, values: Any, seconds: float) -> None:
        self.seen.append((step, dict(values)))

    def rollouts(self, step: int, records: Any) -> None:
        self.tables.append((step, len(records)))

    def distributions(self, step: int, values: Any) -> None:
        self.histograms.append((step, {name: each.tolist() for name, each in values.items()}))

    def close(self) -> None:
        self.closed = True


def write_metrics(paths: RunPaths) -> None:
    for step in range(2):
        MetricsWriter(paths.metrics, "orchestrator").write(step, {"reward/mean": 0.25 + step, "time/step": 2.0})
        MetricsWriter(paths.metrics, "trainer").write(step, {"loss/total": -1.0, "time/step": 3.0})


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: a LevelDB log with a 7-byte header (blocks of 32 KiB; crc, length, type, payload)."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def run_tracker(paths: RunPaths, config: Config) -> None:
    tracker = open_tracker(config, paths)
    assert tracker is not None
    write_metrics(paths)
    tracker.forward()
    tracker.rollouts(0, [RECORD, RECORD, RECORD | {"reward": 0.25, "num_tokens": 1}])
    tracker.close()


def test_every_record_is_forwarded_once_with_its_source_where_names_are_shared(tmp_path: Path) -> None:
    paths, sink = RunPaths(tmp_path), Recorder()
    tracker = Tracker(paths, [sink])
    tracker.forward()
    write_metrics(paths)
    tracker.forward()
    tracker.forward()
    assert sink.seen == [
        (0, {"reward/mean": 0.25, "orchestrator/time/step": 2.0}),
        (0, {"loss/total": -1.0, "trainer/time/step": 3.0}),
        (1, {"reward/mean": 1.25, "orchestrator/time/step": 2.0}),
        (1, {"loss/total": -1.0, "trainer/time/step": 3.0}),
    ]
    tracker.close()
    assert sink.closed


def test_a_line_that_is_still_being_written_is_forwarded_when_it_is_whole(tmp_path: Path) -> None:
    paths, sink = RunPaths(tmp_path), Recorder()
    tracker = Tracker(paths, [sink])
    line = json.dumps({"step": 0, "source": "trainer", "time": 1.0, "loss/total": 2.0})
    paths.metrics.write_text(line[:10])
    tracker.forward()
    assert sink.seen == []
    paths.metrics.write_text(line + "\n")
    tracker.forward()
    assert sink.seen == [(0, {"loss/total": 2.0})]


def test_a_role_forwards_while_it_works_and_the_rest_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, sink = RunPaths(tmp_path), Recorder()
    monkeypatch.setattr("rlx.tracking.open_tracker", lambda *_: Tracker(paths, [sink]))
    monkeypatch.setattr("rlx.tracking.INTERVAL", 0.01)
    replay = compose(["replay=x", "dry_run=true"], {}).cfg
    for role in ("trainer_1", "evaluator", "orchestrator", ""):
        with tracked(replay, paths, role):
            pass
    assert not sink.closed
    write_metrics(paths)
    with tracked(replay, paths, "trainer"):
        wait_for(lambda: len(sink.seen) == 4, "what is there", 60)
        MetricsWriter(paths.metrics, "val").write(2, {"val/loss": 1.0})
    assert len(sink.seen) == 5
    assert sink.closed


def test_the_next_attempt_forwards_what_the_one_before_it_could_not(tmp_path: Path) -> None:
    paths, first, second = RunPaths(tmp_path), Recorder(), Recorder()
    write_metrics(paths)
    Tracker(paths, [first]).forward()
    writer = MetricsWriter(paths.metrics, "trainer")
    writer.write(2, {"loss/total": 0.0})  # then the process is killed
    tracker = Tracker(paths, [second])
    writer.write(3, {"loss/total": 0.0})
    tracker.forward()
    assert [step for step, _ in first.seen] == [0, 0, 1, 1]
    assert [step for step, _ in second.seen] == [2, 3]


def test_a_run_that_goes_back_to_a_checkpoint_forwards_what_follows_it_again_and_nothing_else(tmp_path: Path) -> None:
    paths, first, second = RunPaths(tmp_path), Recorder(), Recorder()
    orchestrator, trainer = (MetricsWriter(paths.metrics, source) for source in ("orchestrator", "trainer"))
    orchestrator.write(0, {"reward/mean": 0.0})
    orchestrator.write(1, {"reward/mean": 1.0})
    trainer.write(0, {"loss/total": 0.0})
    Tracker(paths, [first]).forward()
    trim_metrics(paths, 1)
    tracker = Tracker(paths, [second])
    tracker.forward()
    assert second.seen == []
    MetricsWriter(paths.metrics, "orchestrator").write(1, {"reward/mean": 2.0})
    tracker.forward()
    assert second.seen == [(1, {"reward/mean": 2.0})]


def test_all_attempts_of_a_run_are_one_run_at_wandb_and_another_run_is_not(tmp_path: Path) -> None:
    here, fork = RunPaths(tmp_path / "run"), RunPaths(tmp_path / "fork")
    identity = ForwardProgress(here).identity("wandb")
    ForwardProgress(here).forwarded("wandb", 12)
    assert ForwardProgress(here).identity("wandb") == identity
    assert ForwardProgress(here).offset("wandb") == 12
    assert ForwardProgress(fork).identity("wandb") != identity


def test_samples_are_forwarded_every_interval_steps_and_no_more_than_wanted(tmp_path: Path) -> None:
    often, rarely, never = Recorder(samples=2, interval=5), Recorder(samples=4, interval=10), Recorder(samples=0)
    tracker = Tracker(RunPaths(tmp_path), [often, rarely, never])
    for step in range(11):
        tracker.rollouts(step, [RECORD] * 3)
    assert often.tables == [(0, 2), (5, 2), (10, 2)]
    assert rarely.tables == [(0, 3), (10, 3)]
    assert never.tables == []


def test_distributions_of_all_rollouts_come_every_interval_steps_with_samples_or_without(tmp_path: Path) -> None:
    often, without = Recorder(samples=1, interval=5), Recorder(samples=0, interval=10)
    tracker = Tracker(RunPaths(tmp_path), [often, without])
    assert [step for step in range(11) if tracker.wants_rollouts(step)] == [0, 5, 10]
    for step in range(11):
        tracker.rollouts(step, [RECORD, RECORD | {"reward": 0, "advantage": -0.5, "num_tokens": 9}])
    expected = {"distribution/reward": [1.0, 0.0], "distribution/advantage": [0.5, -0.5], "distribution/completion_length": [4.0, 9.0]}
    assert often.histograms == [(0, expected), (5, expected), (10, expected)]
    assert without.histograms == [(0, expected), (10, expected)]
    tracker.rollouts(0, [])  # every group of a step may have been filtered out
    assert len(often.histograms) == 3


def test_tensorboard_files_hold_scalars_and_samples_and_need_no_torch(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = Config(max_steps=2)
    config.logger.tensorboard = TensorboardConfig(samples=2)
    run_tracker(RunPaths(tmp_path), config)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.25), (1, 1.25)]
    assert [event.value for event in events.Scalars("trainer/time/step")] == [3.0, 3.0]
    samples = [tag for tag in events.Tags()["tensors"] if tag.startswith("rollouts/")]
    assert samples == ["rollouts/0", "rollouts/1"]
    (event,) = events.Histograms("distribution/reward")
    histogram = event.histogram_value
    assert (event.step, histogram.num, histogram.min, histogram.max, histogram.sum) == (0, 3, 0.25, 1.0, 2.25)
    assert (histogram.bucket[0], histogram.bucket[-1], sum(histogram.bucket)) == (1, 2, 3)
    assert histogram.bucket_limit[-1] == 1.0
    assert events.Histograms("distribution/completion_length")[0].histogram_value.sum == 9
    assert events.Histograms("distribution/advantage")[0].histogram_value.num == 3
    text = events.Tensors("rollouts/0")[0].tensor_proto.string_val[0].decode()
    assert "user: abc" in text
    assert "assistant: &lt;b&gt;cba&lt;/b&gt;" in text


def test_tensorboard_forgets_what_an_attempt_sent_before_it_went_back_to_a_checkpoint(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config, paths = Config(max_steps=4), RunPaths(tmp_path)
    config.logger.tensorboard = TensorboardConfig(samples=0)
    for attempt, steps in enumerate((range(4), range(2, 4))):
        for step in steps:
            MetricsWriter(paths.metrics, "trainer").write(step, {"loss/total": float(step + 10 * attempt)})
        tracker = open_tracker(config, paths)
        assert tracker is not None
        tracker.close()
        if attempt == 0:
            trim_metrics(paths, 2)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/total")] == [(0, 0.0), (1, 1.0), (2, 12.0), (3, 13.0)]
    assert ForwardProgress(paths).rewound("tensorboard") is None, "only once"


def test_samples_show_what_the_model_thought() -> None:
    thought = {"role": "assistant", "content": "", "reasoning_content": "Let me think"}
    assert _cell([thought]) == "assistant: Let me think"


def test_what_wandb_shows_first_are_metrics_that_exist() -> None:
    names = {f"trainer/{name}" if name.startswith(("time/", "perf/")) else name.replace("<n>", "4") for name in METRICS}
    assert len([name for name in names if FIRST.fullmatch(name)]) == 12, "as many as FIRST has alternatives"


@pytest.mark.slow
def test_wandb_offline_leaves_a_run_that_holds_metrics_samples_and_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    asked: list[dict[str, Any]] = []
    begin = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **given: asked.append(given) or begin(**given))
    for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    config = Config(max_steps=2, seed=17)
    config.logger.wandb = WandbConfig(mode="offline", samples=2, project="p", group="losses", tags=["first"])
    config.inference.api_key = "hidden-key"
    run_tracker(RunPaths(tmp_path / "my-run"), config)

    (file,) = (tmp_path / "my-run" / "wandb").glob("offline-run-*/run-*.wandb")
    history: list[dict[str, Any]] = []
    text = b""
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        text += data
        if record.HasField("history"):
            items = record.history.item
            history.append({(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in items})
    rewards = [(row["step"], row["reward/mean"]) for row in history if "reward/mean" in row]
    assert rewards == [(0, 0.25), (1, 1.25)]
    first = [{name: row[name] for name in row if "/" not in name and not name.startswith("_") and name != "step"} for row in history]
    assert [row for row in first if row] == [  # W&B's section "Charts"
        {"reward_mean": 0.25},
        {"trainer_time_step": 3.0},
        {"reward_mean": 1.25},
        {"trainer_time_step": 3.0},
    ]
    assert any("rollouts" in key for row in history for key in row)
    (row,) = [row for row in history if "distribution/reward/values" in row]
    counts = row["distribution/reward/values"]
    assert (row["step"], row["distribution/reward/_type"], counts[0], counts[-1], sum(counts)) == (0, "histogram", 1, 2, 3)
    assert {"distribution/advantage/bins", "distribution/completion_length/bins"} <= row.keys()
    assert b"my-run" in text
    assert b"max_async_level" in text
    assert file.name == f"run-{ForwardProgress(RunPaths(tmp_path / 'my-run')).identity('wandb')}.wandb"
    assert [(given["group"], given["tags"], given["job_type"]) for given in asked] == [("losses", ["first"], "train")]
    assert [given["resume"] for given in asked] == ["allow"], "a later attempt goes on with the run of this id instead of replacing it"
    assert not any(b"hidden-key" in path.read_bytes() for path in (tmp_path / "my-run").rglob("*") if path.is_file())
    assert b"hidden-key" not in text


@pytest.mark.parametrize("service", ["wandb", "tensorboard"])
def test_a_missing_package_is_named_with_the_remedy(service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == service]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, service, None)
    config = Config()
    setattr(config.logger, service, WandbConfig() if service == "wandb" else TensorboardConfig())
    with pytest.raises(ValueError, match=rf"logger={service} needs a package.*pip install 'rlx\[{service}\]'"):
        open_tracker(config, RunPaths(tmp_path))


KILLED = """
import sys, psutil
from pathlib import Path
from rlx.config.schema import Config, WandbConfig
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths
from rlx.tracking import open_tracker
config, paths = Config(max_steps=2), RunPaths(Path(sys.argv[1]))
config.logger.wandb = WandbConfig(mode="offline", samples=0)
tracker, writer = open_tracker(config, paths), MetricsWriter(paths.metrics, "trainer")
writer.write(0, {"loss/total": 0.0})
tracker.forward()
for process in psutil.Process().children(recursive=True):
    process.kill()
    process.wait(10)
for step in range(int(sys.argv[2])):
    writer.write(step, {"loss/total": 0.0})
    tracker.forward()
tracker.close()
print("the run goes on")
"""


@pytest.mark.parametrize("steps", [0, 3])
def test_a_tracker_that_is_killed_ends_nothing_and_is_named_once(tmp_path: Path, steps: int) -> None:
    """As an OOM killer does, between two steps or at the end."""
    pytest.importorskip("wandb")
    home = {name: str(tmp_path / "home") for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")}
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), str(steps)]
    done = subprocess.run(command, env=os.environ | home, capture_output=True, text=True, timeout=120, check=False)
    assert "the run goes on" in done.stdout, done.stderr
    assert done.stderr.count("wandb failed, and gets no more metrics in this attempt") == 1


def test_a_service_that_cannot_begin_leaves_the_run_to_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pytest.importorskip("wandb"), "init", lambda **_: os.mkdir("/dev/null/settings"))
    config = Config(max_steps=2)
    config.logger.wandb = WandbConfig(mode="offline")
    assert open_tracker(config, RunPaths(tmp_path)) is None
    assert "wandb cannot be used, so the run's metrics are in its files only: NotADirectoryError" in caplog.text


@pytest.mark.parametrize("where", ["scalars", "rollouts", "close"])
def test_a_service_that_never_answers_holds_up_neither_a_step_nor_the_end(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("PATIENCE", "PATIENCE_AT_ENDS"):
        monkeypatch.setattr(f"rlx.tracking.{name}", 0.2)
    paths, silent, other = RunPaths(tmp_path), Recorder(), Recorder()
    silent.name = "silent"
    monkeypatch.setattr(silent, where, lambda *_: threading.Event().wait())
    monkeypatch.setattr("rlx.tracking.open_tracker", lambda *_: Tracker(paths, [silent, other]))
    write_metrics(paths)
    with tracked(compose(["replay=x", "dry_run=true"], {}).cfg, paths, "trainer") as tracker:
        assert tracker is not None
        tracker.rollouts(0, [RECORD])
        tracker.forward()
    assert (len(other.seen), len(other.tables), other.closed) == (4, 1, True)
    assert caplog.text.count("silent failed, and gets no more metrics in this attempt (TimeoutError: no answer in 0.2 s)") == 1


def test_a_slow_service_gets_all_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a resume, the records of thousands of steps: the time is that of one call."""
    monkeypatch.setattr("rlx.tracking.PATIENCE", 0.5)
    paths, slow = RunPaths(tmp_path), Recorder()
    take = slow.scalars
    monkeypatch.setattr(slow, "scalars", lambda *values: (time.sleep(0.2), take(*values))[-1])
    write_metrics(paths)
    Tracker(paths, [slow]).forward()
    assert (len(slow.seen), caplog.text) == (4, "")


def test_a_service_that_never_answers_at_the_start_or_ends_the_program_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlx.tracking.PATIENCE_AT_ENDS", 0.2)
    monkeypatch.setattr("rlx.tracking.Wandb", lambda *_: threading.Event().wait())
    monkeypatch.setattr("rlx.tracking.Mlflow", lambda *_: sys.exit(1))
    config = Config(max_steps=2)
    config.logger.wandb, config.logger.mlflow = WandbConfig(mode="offline"), MlflowConfig()
    assert open_tracker(config, RunPaths(tmp_path)) is None
    assert "wandb cannot be used, so the run's metrics are in its files only: TimeoutError: no answer in 0.2 s" in caplog.text
    assert "mlflow cannot be used, so the run's metrics are in its files only: SystemExit: 1" in caplog.text
