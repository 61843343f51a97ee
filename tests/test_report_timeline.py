"""The timeline of a run: one trace of all roles, which Perfetto reads."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import torch
import zstandard

from rlx.config.load import compose
from rlx.metrics import MetricsWriter
from rlx.paths import RunPaths
from rlx.report.timeline import TRACKS, write_timeline
from rlx.train.profile import profiled


def events_of(paths: RunPaths) -> list[dict]:
    return json.loads(gzip.decompress(paths.timeline.read_bytes()))["traceEvents"]


def test_a_timeline_shows_the_steps_updates_rollouts_and_requests_of_a_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    MetricsWriter(paths.metrics, "orchestrator").write(3, {"time/step": 2.0, "time/wait_rollouts": 1.5, "perf/in_flight": 7.0})
    MetricsWriter(paths.metrics, "trainer").write(3, {"time/step": 1.0, "time/wait_batch": 0.25, "time/forward_backward": 0.5})
    paths.updates.write_text('{"version": 3, "began": 100.0, "seconds": 0.5}\n')
    paths.rollouts.mkdir()
    own = {"env": "sums", "group": 4, "reward": 1.0}
    records = [
        own | {"member": 0, "began": 10.0, "seconds": 2.0, "requests": [[10.0, 0.5], [11.0, 0.75]]},
        own | {"member": 1, "began": 11.0, "seconds": 2.0, "requests": [[11.0, 1.5]]},
        own | {"member": 2, "began": 12.5, "seconds": 1.0, "requests": []},
        own | {"member": 3, "began": None, "seconds": 1.0},  # it was lost with its process
    ]
    paths.rollouts_of(3).write_bytes(zstandard.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
    (paths.rollouts / "step_000004.jsonl.zst").write_bytes(b"broken")
    assert write_timeline(paths) == len(events_of(paths)) - len(TRACKS)
    events = [event for event in events_of(paths) if event["ph"] == "X"]
    placed = {
        track: [(event["name"], event["tid"], event["dur"] / 1e6) for event in events if event["pid"] == pid]
        for pid, track in enumerate(TRACKS)
    }
    assert placed["rollouts"] == [("sums 4.0", 0, 2.0), ("sums 4.1", 1, 2.0), ("sums 4.2", 0, 1.0)], "a lane is used again when it is free"
    assert [name for name, *_ in placed["requests"]] == ["sums 4.0 turn 0", "sums 4.0 turn 1", "sums 4.1 turn 0"]
    assert placed["servers"] == [("version 3 loads", 0, 0.5)]
    step, wait, compute, *_ = [event for event in events if event["pid"] == 0]
    assert (step["name"], wait["ts"], compute["ts"]) == ("step 3", step["ts"], step["ts"] + 0.25e6)


def test_the_parts_of_a_step_do_not_overlap_whatever_the_clock_says(tmp_path: Path) -> None:
    paths, writer = RunPaths(tmp_path), MetricsWriter(RunPaths(tmp_path).metrics, "trainer")
    for step in range(50):
        writer.write(step, {"time/step": 1.0, "time/wait_batch": 0.1234567 + step / 7e5, "time/forward_backward": 0.3210987 + step / 9e5})
    assert write_timeline(paths)
    parts = [event for event in events_of(paths) if event["ph"] == "X" and not event["name"].startswith("step")]
    assert len(parts) >= 100
    for one, other in pairwise(parts):
        assert one["ts"] + one["dur"] <= other["ts"] or other["ts"] + other["dur"] <= one["ts"]


def test_a_run_without_records_has_no_timeline(tmp_path: Path) -> None:
    assert write_timeline(RunPaths(tmp_path)) == 0
    assert not RunPaths(tmp_path).timeline.exists()


def test_torchs_profiler_records_the_chosen_steps_alone(tmp_path: Path) -> None:
    paths, cfg = RunPaths(tmp_path), compose(["profile.steps=[10,12]"], {}).cfg
    for step in (10, 11):
        with profiled(cfg, paths, step, rank=1):
            torch.ones(4) @ torch.ones(4)
    (file,) = paths.profile.iterdir()
    assert file.name == "step_10_rank_1.json.gz"
    assert any(event["name"] == "aten::dot" for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"])
