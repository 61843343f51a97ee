"""Starts the processes of a plan, watches them, stops them, and says why.

It owns every process of the run: each gets its own process group and a log file and dies with the supervisor; the reaper sees to
what is left if the supervisor itself is killed. Exit codes arrive through pidfds, so the first death is seen first and is the one
blamed. It runs `ProcessSpec`s from `plan.yaml`; what they compute it does not know, nor where: that is the `Starter`'s.

SIGTERM and SIGINT end the run. SIGUSR2 says that the machine will be taken away: the file `preempt` tells the roles, which write a
checkpoint and leave with `LEFT`; after `preempt_grace` seconds they are stopped, and at once while no step has begun. The run's state is
then `preempted`. Who makes that file by hand asks for the same, and so does SLURM's SIGTERM where it is for a requeue or a preemption.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlx.config.schema import Config
from rlx.heartbeat import read_heartbeats
from rlx.launch.processes import TOKEN, die_with, kill_all, start_time
from rlx.launch.starters import LocalStarter, Starter
from rlx.metrics import read_metrics
from rlx.paths import RunPaths
from rlx.plan.record import read_plan
from rlx.runs.status import EXIT_CODES, Cause, Status, describe_returncode, last_lines, read_status
from rlx.types import ProcessSpec

TICK = 0.5  # seconds between two looks at heartbeats and metrics
SIGTERM_SPREADS = 3.0  # seconds in which a signal to a whole SLURM job reaches all of it
SETTLE = 1.0  # seconds in which a service's own death explains the failure of a process that used it
LEFT = EXIT_CODES["preempted"]  # exit code of a role that left for a preemption with its checkpoint written


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the supervisor has to know of the configuration."""

    grace: float  # seconds between SIGTERM and SIGKILL
    heartbeat_timeout: float  # seconds of silence after which a process is taken for hung
    last_lines: int  # log lines shown of the process that failed
    max_steps: int  # for the status
    preempt_grace: float = 60.0  # seconds from the notice of a preemption until the roles are stopped

    @classmethod
    def of(cls, cfg: Config) -> Limits:
        launcher = cfg.launcher
        return cls(
            grace=launcher.grace,
            heartbeat_timeout=launcher.heartbeat_timeout,
            last_lines=launcher.last_lines,
            max_steps=cfg.max_steps,
            preempt_grace=launcher.preempt_grace,
        )


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
        self,
        paths: RunPaths,
        limits: Limits,
        *,
        token: str,
        lock_fd: int,
        attempt: int,
        watched: dict[str, tuple[int, int | None]],
        starter: Starter | None = None,
        meaning_of_sigterm: Callable[[], str] = lambda: "interrupted",
    ) -> None:
        """`watched`: processes whose end ends the run, by name, each with its pid and `start_time`.

        `meaning_of_sigterm` answers with the state of a run that was sent SIGTERM: `interrupted` or `preempted`.
        """
        self.paths, self.limits, self.token, self.lock_fd = paths, limits, token, lock_fd
        self.status = read_status(paths) or Status(attempt=attempt, max_steps=limits.max_steps)
        self.status.supervisor = {"host": socket.gethostname(), "pid": os.getpid()}
        self.starter = starter or LocalStarter()
        self.meaning_of_sigterm = meaning_of_sigterm
        self.children: list[Child] = []
        self.watched = watched
        self.selector = selectors.DefaultSelector()
        self.interrupted = False
        self.preempted = False
        self.comes_back = False  # SLURM has requeued the job already, whatever becomes of this attempt
        self.leave_by = float("inf")  # when roles that were told of a preemption are stopped
        self.metrics_offset = 0
        self.looked = 0.0

    def run(self, received: Sequence[int] = ()) -> int:
        """Run the plan to its end and return the run's exit code. `received`: signals that came before, read once ours are handled."""
        self._handle_signals()
        self.interrupted |= signal.SIGTERM in received
        self.preempted |= signal.SIGUSR2 in received
        self._start_reaper()
        try:
            self._read_step()
            self.status.state = "starting"  # the records that there are were written by earlier attempts
            state, cause = self._watch_launcher() or self._start() or self._watch()
            self._say(f"{state}: stopping what still runs")
            if self.starter.remote and state == "interrupted":  # SLURM kills us too, when its own patience ends
                self._read_step()
                self.status.finish(state)
                self.status.write(self.paths)
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
        signal.signal(signal.SIGUSR2, self._preempt)

    def _preempt(self, signum: int, frame: object) -> None:
        if not self.preempted:
            self._say(f"received {signal.Signals(signum).name}: the roles have {self.limits.preempt_grace:g} s for a checkpoint")
        self.preempted = True

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
        # What an earlier attempt left would be taken for this one's.
        single = (self.paths.preempt, self.paths.preempted, self.paths.kernels)
        for old in (*single, *self.paths.endpoints.glob("*.json"), *self.paths.heartbeats.glob("*.json")):
            old.unlink(missing_ok=True)
        # What submitit says to its own job must not reach the roles: libraries look for such variables.
        base = {name: value for name, value in os.environ.items() if not name.startswith("SUBMITIT_")}
        before_exec = die_with(os.getpid())
        for spec in read_plan(self.paths.plan):
            argv, environment = self.starter.command(spec, {**base, **spec.env, TOKEN: self.token})
            with self.paths.log(self.status.attempt, spec.name).open("ab") as log:
                try:
                    process = subprocess.Popen(
                        argv,
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
            host = self.starter.host(spec)
            self._say(f"started {spec.name}, " + (f"step on {host}" if self.starter.remote else f"process {process.pid}"))
            # The pid of a process on another host is known once it has said it.
            pid = None if self.starter.remote else process.pid
            self.status.processes.append({"role": spec.role, "replica": spec.replica, "host": host, "pid": pid})
        self.status.write(self.paths)
        return None

    # -- watching

    def _watch(self) -> tuple[str, Cause | None]:
        """Wait until the run is over; the final state and, of a failure, the cause."""
        pending = list(self.children)
        while True:
            self._wait(TICK)
            if self.interrupted:
                if (meaning := self.meaning_of_sigterm()) != "preempted":
                    return meaning, None
                self.interrupted, self.preempted, self.comes_back = False, True, True
            if not self.preempted and self.paths.preempt.exists():
                # A step of a SLURM job makes it on SIGTERM; where the job is cancelled, we are sent one too.
                if self.starter.remote and self._interrupted_within(SIGTERM_SPREADS):
                    continue
                self._say(f"{self.paths.preempt} is there: the roles have {self.limits.preempt_grace:g} s for a checkpoint")
                self.preempted = True
            if self.preempted and self.leave_by == float("inf"):
                self.leave_by = time.monotonic() + self.limits.preempt_grace
                self.paths.ask_to_give_way()
                self._read_step()
                if self.status.state == "starting":
                    self._say("no step was begun yet: there is nothing to keep")
                    return "preempted", None
            if time.monotonic() > self.leave_by:
                self._say(f"{', '.join(child.spec.name for child in pending)} did not leave in {self.limits.preempt_grace:g} s")
                return "preempted", None
            for name, (pid, since) in self.watched.items():
                if start_time(pid) is None or (since is not None and start_time(pid) != since):
                    return self._launcher_gone(name)
            ended = [child for child in pending if not child.running]
            failed = [child for child in ended if not self._is_fine(child)]
            if failed:
                cause = self._blame(failed)
                if self.interrupted:
                    continue
                if not self._took_a_notice(failed):
                    return "failed", cause
                self._say(f"SLURM sent {', '.join(child.spec.name for child in failed)} SIGTERM: it wants the machine back")
                self.preempted = True
                continue
            for child in ended:
                self._say(f"{child.spec.name} has left" if self._code(child) == LEFT else f"{child.spec.name} is done")
                self._forget(child)
                pending.remove(child)
            ends = [self._code(child) for child in self.children if not child.running and not child.spec.service]
            if self.preempted and not set(ends) <= {0, LEFT} and not self.paths.preempted.exists():
                return "preempted", None  # without it there will be no checkpoint
            if all(child.spec.service for child in pending):
                # torchrun's ranks leave with 0, and say by this file that they left.
                if self.paths.preempted.exists() or LEFT in ends:
                    return "preempted", None
                # `srun` says 0 of a step whose node has failed, too; then SLURM ends the job.
                if self.starter.remote and self._interrupted_within(SIGTERM_SPREADS):
                    return self.meaning_of_sigterm(), None
                return "completed", None
            if time.monotonic() - self.looked >= TICK:
                self.looked = time.monotonic()
                hung = self._look(pending)
                if hung is not None:
                    return "failed", hung

    def _is_fine(self, child: Child) -> bool:
        """Whether the end of this process is part of the plan, or of giving way."""
        code = self._code(child)
        if not self.preempted:
            return code == 0 and not child.spec.service
        if child.spec.service or self.paths.preempted.exists() or self.comes_back:
            return True  # a checkpoint needs no servers, and once it is there it needs nobody
        return code in (0, LEFT) or (self.starter.remote and code == -signal.SIGTERM)

    def _took_a_notice(self, failed: list[Child]) -> bool:
        """Whether these are steps of a SLURM job that SLURM, not we, sent SIGTERM: some do not take it for a notice."""
        return self.starter.remote and all(self._code(child) == -signal.SIGTERM for child in failed)

    def _interrupted_within(self, seconds: float) -> bool:
        """Wait for a signal that is on its way."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.interrupted:
            time.sleep(0.02)
        return self.interrupted

    def _wait(self, timeout: float) -> None:
        for key, _ in self.selector.select(timeout):
            if key.data is not None:
                key.data()

    def _code(self, child: Child) -> int:
        """The return code of a role that has ended; negative: the signal."""
        return self.starter.returncode(child.process.returncode)

    def _blame(self, failed: list[Child]) -> Cause:
        """The failure that explains the others. Those seen at one look are told apart: a signal before an exit code, a service first.

        A process whose server dies fails on the request in flight, sometimes before the server is gone: wait a moment for that.
        And SLURM sends SIGTERM to the steps, or refuses to launch them, before it sends it to us: then nobody is to blame.
        """
        first = min(failed, key=lambda child: (self._code(child) >= 0, not child.spec.service))
        if self.starter.remote:
            self._interrupted_within(SIGTERM_SPREADS)
        if self._code(first) > 0 and not first.spec.service:
            deadline = time.monotonic() + SETTLE
            while time.monotonic() < deadline and not self.interrupted:
                time.sleep(0.02)
                service = next((child for child in self.children if child.spec.service and not child.running), None)
                if service is not None:
                    first = service
                    break
        return self._cause(first.spec, self._code(first), describe_returncode(self._code(first), first.spec.service))

    def _look(self, pending: list[Child]) -> Cause | None:
        """Refresh the status; the cause when a process has been silent for too long."""
        if self.reaper.poll() is not None:
            self._start_reaper()
        self._read_step()
        with contextlib.suppress(OSError):  # a full disk ends the role that needs it, and its words are the cause to be shown
            self.status.write(self.paths)
        beats = read_heartbeats(self.paths)
        for child, process in zip(self.children, self.status.processes, strict=True):
            process["pid"] = process["pid"] or beats.get(child.spec.name, {}).get("pid")
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
        running = [child for child in self.children if child.running]
        if running and not self.starter.terminate():
            for child in running:
                os.killpg(child.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self.limits.grace
        while any(child.running for child in self.children) and time.monotonic() < deadline:
            time.sleep(0.02)
        survivors = [child.spec.name for child in self.children if child.running]
        if survivors:
            self._say(f"killing {', '.join(survivors)}: still there {self.limits.grace:g} s after SIGTERM")
            self.starter.kill(survivors)
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
