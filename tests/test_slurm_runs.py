"""Runs with real roles on a real SLURM with emulated nodes: an array, a cancelled job, roles that die on each of three nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_job import ROOT, SlurmJob, slurm, train

from rlx.config.load import compose
from rlx.launch.slurm import submit as submit_runs
from rlx.launch.wait_for_job import follow
from rlx.plan.process_spec import ProcessSpec
from rlx.runs.run_dir import create, resolve_run_dir

pytestmark = [pytest.mark.slurm, pytest.mark.stand_in]
LONG = ("orchestrator.batch_size=64", "max_steps=100000")
NODES = "hardware=cpu_3nodes"


@pytest.fixture
def submit(cluster: None, tmp_path: Path, model_cache: Path) -> Iterator[Callable[..., SlurmJob]]:
    """`submit("name", *overrides)` submits a run, which is cancelled at the end of the test if it is still alive."""
    jobs: list[SlurmJob] = []

    def begin(name: str, *overrides: str) -> SlurmJob:
        jobs.append(SlurmJob(tmp_path / name, model_cache, *overrides))
        return jobs[-1]

    yield begin
    for job in jobs:
        subprocess.run(["scancel", job.id], check=False)


@pytest.mark.nightly
def test_a_sweep_is_one_array_and_starting_it_again_does_what_is_left(cluster, tmp_path, model_cache):
    where = ["launcher=slurm", "slurm=dev", "hardware=cpu", f"run.dir={tmp_path / 'sweep'}", "launcher.array_parallelism=3"]
    line = ["-m", "loss=grpo,gspo", "seed=1,2,3", *where, "max_steps=1", "orchestrator.batch_size=16"]
    done = train(*line, cwd=tmp_path, cache=model_cache)
    assert done.returncode == 0, done.stdout + done.stderr
    ids = [each.split()[0] for each in done.stdout.splitlines()[1:]]
    array = ids[0].split("_")[0]
    assert ids == [f"{array}_{i}" for i in range(6)]
    try:
        # The command returns long before the runs end.
        assert "(6 already queued or running)" in train(*line, cwd=tmp_path, cache=model_cache).stdout
        done = train(*line, "launcher.wait=true", cwd=tmp_path, cache=model_cache, timeout=1500)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[0].startswith("6 runs in")
        assert [row.split()[1] for row in done.stdout.splitlines()[-6:]] == ["completed"] * 6
        last = train(*line, cwd=tmp_path, cache=model_cache)
        assert "(6 already completed)" in last.stdout
        deadline = time.monotonic() + 300  # a run is completed a moment before its job
        while jobs := slurm("squeue", "-h"):
            assert time.monotonic() < deadline, jobs
            time.sleep(0.2)
    finally:
        subprocess.run(["scancel", array], check=False)


@pytest.mark.long
def test_a_cancelled_job_is_an_interrupted_run_and_its_name_is_taken_until_then(submit, tmp_path, model_cache):
    job = submit("run", NODES, *LONG)
    for more in ("clean=false", "clean=true"):
        again = train("launcher=slurm", "slurm=dev", NODES, f"run.dir={job.run_dir}", more, *LONG, cwd=tmp_path, cache=model_cache)
        assert again.returncode == 2, again.stdout + again.stderr
        assert str(job.run_dir) in again.stderr
    job.pid("trainer", 1)
    slurm("scancel", job.id)
    assert job.until_over() == "interrupted", job.text()
    assert (job.status()["exit_code"], job.state()) == (130, "CANCELLED")
    assert job.left() == []


@pytest.mark.parametrize(
    ("role", "replica", "node"),
    [
        ("trainer", 1, 3),
        *(pytest.param(*which, marks=pytest.mark.nightly) for which in (("orchestrator", 0, 2), ("inference", 0, 1), ("trainer", 0, 2))),
    ],
)
def test_a_role_killed_on_its_node_ends_the_run_and_frees_the_nodes(submit, role, replica, node):
    job = submit("run", NODES, *LONG, "inference.max_restarts=0")
    pid = job.pid(role, replica)
    job.until_step(1)
    os.kill(pid, signal.SIGKILL)
    assert job.until_over() == "failed", job.text()
    assert job.left() == []
    cause = job.status()["cause"]
    assert (cause["role"], cause["replica"], cause["returncode"]) == (role, replica, -9), job.text()
    assert cause["last_lines"]
    assert f"node{node}" in {p["host"] for p in job.status()["processes"] if (p["role"], p["replica"]) == (role, replica)}
    assert (job.status()["exit_code"], job.state()) == (1, "FAILED")
    job.until(lambda: slurm("sinfo", "-h", "-o", "%T", "-p", "debug").split() == ["idle"], "free nodes")


@pytest.mark.long
def test_a_killed_supervisor_ends_the_job(submit):
    job = submit("run", *LONG)
    job.pid("orchestrator")
    os.kill(job.status()["supervisor"]["pid"], signal.SIGKILL)
    assert job.until_over() == "failed", job.text()
    assert job.left() == []
    assert job.status()["cause"]["role"] == "supervisor"


def test_a_waiting_launcher_shows_the_run_and_leaves_with_its_exit_code(cluster, tmp_path, model_cache):
    line = [
        "launcher=slurm",
        "slurm=dev",
        "hardware=cpu",
        "launcher.wait=true",
        f"run.dir={tmp_path / 'run'}",
        "env.id=rlx_reverse_text",
        *LONG,
    ]
    waiting = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *line],
        cwd=tmp_path,
        env=os.environ | {"RLX_CACHE": str(model_cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    status = tmp_path / "run" / "status.json"
    deadline = time.monotonic() + 300
    while not (status.exists() and (job := json.loads(status.read_text())["job"])):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    slurm("scancel", job)
    out, _ = waiting.communicate(timeout=600)
    assert waiting.returncode == 130, out
    assert f"job {job}" in out


def test_processes_see_the_gpus_that_the_plan_gives_them_of_those_that_slurm_gave_the_job(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cfg = compose(["launcher=slurm", "slurm=dev", "hardware=gpu2", "run.name=run"], {}).cfg
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['RLX_HOST'])"
    gpus = {"first": (0,), "second": (1,), "none": (), "both": (0, 1)}
    plan = [
        ProcessSpec(role=role, replica=0, node=0, gpus=mine, env={"CUDA_VISIBLE_DEVICES": "7"}, argv=(sys.executable, "-c", code))
        for role, mine in gpus.items()
    ]
    # Another job holds the node's first GPU, so this job's GPUs are not 0 and 1.
    other = slurm("sbatch", "--parsable", "--gres=gpu:1", "--nodelist=node4", "--output=/dev/null", "--wrap=sleep 3600").strip()
    try:
        cfg = replace(resolve_run_dir(cfg, "label"), slurm=replace(cfg.slurm, options={"nodelist": "node4"}))
        paths, lock = create(cfg, [], plan)
        lock.close()
        (job,) = submit_runs([(paths, cfg)], "run", paths.root / ".submitit")
        assert follow(paths, job) == 0, (paths.log(0, "launcher")).read_text()
    finally:
        slurm("scancel", other)
    seen = {role: paths.log(0, role).read_text().splitlines()[-1].split() for role in gpus}  # srun may print something first
    first, second = seen["first"][0], seen["second"][0]
    assert {first, second} < {"1", "2", "3"}
    assert seen == {"first": [first, "node4"], "second": [second, "node4"], "none": ["node4"], "both": [f"{first},{second}", "node4"]}
