"""Commands with `launcher=slurm` on the development cluster: submitting, watching and disturbing a job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from main_job import LIMIT, read_metrics, reproducible_lines

ROOT = Path(__file__).resolve().parent.parent


def slurm(*command: str) -> str:
    """The output of one of SLURM's commands."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT).stdout


TRAIN = (str(ROOT / "train.py"),)
EVAL = ("-m", "rlx.cli", "eval")
SFT = ("-m", "rlx.cli", "sft")


def train(
    *overrides: str, cwd: Path, cache: Path, timeout: float = LIMIT, command: Sequence[str] = TRAIN
) -> subprocess.CompletedProcess[str]:
    """Run `python train.py`, or another command of Python, to its end."""
    return subprocess.run(
        [sys.executable, *command, *overrides],
        cwd=cwd,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "RLX_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


class SlurmJob:
    """One submitted run."""

    def __init__(self, run_dir: Path, cache: Path, *overrides: str, command: Sequence[str] = TRAIN) -> None:
        self.run_dir = run_dir
        line = ("launcher=slurm", "slurm=dev", "hardware=cpu", f"run.dir={run_dir}", *overrides)
        done = train(*line, cwd=run_dir.parent, cache=cache, command=command)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"^job (\d+):", done.stdout, re.MULTILINE)
        assert found, done.stdout
        self.id = found[1]

    def status(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "status.json").read_text())

    def state(self) -> str:
        """SLURM's word for the job."""
        return slurm("squeue", "-h", "-j", self.id, "-t", "all", "-o", "%T").strip()

    def text(self) -> str:
        """Everything that a failed test wants to know."""
        logs = sorted(self.run_dir.glob("logs/attempt_*/*.log"))
        ends = [f"--- {log.relative_to(self.run_dir)}\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in logs]
        return "\n".join([json.dumps(self.status(), indent=1), self.state(), *ends])

    def until(self, probe: Callable[[], Any], what: str, timeout: float = LIMIT) -> Any:
        deadline = time.monotonic() + timeout
        while not (found := probe()):
            assert time.monotonic() < deadline, f"no {what} after {timeout} s:\n{self.text()}"
            time.sleep(0.1)
        return found

    def until_over(self, timeout: float = LIMIT) -> str:
        """Wait until the run has a final state and SLURM has the nodes back; the state."""
        final = ("completed", "failed", "interrupted")
        self.until(lambda: self.status()["state"] in final, "end of the run", timeout)
        self.until(lambda: self.state() not in ("RUNNING", "COMPLETING", "PENDING"), "end of the job")
        return self.status()["state"]

    def until_step(self, step: int, timeout: float = LIMIT) -> None:
        """Wait for the trainer's record of a step."""
        self.until(lambda: any(r["step"] >= step and r["source"] == "trainer" for r in self.metrics()), f"step {step}", timeout)

    def pid(self, role: str, replica: int = 0) -> int:
        """The process of a role, on whatever node: emulated nodes share the machine's processes."""

        def find() -> int | None:
            records = [p for p in self.status()["processes"] if (p["role"], p["replica"]) == (role, replica)]
            return records[0]["pid"] if records else None

        return self.until(find, f"process of {role}")

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.run_dir)

    def reproducible_lines(self) -> list[dict[str, Any]]:
        return reproducible_lines(self.run_dir)

    def left(self, timeout: float = 60) -> list[int]:
        """Processes that name the run directory and do not end in `timeout` seconds.

        The reaper writes the status before it ends, and SLURM does not wait for it.
        """
        deadline = time.monotonic() + timeout
        while (found := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _alive(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if str(self.run_dir).encode() in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
                except (FileNotFoundError, ProcessLookupError):
                    continue
        return found
