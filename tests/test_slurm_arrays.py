"""An array of runs on a real SLURM, with toy processes: a requeue, cancellation or failure of one run does not affect the others.

The last task of an array gets the array's id as its SLURM_JOB_ID, and SLURM applies commands on that id to all tasks. So these tests
always disturb the last task.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slurm_job import ROOT, slurm

from rlx.config.load import compose
from rlx.launch.slurm import submit
from rlx.launch.wait_for_job import follow
from rlx.plan.process_spec import ProcessSpec
from rlx.runs.run_dir import create, resolve_run_dir
from rlx.runs.status import Status, read_status

pytestmark = [pytest.mark.slurm]
TOY = """
    import os, sys, time
    from pathlib import Path
    from rlx.metrics import MetricsWriter
    run = Path(sys.argv[1])
    MetricsWriter(run / "metrics.jsonl", "orchestrator").write(0, {})
    print(f"here {os.getpid()}.", flush=True)
    while not (run.parent / "go").exists():
        if (run / "preempt").exists(): sys.exit(75)
        time.sleep(0.05)
"""


class Array:
    """Three runs of one array, in directories whose names need quoting. Each has one process, which ends when the file `go` appears."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        runs = []
        for i in range(3):
            composed = compose(["launcher=slurm", "slurm=dev", "hardware=cpu"], {})
            cfg = replace(composed.cfg, run=replace(composed.cfg.run, name=f"it's=a b,{i}", dir=str(folder / f"it's=a b,{i}")))
            cfg = resolve_run_dir(cfg, "label")
            cfg = replace(cfg, launcher=replace(cfg.launcher, preempt_grace=20.0), slurm=replace(cfg.slurm, memory_gb=0.2, cpus_per_node=1))
            argv = (sys.executable, "-c", textwrap.dedent(TOY), str(cfg.run.dir))
            paths, lock = create(cfg, [], [ProcessSpec(role="toy", replica=0, node=0, gpus=(), argv=argv)])
            lock.close()
            runs.append((paths, cfg))
        self.paths = [paths for paths, _ in runs]
        self.ids = submit(runs, "array", folder / ".submitit")

    def status(self, i: int) -> Status:
        return read_status(self.paths[i])

    def log(self, i: int, attempt: int = 0, name: str = "toy") -> str:
        path = self.paths[i].log(attempt, name)
        return path.read_text() if path.exists() else ""

    def pid(self, i: int) -> int:
        """The toy's process id, or 0 while it has not written it. The full stop says that the number is complete."""
        written = re.search(r"here (\d+)\.", self.log(i))
        return int(written[1]) if written else 0

    def until(self, probe: Callable[[], Any], timeout: float = 600) -> None:
        deadline = time.monotonic() + timeout
        while not probe():
            logs = "\n".join(self.log(i, 0, "launcher") + self.log(i, 1, "launcher") for i in range(3))
            assert time.monotonic() < deadline, f"{[self.status(i) for i in range(3)]}\n{logs}"
            time.sleep(0.1)

    def end(self) -> list[tuple[str, int]]:
        """Let the remaining runs complete; return each run's state and attempt after the array has left the queue."""
        (self.folder / "go").touch()
        for paths, job in zip(self.paths, self.ids, strict=True):
            follow(paths, job)
        self.until(lambda: slurm("squeue", "-h", "-j", self.ids[0].split("_")[0]) == "")
        return [(self.status(i).state, self.status(i).attempt) for i in range(3)]


@pytest.fixture
def array(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Array]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tmp_path / "a sweep"
    folder.mkdir()
    made = Array(folder)
    made.until(lambda: all(made.pid(i) for i in range(3)))
    yield made
    slurm("scancel", made.ids[0].split("_")[0])


def requeue(array: Array) -> None:
    slurm("scontrol", "requeue", array.ids[-1])


def signal_before_the_time_limit(array: Array) -> None:
    slurm("scancel", "--batch", "--signal=USR2", array.ids[-1])


@pytest.mark.parametrize("disturb", [requeue, pytest.param(signal_before_the_time_limit, marks=pytest.mark.long)])
def test_one_of_an_array_comes_back_and_the_others_do_not_notice(array, disturb):
    assert array.ids[-1].endswith("_2")
    disturb(array)
    array.until(lambda: "here" in array.log(2, attempt=1))
    assert array.end() == [("completed", 0), ("completed", 0), ("completed", 1)]
    assert [array.status(i).job for i in range(3)] == array.ids


@pytest.mark.long
def test_one_of_an_array_is_cancelled_or_fails_and_the_others_do_not_notice(array):
    slurm("scancel", array.ids[2])
    os.kill(array.pid(1), signal.SIGKILL)
    array.until(lambda: (array.status(1).state, array.status(2).state) == ("failed", "interrupted"))
    assert array.end() == [("completed", 0), ("failed", 0), ("interrupted", 0)]
