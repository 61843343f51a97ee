"""A node that dies under a job and does not come back: SLURM's daemon there is killed with all its steps. The job goes on elsewhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_job import ROOT, slurm

from rlx.config.load import compose
from rlx.launch.slurm import submit
from rlx.launch.wait_for_job import follow
from rlx.plan.process_spec import ProcessSpec
from rlx.runs.run_dir import create, resolve_run_dir
from rlx.runs.status import read_status

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.stand_in]
CONF = Path("/etc/slurm/slurm.conf")
SILENT = 40  # seconds after which this cluster gives up a node that does not answer
ROLE = (
    "import os, sys, time; print('on', os.environ['SLURMD_NODENAME'], 'restart', os.environ.get('SLURM_RESTART_COUNT', '0'), flush=True); "
    "time.sleep(0 if os.environ.get('SLURM_RESTART_COUNT', '0') != '0' else 3600)"
)


@pytest.fixture
def impatient(cluster: None) -> Iterator[None]:
    """The cluster gives up silent nodes soon. Afterwards all nodes are back."""
    before = CONF.read_text()
    CONF.write_text(f"{before}SlurmdTimeout={SILENT}\n")
    slurm("scontrol", "reconfigure")
    yield
    CONF.write_text(before)
    slurm("scontrol", "reconfigure")
    subprocess.run(["slurmd", "-N", "node3"], check=True)
    deadline = time.monotonic() + 120
    while slurm("sinfo", "-h", "-o", "%T", "-p", "debug").split() != ["idle"]:
        assert time.monotonic() < deadline, slurm("sinfo", "-N", "-l")
        time.sleep(0.5)


def processes_on(node: str) -> list[int]:
    """The processes of jobs on an emulated node, and the slurmstepds above them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"\0SLURMD_NODENAME={node}\0".encode() in b"\0" + (entry / "environ").read_bytes():
                    parent = re.search(r"^PPid:\t(\d+)$", (entry / "status").read_text(), re.MULTILINE)
                    assert parent
                    above = Path("/proc", parent[1], "comm")
                    found += [int(entry.name), *([int(parent[1])] if above.read_text().strip() == "slurmstepd" else [])]
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


@pytest.mark.parametrize(
    "fails",
    [pytest.param(False, id="the others wait", marks=pytest.mark.nightly), pytest.param(True, id="another fails")],
)  # as a trainer does that loses its peer
def test_a_job_whose_node_dies_for_good_goes_on_on_others(impatient: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cfg = compose(["launcher=slurm", "slurm=dev", "hardware=cpu_3nodes", "run.name=run"], {}).cfg
    plan = [ProcessSpec(role=f"role{node}", replica=0, node=node, gpus=(), argv=(sys.executable, "-c", ROLE)) for node in range(3)]
    cfg = replace(resolve_run_dir(cfg, "label"), slurm=replace(cfg.slurm, memory_gb=0.5))
    paths, lock = create(cfg, [], plan)
    lock.close()
    (job,) = submit([(paths, cfg)], "run", paths.root / ".submitit")
    try:
        deadline = time.monotonic() + 180
        while not all(paths.log(0, spec.name).exists() and "on node" in paths.log(0, spec.name).read_text() for spec in plan):
            assert time.monotonic() < deadline, paths.log(0, "launcher").read_text()
            time.sleep(0.1)
        os.kill(int(Path("/run/rlx-slurm/slurmd-node3.pid").read_text()), signal.SIGKILL)
        for pid in processes_on("node3"):
            os.kill(pid, signal.SIGKILL)
        if fails:
            for pid in processes_on("node2"):
                if Path("/proc", str(pid), "comm").read_text().strip() != "slurmstepd":
                    os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        assert follow(paths, job) == 0, "\n".join(file.read_text() for file in sorted(paths.root.glob("logs/*/*.log")))
        print(f"{time.monotonic() - began:.0f} s after the death of its node")
    finally:
        subprocess.run(["scancel", job], check=False)
    status = read_status(paths)
    assert (status.state, status.attempt, status.job) == ("completed", 1, job)
    assert ("node3 does not answer, which may be why" in paths.log(0, "launcher").read_text()) == fails
    said = [paths.log(1, spec.name).read_text() for spec in plan]
    assert [re.findall(r"on (\w+) restart 1", text) for text in said] == [["node1"], ["node2"], ["node4"]]
