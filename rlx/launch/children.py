"""The child processes of a supervisor: start them, notice when they exit, stop them. Also starts the reaper, which outlives the supervisor.

Each child has its own process group and log file, and dies with the supervisor: roles do so by themselves (`rlx.process`), and the reaper
kills what is left. Exits are noticed through pidfds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlx.launch.starters import Starter
from rlx.launch.verdict import Process
from rlx.plan.process_spec import ProcessSpec
from rlx.process_tree import kill_all


@dataclass(slots=True)
class Child:
    """One started process."""

    spec: ProcessSpec
    process: subprocess.Popen[bytes]
    pidfd: int  # -1 after `Children.forget`
    log: Path
    started: float = field(default_factory=time.monotonic)
    look: int = 0  # number of the look that first saw its exit; 0: still running
    starts: int = 0  # how often it was started again
    killed: str = ""  # why the supervisor killed it

    @property
    def running(self) -> bool:
        return self.process.poll() is None


class Children:
    """All processes of one attempt."""

    def __init__(self, starter: Starter, token: str) -> None:
        """`token`: value of RLX_RUN_TOKEN in the children's environment."""
        self.all: list[Child] = []
        self.starter, self.token = starter, token
        self._looks = 0

    # -- the reaper

    def start_reaper(self, run_dir: Path, num_lines: int, lock_fd: int) -> None:
        """Start the reaper, which kills what is left of the processes if the supervisor is killed.

        It inherits the run's lock, so the directory stays locked until no process of the run is left.
        """
        command = [sys.executable, "-m", "rlx.launch.reaper", str(run_dir), self.token, str(num_lines)]
        self.reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=(lock_fd,))

    def release_reaper(self) -> None:
        assert self.reaper.stdin is not None
        self.reaper.stdin.close()
        self.reaper.wait()

    def _tell_reaper(self, line: str) -> None:
        assert self.reaper.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            self.reaper.stdin.write(f"{line}\n".encode())
            self.reaper.stdin.flush()

    # -- starting and looking

    def start(self, spec: ProcessSpec, environment: Mapping[str, str], log: Path) -> Child:
        """Start a process and append its output to `log`. Raises OSError or ValueError (a missing GPU) if it cannot start."""
        child = self._start(spec, environment, log)
        self.all.append(child)
        return child

    def start_again(self, child: Child, environment: Mapping[str, str], log: Path) -> Child:
        """Start a process that has ended in the place of the old one. Raises the errors of `start`."""
        if child.pidfd >= 0:
            self.forget(child)
        place = self.all.index(child)
        self.all[place] = self._start(child.spec, environment, log)
        self.all[place].starts = child.starts + 1
        return self.all[place]

    def _start(self, spec: ProcessSpec, environment: Mapping[str, str], log: Path) -> Child:
        argv, its_environment = self.starter.command(spec, environment)
        with log.open("ab") as file:
            process = subprocess.Popen(
                argv,
                env=its_environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._tell_reaper(f"+{process.pid}")
        return Child(spec, process, os.pidfd_open(process.pid), log)

    def look(self, spare: Callable[[Child], int] = lambda child: 0, hung: str | None = None) -> tuple[Process, ...]:
        """The current state of all processes. `spare`: how often a process that has ended, or that hangs, may be started again.

        `hung`: the name of one that hangs. If it was killed and still runs, no signal ends it, so it cannot start again."""
        self._looks += 1
        seen = []
        for child in self.all:
            code = None
            if not child.running:
                child.look = child.look or self._looks
                code = self.starter.returncode(child.process.returncode)
            hangs = child.spec.name == hung and not child.killed
            left = spare(child) if code is not None or hangs else 0
            seen.append(Process(name=child.spec.name, service=child.spec.service, code=code, look=child.look, spare=left))
        return tuple(seen)

    # -- stopping

    def kill(self, name: str, reason: str) -> None:
        """Kill a process with all that it started."""
        child = next(child for child in self.all if child.spec.name == name)
        child.killed = reason
        self.starter.kill([name])
        kill_all([child.process.pid], token=None)

    def forget(self, child: Child) -> None:
        """Stop tracking a finished child, because its pid may be reused. Kills any process that it left running."""
        kill_all([child.process.pid], token=None)
        os.close(child.pidfd)
        child.pidfd = -1
        self._tell_reaper(f"-{child.process.pid}")

    def stop(self, grace: float, say: Callable[[str], None]) -> None:
        """Stop all children: SIGTERM, wait `grace` seconds, SIGKILL. Then kill the processes that left their group."""
        running = [child for child in self.all if child.running]
        if running and not self.starter.terminate():
            for child in running:
                os.killpg(child.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while any(child.running for child in self.all) and time.monotonic() < deadline:
            time.sleep(0.02)
        survivors = [child.spec.name for child in self.all if child.running]
        if survivors:
            say(f"killing {', '.join(survivors)}: still running {grace:g} s after SIGTERM")
            self.starter.kill(survivors)
        left = kill_all([child.process.pid for child in self.all if child.pidfd >= 0], self.token)
        if left:
            say(f"processes {left} survive SIGKILL")
        for child in self.all:
            if child.process.pid not in left:
                child.process.wait()
