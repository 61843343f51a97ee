"""The real local launch on toy processes: a launcher in front of a plan that is already in the directory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from launch_configs import config

from rlx.config.load import to_yaml
from rlx.paths import RunPaths
from rlx.plan.process_spec import ProcessSpec, write_plan
from rlx.process_tree import start_time
from rlx.runs.status import Status, read_status

# The launcher, as the command line uses it, on a plan that is already in the directory.
LAUNCHER = """
import sys
from pathlib import Path
from rlx.config.load import load_command
from rlx.launch.local import launch
from rlx.paths import RunPaths
from rlx.lock import FileLock

paths = RunPaths(Path(sys.argv[1]))
lock = FileLock(paths.lock)
assert lock.share(timeout=0)
sys.exit(launch(paths, load_command(paths.root), lock))
"""
FOREVER = "import time\nprint('working', flush=True)\nwhile True: time.sleep(0.05)"


# For toys that wait for each other's end.
DIES = """
import os, sys, time
def dies(pid):  # whoever has this id; its parent may not have seen it yet
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0] == 'Z'
    except OSError:
        return True
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.005)
    return open(name).read()
def tell(name):
    with open(name + '.new', 'w') as file:
        file.write(str(os.getpid()))
    os.rename(name + '.new', name)
"""

RUN_DIR = "@run_dir@"  # stands for the run directory in a toy's arguments


def toy(role: str, code: str, *, service: bool = False, arguments: tuple[str, ...] = ()) -> ProcessSpec:
    return ProcessSpec(
        role=role, replica=0, node=0, gpus=(), argv=(sys.executable, "-c", textwrap.dedent(code), *arguments), service=service
    )


class Run:
    """A launcher in front of toy processes."""

    def __init__(
        self,
        root: Path,
        plan: list[ProcessSpec],
        *,
        grace: float = 20.0,
        heartbeat_timeout: float = 60.0,
        preempt_grace: float = 60.0,
        max_restarts: int = 0,
        hung_timeout: float = 60.0,
    ) -> None:
        self.paths = RunPaths(root)
        root.mkdir(exist_ok=True)
        self.plan = [replace(spec, argv=tuple(part.replace(RUN_DIR, str(root)) for part in spec.argv)) for spec in plan]
        write_plan(self.paths.plan, self.plan)
        launcher = {"grace": grace, "heartbeat_timeout": heartbeat_timeout, "preempt_grace": preempt_grace, "log_tail_lines": 5}
        inference = {"max_restarts": max_restarts, "hung_timeout": hung_timeout}
        self.paths.config.write_text(to_yaml(config("cpu", max_steps=3, launcher=launcher, inference=inference)))
        self.mark = f"toy-{os.getpid()}-{time.monotonic_ns()}"
        self.launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(root)],
            env={**os.environ, "RLX_TEST_MARK": self.mark},
            start_new_session=True,  # a process group as a terminal would give it, so that Ctrl-C can be sent to the group
            stderr=subprocess.PIPE,
            text=True,
        )

    def status(self) -> Status:
        self.until(self.paths.status.exists)
        return read_status(self.paths)

    def wait(self, timeout: float = 300.0) -> Status:
        """The launcher's end."""
        self.launcher.wait(timeout)
        status = self.status()
        assert status.exit_code == self.launcher.returncode
        return status

    def until(self, probe: Callable[[], object], timeout: float = 300.0) -> None:
        deadline = time.monotonic() + timeout
        while not probe():
            assert time.monotonic() < deadline, f"not in {timeout} s; log:\n{self.log('launcher')}"
            time.sleep(0.02)

    def until_started(self) -> None:
        """The status has every process, which the supervisor writes once the last has started, and each has written its first line."""
        self.until(lambda: len(self.status().processes) == len(self.plan) and all(self.log(spec.name) for spec in self.plan))

    def log(self, name: str) -> str:
        path = self.paths.log(0, name)
        return path.read_text() if path.exists() else ""

    def pid(self, role: str) -> int:
        return next(process["pid"] for process in self.status().processes if process["role"] == role)

    def left(self) -> list[str]:
        """Command lines of living processes that this run started, of whatever kind."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or start_time(int(entry.name)) is None or int(entry.name) == self.launcher.pid:
                continue
            try:
                if f"RLX_TEST_MARK={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def assert_nothing_left(self, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.left() == []


def starting(root: Path) -> Iterator[Callable[..., Run]]:
    """What a fixture yields: `start(plan, name, **limits)`, whose launchers are ended afterwards."""
    runs: list[Run] = []

    def make(plan: list[ProcessSpec], name: str = "run", **limits: float) -> Run:
        runs.append(Run(root / name, plan, **limits))
        return runs[-1]

    yield make
    for run in runs:
        if run.launcher.poll() is None:
            run.launcher.kill()
            run.launcher.wait()
        run.launcher.stderr.close()
