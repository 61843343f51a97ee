"""What SLURM does to a job when it wants the machine back, and how the supervisor reacts. On a real SLURM, with toy processes."""

from __future__ import annotations

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
from rlx.paths import RunPaths
from rlx.plan.process_spec import ProcessSpec
from rlx.runs.jobs import queue
from rlx.runs.run_dir import create, resolve_run_dir
from rlx.runs.status import Status, read_status

pytestmark = [pytest.mark.slurm, pytest.mark.stand_in]
LEAVES = """
    import os, sys, time
    from pathlib import Path
    if int(os.environ["SLURM_RESTART_COUNT"] if "SLURM_RESTART_COUNT" in os.environ else 0):
        print("second attempt", flush=True); sys.exit(0)
    from rlx.metrics import MetricsWriter
    MetricsWriter(Path(sys.argv[1]) / "metrics.jsonl", "orchestrator").write(0, {})
    print("first attempt", flush=True)
    while not (Path(sys.argv[1]) / "preempt").exists(): time.sleep(0.05)
    sys.exit(75)
"""
STUBBORN = """
    import signal, sys, time
    from pathlib import Path
    for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
    (Path(sys.argv[1]) / "stubborn").touch()
    while True: time.sleep(0.05)
"""
FAILS_BESIDE_IT = """
    import sys, time
    from pathlib import Path
    while not (Path(sys.argv[1]) / "stubborn").exists(): time.sleep(0.05)
    sys.exit(3)
"""


class Toys:
    """A job with one toy process per node."""

    def __init__(self, *codes: str, **options: Any) -> None:
        self.count = len(codes)
        slurm_options = options.pop("slurm", {})
        cfg = compose(["launcher=slurm", "slurm=dev", "hardware=cpu", "run.name=run"], {}).cfg
        cfg = resolve_run_dir(cfg, "label")
        cfg = replace(
            cfg,
            hardware=replace(cfg.hardware, nodes=len(codes)),
            launcher=replace(cfg.launcher, **options),
            slurm=replace(cfg.slurm, memory_gb=0.2, cpus_per_node=1, **slurm_options),
        )
        plan = [
            ProcessSpec(role="toy", replica=i, node=i, gpus=(), argv=(sys.executable, "-c", textwrap.dedent(code), str(cfg.run.dir)))
            for i, code in enumerate(codes)
        ]
        self.paths, lock = create(cfg, [], plan)
        lock.close()
        (self.id,) = submit([(self.paths, cfg)], "run", self.paths.root / ".submitit")

    def status(self) -> Status:
        return read_status(self.paths)

    def log(self, attempt: int, name: str = "launcher") -> str:
        path = self.paths.log(attempt, name)
        return path.read_text() if path.exists() else ""

    def until(self, probe: Callable[[], Any], timeout: float = 600) -> None:
        deadline = time.monotonic() + timeout
        while not probe():
            assert time.monotonic() < deadline, f"{self.status()}\n{self.log(0)}\n{self.log(1)}"
            time.sleep(0.1)

    def until_started(self) -> None:
        self.until(lambda: len(self.status().processes) == self.count)
        # The toys' own output: srun prints something before it.
        self.until(lambda: all("first attempt" in self.log(0, f"toy_{i}" if i else "toy") for i in range(self.count)))


def state_of(job: str) -> str:
    """SLURM's word for a job; empty if a busy controller gives no answer."""
    try:
        return queue().get(job, "")
    except RuntimeError:
        return ""


@pytest.fixture
def job(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Toys]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made: list[Toys] = []

    def begin(*codes: str, **options: Any) -> Toys:
        made.append(Toys(*codes, **options))
        return made[-1]

    yield begin
    for toys in made:
        slurm("scancel", toys.id)


def second_attempt(toys: Toys) -> None:
    """Check that the job came back by itself, with the same id and directory, and completed."""
    assert follow(toys.paths, toys.id) == 0, toys.log(0) + toys.log(1)
    assert (toys.status().state, toys.status().attempt, toys.status().job) == ("completed", 1, toys.id)
    assert "second attempt" in toys.log(1, "toy")
    toys.until(lambda: state_of(toys.id) == "COMPLETED")


def test_a_job_leaves_before_its_time_limit_and_comes_back(job):
    # SLURM looks at time limits every 30 s and sends the signal up to 30 s early: here 80 to 110 s after each start, when the toys run.
    limit = {"time_minutes": 3, "signal_seconds": 70}
    toys = job(LEAVES, LEAVES, grace=2.0, preempt_grace=20.0, slurm=limit)
    toys.until(lambda: "received SIGUSR2" in toys.log(0))
    second_attempt(toys)
    assert "toy_1 has left" in toys.log(0)
    assert "back in the queue" in toys.log(0)


def test_a_job_that_is_preempted_leaves_and_comes_back(job):
    toys = job(LEAVES, slurm={"options": {"nodelist": "node4"}})
    toys.until_started()
    other = slurm(
        "sbatch", "--parsable", "-p", "high", "-w", "node4", "--exclusive", "--mem=0", "-o", "/dev/null", "--wrap=sleep 3"
    ).strip()
    toys.until(lambda: "received" in toys.log(0))
    second_attempt(toys)
    assert "received SIGUSR2" in toys.log(0)
    toys.until(lambda: state_of(other) == "COMPLETED")


TAKES_NOTICE = LEAVES.replace(
    'print("first',
    """import signal
    from rlx.paths import RunPaths
    signal.signal(signal.SIGTERM, lambda *_: RunPaths(Path(sys.argv[1])).ask_to_give_way())
    print("first""",
)


@pytest.mark.parametrize("code", [pytest.param(TAKES_NOTICE, marks=pytest.mark.long), pytest.param(LEAVES, marks=pytest.mark.nightly)])
def test_a_job_whose_steps_are_sent_sigterm_comes_back(job, code):
    """As in preemption without a user signal in a partition with a GraceTime: SLURM signals the steps, not the batch script."""
    toys = job(code, code)
    toys.until_started()
    slurm("scancel", "--signal=TERM", toys.id)
    second_attempt(toys)
    assert ("wants the machine back" in toys.log(0)) or ("preempt exists" in toys.log(0))
    assert (" has left" in toys.log(0)) == (code is TAKES_NOTICE)  # whichever of the two leaves first


@pytest.mark.long
def test_a_job_can_run_a_copy_of_the_code_from_when_it_was_submitted(job):
    toys = job("import rlx, rlx_reverse_text; print(rlx.__file__, rlx_reverse_text.__file__)")
    assert follow(toys.paths, toys.id) == 0, toys.log(0)
    (copy,) = (toys.paths.root / ".submitit").glob("code_*")
    assert toys.log(0, "toy").splitlines()[-1].split() == [  # srun may print something first
        f"{copy}/rlx/__init__.py",
        f"{copy}/environments/rlx_reverse_text/rlx_reverse_text/__init__.py",
    ]


@pytest.mark.long
def test_a_job_whose_node_fails_comes_back(job):
    # `srun` returns 0 for a step on a failed node; the supervisor must not treat that as completion.
    toys = job(LEAVES, LEAVES)
    toys.until_started()
    hosts = [process["host"] for process in toys.status().processes]
    try:
        # The slurmd of emulated nodes stay alive and would get the job again while its old processes still exit, so drain them first.
        for state in ("DRAIN", "DOWN"):
            for host in hosts:
                slurm("scontrol", "update", f"NodeName={host}", f"State={state}", "Reason=test")
        toys.until(lambda: toys.status().attempt == 1)
        second_attempt(toys)
        assert "completed" not in toys.log(0)
    finally:
        for host in hosts:
            slurm("scontrol", "update", f"NodeName={host}", "State=RESUME")


@pytest.mark.long
def test_a_process_that_ignores_every_request_is_killed_on_its_node(job):
    toys = job(FAILS_BESIDE_IT, STUBBORN, grace=1.0)
    assert follow(toys.paths, toys.id) == 1
    assert "killing toy_1: still running 1 s after SIGTERM" in toys.log(0)
    cause = toys.status().cause
    assert (cause.replica, cause.returncode) == (0, 3)
    toys.until(lambda: state_of(toys.id) == "FAILED")


@pytest.mark.long
def test_a_job_comes_back_no_more_than_it_may(job):
    toys = job(LEAVES.replace("sys.exit(0)", "pass"), max_requeues=1)
    for attempt in (0, 1):
        toys.until(lambda attempt=attempt: toys.log(attempt, "toy").strip())
        slurm("scancel", "--batch", "--signal=USR2", toys.id)
        if attempt == 0:
            toys.until(lambda: toys.status().attempt == 1)
    assert follow(toys.paths, toys.id) == 1
    assert "launcher.max_requeues=1 requeues without progress are used up" in str(toys.status().cause)


@pytest.mark.long
def test_a_job_that_slurm_requeues_once_too_often_does_not_start(job):
    toys = job(LEAVES, max_requeues=0)
    toys.until_started()
    slurm("scontrol", "requeue", toys.id)
    toys.until(lambda: toys.status().state == "failed")
    assert "requeued 1 times without progress, more than launcher.max_requeues=0" in str(toys.status().cause)
    assert RunPaths(toys.paths.root).log(1, "toy").exists() is False
