"""The real command, `python train.py`, started as a user starts it; and what is left of it afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import zstandard

LIMIT = 1700  # seconds: it only ends what hangs, so it is as long as a test may take on a slow machine
ROOT = Path(__file__).resolve().parent.parent


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's metrics."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def reproducible_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Every metrics record, in order, without its wall-clock fields."""
    return [{k: v for k, v in r.items() if k != "time" and not k.startswith(("time/", "perf/"))} for r in read_metrics(run_dir)]


class MainJob:
    """One `python train.py` with its run directory."""

    def __init__(self, run_dir: Path, *overrides: str, env: dict[str, str] | None = None) -> None:
        self.run_dir = run_dir
        self.output = run_dir.with_suffix(".out")
        self.seen: dict[int, psutil.Process] = {}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), f"run.dir={run_dir}", *overrides],
            cwd=run_dir.parent,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | (env or {}),
            stdout=self.output.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, timeout: float = LIMIT) -> int:
        """Exit code of the launcher."""
        return self.process.wait(timeout)

    def until(self, probe: Callable[[], Any], what: str, timeout: float = LIMIT) -> Any:
        """Wait for something to become true while the job lives; remembers the job's processes on the way."""
        deadline, looked = time.monotonic() + timeout, 0.0
        while not (found := probe()):
            if time.monotonic() - looked > 1:  # it takes half of a core's time otherwise, which the job needs
                self.processes()
                looked = time.monotonic()
            assert self.process.poll() is None, f"the job ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {what} after {timeout} s:\n{self.text()}"
            time.sleep(0.1)
        self.processes()
        return found

    def until_step(self, step: int, timeout: float = LIMIT) -> None:
        self.until(lambda: any(r["step"] >= step for r in self.metrics("trainer")), f"step {step}", timeout)

    def until_started(self, role: str) -> int:
        """Wait for a role's process; its pid."""
        self.until(lambda: role in self.pids(), f"process of {role}")
        return self.pids()[role]

    def text(self) -> str:
        return self.output.read_text()

    def status(self) -> dict[str, Any]:
        path = self.run_dir / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def pids(self) -> dict[str, int]:
        """Process ids by role; of a rank but the first by its name, `trainer_1`."""
        processes = self.status().get("processes", [])
        return {f"trainer_{p['replica']}" if p["role"] == "trainer" and p["replica"] else p["role"]: p["pid"] for p in processes}

    def listens_on(self) -> set[str]:
        """The addresses of all TCP ports that the job's processes have open to others."""
        found = set()
        for process in self.processes().values():
            with contextlib.suppress(psutil.Error):
                found |= {each.laddr.ip for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        return found

    def metrics(self, source: str | None = None) -> list[dict[str, Any]]:
        return [r for r in read_metrics(self.run_dir) if source in (None, r["source"])]

    def reproducible_lines(self) -> list[dict[str, Any]]:
        return reproducible_lines(self.run_dir)

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        packed = (self.run_dir / "rollouts" / f"step_{step:06d}.jsonl.zst").read_bytes()
        text = zstandard.ZstdDecompressor().decompressobj().decompress(packed).decode()
        return [json.loads(line) for line in text.splitlines()]

    def processes(self) -> dict[int, psutil.Process]:
        """All processes of the job that were ever seen: those that name the run directory, and their descendants."""
        for process in psutil.process_iter(["cmdline"]):
            if process.pid != os.getpid() and any(str(self.run_dir) in part for part in process.info["cmdline"] or ()):
                self.seen.setdefault(process.pid, process)
                try:
                    for child in process.children(recursive=True):
                        self.seen.setdefault(child.pid, child)
                except psutil.NoSuchProcess:
                    pass
        return self.seen

    def left(self) -> list[str]:
        """What of the job still runs."""
        found = []
        for process in self.processes().values():
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
            except psutil.NoSuchProcess:
                continue
        return found

    def wait_until_nothing_is_left(self, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while self.left():
            assert time.monotonic() < deadline, f"still running after {timeout} s: {self.left()}"
            time.sleep(0.1)

    def destroy(self) -> None:
        """For tests that failed: end everything."""
        for process in self.processes().values():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
