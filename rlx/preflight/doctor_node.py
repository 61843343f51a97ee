"""`rlx doctor --node`: the same checks on a compute node, as a SLURM job submitted through submitit with the cluster's YAML.

    here: submit `NodeCheck` ─ sbatch ─► node: examine, write findings_ID.json ─► here: read it

The job takes what a run of the configuration would take on one node (GPUs, memory, `slurm.setup`), for a few minutes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor

from rlx.config.errors import ConfigError
from rlx.config.load import compose
from rlx.config.schema import CommandConfig
from rlx.launch.follow import ASK, LATE, Waiting
from rlx.launch.sbatch import own_job_forgotten, python_of, sbatch_options
from rlx.paths import listed, write_text
from rlx.preflight.doctor import Examined, Finding, examine, existing
from rlx.preflight.doctor_services import CHECKS
from rlx.runs.jobs import ENDED, GONE, ask, queue
from rlx.runs.run import WAITS
from rlx.runs.status import last_lines

MINUTES = 10  # time limit of the job


class NodeCheck:
    """The function that the job runs."""

    def __init__(self, argv: Sequence[str], folder: str) -> None:
        self.argv, self.folder = list(argv), folder

    def __call__(self) -> None:
        cfg = compose(self.argv).cfg
        found = [asdict(each) for each in examine(Examined(cfg=cfg, run_dir=Path(cfg.run.dir or "outputs")), CHECKS)]
        report = {"host": os.environ.get("SLURMD_NODENAME") or os.uname().nodename, "findings": found}
        write_text(_report(Path(self.folder), os.environ["SLURM_JOB_ID"]), json.dumps(report))


def _report(folder: Path, job: str) -> Path:
    return folder / f"findings_{job}.json"


def job_options(cfg: CommandConfig, base: Path) -> dict[str, Any]:
    """submitit's parameters of the job: a run's, on one node and for a short time. `base`: where it reports."""
    short = replace(
        cfg, hardware=replace(cfg.hardware, nodes=1), slurm=replace(cfg.slurm, time_minutes=min(MINUTES, cfg.slurm.time_minutes))
    )
    options = sbatch_options(short, "rlx-doctor", base)
    further = {name: value for name, value in options["additional_parameters"].items() if name not in ("requeue", "signal")}
    return {**options, "additional_parameters": {**further, "no_requeue": True}}


def on_a_node(cfg: CommandConfig, argv: Sequence[str]) -> tuple[str, list[Finding]]:
    """Submit the job, wait for it, and return the node's name and its findings.

    Raises ConfigError if SLURM rejects the job, or if it ends without findings, with the end of its output. Any exception that interrupts
    the wait cancels the job.
    """
    folder = existing(Path(cfg.run.dir or "outputs")) / ".rlx-doctor"
    options = job_options(cfg, folder)
    executor = SlurmExecutor(folder, python=python_of(cfg))
    executor.update_parameters(**{key: value for key, value in options.items() if key != "mem"})
    executor.parameters |= {"mem": options.get("mem"), "wckey": None}
    try:
        with own_job_forgotten(options):
            job = executor.submit(NodeCheck(argv, str(folder)))
    except Exception as error:  # submitit reports sbatch's errors through several exception types
        text = getattr(error, "stderr", None) or str(error)
        reason = text.decode(errors="replace") if isinstance(text, bytes) else text
        raise ConfigError(f"SLURM rejected the job: {reason.strip()}.\n  fix: correct the cluster's YAML (slurm=NAME)") from error
    try:
        print(f"job {job.job_id}: waiting for a node", file=sys.stderr, flush=True)
        report = _wait(job.job_id, _report(folder, job.job_id), Path(job.paths.stdout))
    except BaseException:
        ask("scancel", job.job_id)
        raise
    return report["host"], [Finding(**each) for each in report["findings"]]


def _wait(job: str, report: Path, output: Path) -> dict[str, Any]:
    gone, asked, waiting = 0, -math.inf, Waiting(sys.stderr)
    while not listed(report):
        if time.monotonic() - asked >= ASK:
            asked = time.monotonic()
            state = _state(job)
            gone = gone + 1 if state in ENDED else 0
            if gone >= LATE:
                lines = "\n".join(f"  | {line}" for line in last_lines(output, 20)) or "  | (no output)"
                raise ConfigError(
                    f"job {job} ended ({state}) without findings; its output:\n{lines}\n  fix: correct slurm.setup in the cluster's YAML"
                )
            if state in WAITS:
                with contextlib.suppress(RuntimeError):  # the controller may answer later
                    waiting.tell([job])
        time.sleep(0.2)
        os.listdir(report.parent)  # a network file system may cache that the file does not exist
    return json.loads(report.read_text())


def _state(job: str) -> str:
    try:
        return queue().get(job, GONE)
    except RuntimeError:
        return "UNKNOWN"
