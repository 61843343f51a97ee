"""Starts the processes of a plan, watches them, stops them, and says why.

It owns every process of the run: each gets its own process group and a log file and dies with the supervisor; the reaper sees to
what is left if the supervisor itself is killed. Exit codes arrive through pidfds, so the first death is seen first and is the one
blamed. It runs `ProcessSpec`s from `plan.yaml`; what they compute it does not know.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

from rlx.heartbeat import read_heartbeats
from rlx.launch.plan import read_plan
from rlx.launch.processes import TOKEN, die_with, kill_all, start_time
from rlx.launch.status import Cause, Status, describe_returncode, last_lines, read_status
from rlx.metrics import read_metrics
from rlx.paths import RunPaths
from rlx.process import SUPERVISOR
from rlx.types import ProcessSpec

TICK = 0.5  # seconds between two looks at heartbeats and metrics
SETTLE = 1.0  # seconds in which a service's own death explains the failure of a process that used it


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the supervisor has to know of the configuration."""

    grace: float  # seconds between SIGTERM and SIGKILL
    heartbeat_timeout: float  # seconds of silence after which a process is taken for hung
    last_lines: int  # log lines shown of the process that failed
    max_steps: int  # for the status


@dataclass(slots=True)
class Child:
    """One started process."""

    spec: ProcessSpec
    process: subprocess.Popen[bytes]
    pidfd: int
    started: float = field(default_factory=time.time)

    @property
    def running(self) -> bool:
        return self.process.poll() is None


class Supervisor:
    """One attempt at one run. `run()` is called once, on the main thread."""

    def __init__(
        self, paths: RunPaths, limits: Limits, *, token: str, lock_fd: int, attempt: int, watched: dict[str, tuple[int, int | None]]
    ) -> None:
        """`watched`: processes whose end ends the run, by name, each with its pid and `start_time`."""
        self.paths, self.limits, self.token, self.lock_fd = paths, limits, token, lock_fd
        self.status = read_status(paths) or Status(attempt=attempt, max_steps=limits.max_steps)
        self.status.supervisor = {"host": socket.gethostname(), "pid": os.getpid()}
        self.children: list[Child] = []
        self.watched = watched
        self.selector = selectors.DefaultSelector()
        self.interrupted = False
        self.metrics_offset = 0
        self.looked = 0.0

    def run(self) -> int:
        """Run the plan to its end and return the run's exit code."""
        self._handle_signals()
        self._start_reaper()
        try:
            state, cause = self._watch_launcher() or self._start() or self._watch()
            self._say(f"{state}: stopping what still runs")
        finally:
            self._stop()
        self._read_step()
        self.status.finish(state, cause)
        self.status.write(self.paths)
        self._release_reaper()
        if cause is not None:
            self._say(f"{cause.role} failed: {cause.reason}", *(f"  | {line}" for line in cause.last_lines))
        assert self.status.exit_code is not None
        return self.status.exit_code

    # -- starting

    def _handle_signals(self) -> None:
        """Turn the signals that ask for an end into a wake-up of the loop. Children start with default handlers."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.selector.register(wake_read, selectors.EVENT_READ, lambda: os.read(wake_read, 4096))
        for signum in (signal.SIGINT, signal.SIGTERM):  # a hang-up of the terminal is for the launcher to judge
            signal.signal(signum, self._interrupt)

    def _interrupt(self, signum: int, frame: object) -> None:
        if not self.interrupted:
            self._say(f"received {signal.Signals(signum).name}")
        self.interrupted = True

    def _start_reaper(self) -> None:
        command = [sys.executable, "-m", "rlx.launch.reaper", str(self.paths.root), self.token, str(self.limits.last_lines)]
        # It inherits the run's lock: the directory is free only when nothing of the run is left.
        self.reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, pass_fds=(self.lock_fd,))
        for child in self.children:
            self._tell_reaper(f"+{child.process.pid}")

    def _tell_reaper(self, line: str) -> None:
        assert self.reaper.stdin is not None
        try:
            self.reaper.stdin.write(f"{line}\n".encode())
            self.reaper.stdin.flush()
        except BrokenPipeError:  # it was killed; the loop starts another
            pass

    def _release_reaper(self) -> None:
        assert self.reaper.stdin is not None
        self.reaper.stdin.close()
        self.reaper.wait()

    def _watch_launcher(self) -> tuple[str, Cause | None] | None:
        """Have the loop woken when the launcher, or submitit's process in between, ends."""
        for name, (pid, since) in self.watched.items():
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                return self._launcher_gone(name)
            self.selector.register(pidfd, selectors.EVENT_READ, None)
            if since is not None and start_time(pid) != since:
                return self._launcher_gone(name)
        return None

    def _start(self) -> tuple[str, Cause | None] | None:
        """Start everything; a result only where something cannot be started."""
        self.paths.logs(self.status.attempt).mkdir(parents=True, exist_ok=True)
        # What submitit says to its own job must not reach the roles: libraries look for such variables.
        base = {name: value for name, value in os.environ.items() if not name.startswith("SUBMITIT_")}
        before_exec = die_with(os.getpid())
        for spec in read_plan(self.paths.plan):
            environment = {**base, **spec.env, TOKEN: self.token, SUPERVISOR: str(os.getpid())}
            with self.paths.log(self.status.attempt, spec.name).open("ab") as log:
                try:
                    process = subprocess.Popen(
                        spec.argv,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=before_exec,
                    )
                except OSError as error:
                    return "failed", self._cause(spec, None, f"could not be started: {error}")
            self._tell_reaper(f"+{process.pid}")
            child = Child(spec, process, os.pidfd_open(process.pid))
            self.children.append(child)
            self.selector.register(child.pidfd, selectors.EVENT_READ, None)
            self._say(f"started {spec.name}, process {process.pid}")
            self.status.processes.append({"role": spec.role, "replica": spec.replica, "host": socket.gethostname(), "pid": process.pid})
        self.status.write(self.paths)
        return None

    # -- watching

    def _watch(self) -> tuple[str, Cause | None]:
        """Wait until the run is over; the final state and, of a failure, the cause."""
        pending = list(self.children)
        while True:
            self._wait(TICK)
            if self.interrupted:
                return "interrupted", None
            for name, (pid, since) in self.watched.items():
                if start_time(pid) is None or (since is not None and start_time(pid) != since):
                    return self._launcher_gone(name)
            ended = [child for child in pending if not child.running]
            failed = [child for child in ended if child.process.returncode != 0 or child.spec.service]
            if failed:
                return "failed", self._blame(failed)
            for child in ended:
                self._say(f"{child.spec.name} is done")
                self._forget(child)
                pending.remove(child)
            if all(child.spec.service for child in pending):
                return "completed", None
            if time.monotonic() - self.looked >= TICK:
                self.looked = time.monotonic()
                hung = self._look(pending)
                if hung is not None:
                    return "failed", hung

    def _wait(self, timeout: float) -> None:
        for key, _ in self.selector.select(timeout):
            if key.data is not None:
                key.data()

    def _blame(self, failed: list[Child]) -> Cause:
        """The failure that explains the others. Those seen at one look are told apart: a signal before an exit code, a service first.

        A process whose server dies fails on the request in flight, sometimes before the server is gone: wait a moment for that.
        """
        first = min(failed, key=lambda child: (child.process.returncode >= 0, not child.spec.service))
        if first.process.returncode > 0 and not first.spec.service:
            deadline = time.monotonic() + SETTLE
            while time.monotonic() < deadline and not self.interrupted:
                time.sleep(0.02)
                service = next((child for child in self.children if child.spec.service and not child.running), None)
                if service is not None:
                    first = service
                    break
        return self._cause(first.spec, first.process.returncode, describe_returncode(first.process.returncode, first.spec.service))

    def _look(self, pending: list[Child]) -> Cause | None:
        """Refresh the status; the cause when a process has been silent for too long."""
        if self.reaper.poll() is not None:
            self._start_reaper()
        self._read_step()
        self.status.write(self.paths)
        beats = read_heartbeats(self.paths)
        for child in pending:
            beat = beats.get(child.spec.name, {})
            silent = time.time() - max(child.started, beat.get("time", 0.0))
            if silent > self.limits.heartbeat_timeout:
                doing = f"; its last word was: {beat['phase']}" if beat.get("time", 0.0) >= child.started else ""
                limit = f"launcher.heartbeat_timeout={self.limits.heartbeat_timeout:g}"
                return self._cause(child.spec, None, f"gave no sign of life for {silent:.0f} s ({limit}){doing}")
        return None

    def _read_step(self) -> None:
        for record, offset in read_metrics(self.paths.metrics, self.metrics_offset):
            self.metrics_offset = offset
            self.status.state = "running"
            if record["source"] == "trainer":
                self.status.step = max(self.status.step, record["step"] + 1)

    def _launcher_gone(self, name: str) -> tuple[str, Cause]:
        return "failed", Cause(role="launcher", replica=0, returncode=None, reason=f"{name} was killed or died", log=self._log("launcher"))

    def _cause(self, spec: ProcessSpec, returncode: int | None, reason: str) -> Cause:
        lines = last_lines(self.paths.log(self.status.attempt, spec.name), self.limits.last_lines)
        return Cause(role=spec.role, replica=spec.replica, returncode=returncode, reason=reason, log=self._log(spec.name), last_lines=lines)

    def _log(self, name: str) -> str:
        return str(self.paths.log(self.status.attempt, name).relative_to(self.paths.root))

    # -- stopping

    def _stop(self) -> None:
        """End everything that was started: SIGTERM, `grace` seconds, SIGKILL; then whatever escaped its group."""
        for child in self.children:
            if child.running:
                os.killpg(child.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self.limits.grace
        while any(child.running for child in self.children) and time.monotonic() < deadline:
            time.sleep(0.02)
        survivors = [child.spec.name for child in self.children if child.running]
        if survivors:
            self._say(f"killing {', '.join(survivors)}: still there {self.limits.grace:g} s after SIGTERM")
        left = kill_all([child.process.pid for child in self.children if child.pidfd >= 0], self.token)
        if left:
            self._say(f"processes {left} do not end even on SIGKILL")
        for child in self.children:
            if child.process.pid not in left:
                child.process.wait()

    def _forget(self, child: Child) -> None:
        """A process that has done its work: its number may soon be another's. What it left running ends now."""
        kill_all([child.process.pid], token=None)
        self.selector.unregister(child.pidfd)
        os.close(child.pidfd)
        child.pidfd = -1
        self._tell_reaper(f"-{child.process.pid}")

    def _say(self, *lines: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        for line in lines:
            print(f"{stamp} {line}", flush=True)
