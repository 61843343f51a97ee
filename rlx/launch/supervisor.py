"""Starts the processes of a plan, watches them, stops them, and reports why the run ended.

The supervisor owns every process of the run. It reads their `ProcessSpec`s from `plan.yaml`; the `Starter` decides on which host they
run. This module observes and acts; `verdict.decide` decides what an observation means for the run. Exit codes arrive through pidfds,
so the process that dies first is seen first and blamed. If the supervisor itself is killed, the reaper kills the remaining processes.
A service (an inference server) that dies after it has served is started again in its place, up to `max_restarts` times. One that hangs
after it has served is killed first.

SIGTERM and SIGINT end the run. SIGUSR2 announces that the machine will be taken away: the supervisor creates the file `preempt`, and
the roles write a checkpoint and exit with `LEFT`. It stops them after `preempt_grace` seconds, or at once if no step has begun. The
run's state is then `preempted`. Creating the file by hand does the same, and so does a SIGTERM from SLURM for a requeue or preemption.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rlx.config.oom_hints import ran_out, when_out_of_memory
from rlx.config.schema import CommandConfig, PlayRoot, TrainingRoot
from rlx.heartbeat import EVALUATING, SERVING, Ages, read_heartbeats
from rlx.launch.children import Child, Children
from rlx.launch.stall import StallDoctor
from rlx.launch.starters import Starter
from rlx.launch.verdict import Process, Verdict, View, decide, find_hung, is_fine
from rlx.metrics import read_metrics
from rlx.paths import RunPaths, listed
from rlx.plan.process_spec import read_plan
from rlx.polling import LEFT
from rlx.process import disk_is_full
from rlx.process_tree import TOKEN, start_time
from rlx.runs.host_commands import is_inside
from rlx.runs.provenance import begun_on, note_changes
from rlx.runs.status import Cause, Restart, Status, describe_returncode, last_lines, read_status
from rlx.weights import tmpfs

TICK = 0.5  # seconds between two looks at heartbeats and metrics
LAST_WORDS = 300  # lines at the end of a log in which an error is looked for: other ranks of the host write there, too
SOON = 0.02  # seconds between two looks while the verdict is `settle`


class Supervisor:
    """One attempt at one run. `run()` is called once, on the main thread."""

    def __init__(
        self,
        paths: RunPaths,
        cfg: CommandConfig,
        *,
        lock_fd: int,
        attempt: int,
        starter: Starter | None = None,
        token: str | None = None,
        watched: Mapping[str, tuple[int, int | None]] = MappingProxyType({}),
    ) -> None:
        """`watched`: name → (pid, `start_time`) of the processes without which the run must stop.

        If hosts do not answer when a process has failed, that is why: the state is then `preempted`, and `lost` and `blamed` say more.
        """
        self.paths, self.cfg, self.token = paths, cfg, token or secrets.token_hex(16)
        inference = cfg.inference if isinstance(cfg, PlayRoot) else None
        self.max_restarts = 0 if inference is None else inference.max_restarts
        self.hung_timeout = None if inference is None else inference.hung_timeout
        self.status = read_status(paths) or Status(attempt=attempt, max_steps=cfg.total_steps)
        self.status.supervisor = {"host": socket.gethostname(), "pid": os.getpid()}
        self.starter = starter or Starter()
        self.lost: tuple[str, ...] = ()  # hosts that did not answer when a process had failed
        self.blamed: Cause | None = None  # that process
        self.children = Children(self.starter, self.token)
        self.lock_fd = lock_fd
        self.watched = watched
        self.selector = selectors.DefaultSelector()
        self.interrupted = False  # SIGTERM or SIGINT came
        self.notice = False  # SIGUSR2 came
        self.told = False  # the roles were told to write a checkpoint and leave
        self.comes_back = False  # SLURM has already requeued the job, however this attempt ends
        self.leave_by = float("inf")  # monotonic time at which roles that were told to leave are stopped
        self.ages = Ages()
        self.stalls = StallDoctor(paths, self.status.attempt, cfg.launcher.stall_timeout, lambda text: self._say(*text.splitlines()))
        self.metrics_offset = 0
        self.counted: set[int] = set()  # steps of the records that are not the trainer's
        self.looked = 0.0

    def run(self, received: Sequence[int] = ()) -> int:
        """Run the plan to its end and return the run's exit code. `received`: signals that arrived before the handlers are installed."""
        self._handle_signals()
        self.interrupted |= signal.SIGTERM in received
        self.notice |= signal.SIGUSR2 in received
        for signum in received:
            self._say(f"received {signal.Signals(signum).name}")
        self._say(*(f"changed since the run was recorded: {line}" for line in note_changes(self.paths, self.cfg)))
        self.children.start_reaper(self.paths.root, self.cfg.launcher.log_tail_lines, self.lock_fd)
        try:
            self._read_step()
            self.status.state = "starting"  # earlier attempts wrote the existing metric records
            verdict = self._start() or self._watch()
            state, cause = verdict.state or "failed", self._cause(verdict)
            if state == "failed" and (lost := tuple(self.starter.lost_hosts())):
                self._say(f"{verdict.blamed}: {verdict.reason}; {', '.join(lost)} does not answer, which may be why")
                state, cause, self.lost, self.blamed = "preempted", None, lost, cause
            self._say(f"{state}: stopping what still runs")
            if self.starter.remote and state == "interrupted":  # SLURM will kill the supervisor too, after its own grace time
                self._read_step()
                self.status.finish(state)
                self._write_status()
        finally:
            self.children.stop(self.cfg.launcher.grace, self._say)
        self._read_step()
        self.status.finish(state, cause)
        self._write_status()
        self._clear_memory()
        self.children.release_reaper()
        if cause is not None:
            self._say(f"{cause.role} failed: {cause.reason}", *(f"  | {line}" for line in cause.last_lines))
        assert self.status.exit_code is not None
        return self.status.exit_code

    # -- starting

    def _handle_signals(self) -> None:
        """Let the stop signals wake the loop. Children start with default handlers."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.selector.register(wake_read, selectors.EVENT_READ, lambda: os.read(wake_read, 4096))
        for signum in (signal.SIGINT, signal.SIGTERM):  # the launcher handles SIGHUP
            signal.signal(signum, self._interrupt)
        if is_inside():  # a notice to all steps, of which this is one; the roles handle it
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, self._preempt)

    def _preempt(self, signum: int, frame: object) -> None:
        if not self.notice and not self.told:
            self._say(f"received {signal.Signals(signum).name}")
        self.notice = True

    def _interrupt(self, signum: int, frame: object) -> None:
        if not self.interrupted:
            self._say(f"received {signal.Signals(signum).name}")
        self.interrupted = True

    def _gone(self) -> str | None:
        """Name of the first watched process that has ended; `None` if all are alive."""
        for name, (pid, since) in self.watched.items():
            if (started := start_time(pid)) is None or (since is not None and started != since):
                return name
        return None

    def _start(self) -> Verdict | None:
        """Start all processes. Returns a verdict only if one cannot be started."""
        self.paths.logs(self.status.attempt).mkdir(parents=True, exist_ok=True)
        # Delete the files of an earlier attempt: they would be read as this one's.
        single = (self.paths.preempt, self.paths.preempted, self.paths.kernels, self.paths.failures)
        folders = (self.paths.endpoints.glob("*.json"), self.paths.heartbeats.glob("*.json"), self.paths.stalls.glob("*"))
        for old in (*single, *(file for folder in folders for file in folder)):
            old.unlink(missing_ok=True)
        self.specs = {spec.name: spec for spec in read_plan(self.paths.plan)}
        for spec in self.specs.values():
            try:
                child = self.children.start(spec, self._environment(), self.paths.log(self.status.attempt, spec.name))
            except (OSError, ValueError) as error:
                return self._not_started(spec.name, error)
            self.selector.register(child.pidfd, selectors.EVENT_READ, None)
            host = self.starter.host(spec)
            self._say(f"started {spec.name}, " + (f"step on {host}" if self.starter.remote else f"process {child.process.pid}"))
            pid = None if self.starter.remote else child.process.pid  # a remote pid is known after the first heartbeat
            self.status.processes.append({"role": spec.role, "replica": spec.replica, "host": host, "pid": pid})
        self._write_status()
        return None

    def _environment(self) -> dict[str, str]:
        return os.environ | {TOKEN: self.token} | begun_on(self.paths)

    def _not_started(self, name: str, error: Exception) -> Verdict:
        return Verdict(state="failed", blamed=name, reason=f"could not be started: {error}")

    def _start_again(self, name: str) -> Verdict | None:
        """Start a service that has died or was killed in its place. Returns a verdict only if it cannot be started."""
        place, old = next((place, child) for place, child in enumerate(self.children.all) if child.spec.name == name)
        code = self.starter.returncode(old.process.returncode)
        reason, number = old.killed or describe_returncode(code, service=True), old.starts + 1
        self._say(f"{name}: {reason}; it starts again ({number} of {self.max_restarts} times)")
        log = self.paths.log(self.status.attempt, f"{name}.{number}")
        self.status.restarts.append(Restart(name=name, reason=reason, log=str(old.log.relative_to(self.paths.root)), time=time.time()))
        self.selector.unregister(old.pidfd)
        (self.paths.heartbeats / f"{name}.json").unlink(missing_ok=True)  # its silence counts from now
        try:
            child = self.children.start_again(old, self._environment(), log)
        except (OSError, ValueError) as error:
            return self._not_started(name, error)
        self.selector.register(child.pidfd, selectors.EVENT_READ, None)
        self.status.processes[place]["pid"] = None if self.starter.remote else child.process.pid
        self._write_status()
        return None

    def _spare(self, child: Child) -> int:
        """How often a process that has ended or hangs may be started again: never if it did not come to serve."""
        if not child.spec.service or child.starts >= self.max_restarts:
            return 0
        has_served = read_heartbeats(self.paths).get(child.spec.name, {}).get("phase") == SERVING
        return self.max_restarts - child.starts if has_served else 0

    # -- watching

    def _watch(self) -> Verdict:
        """Look, decide and act until the run ends; return the final verdict."""
        settling: float | None = None  # monotonic time since which the verdict is `settle`
        while True:
            self._wait(TICK if settling is None else SOON)
            view = self._view(0.0 if settling is None else time.monotonic() - settling)
            verdict = decide(view)
            if verdict.say:
                self._say(verdict.say)
            if verdict.settle:
                settling = time.monotonic() if settling is None else settling
                continue
            settling = None
            if verdict.state not in ("failed", "interrupted"):
                self._forget_done(view)
            if verdict.state is not None:
                return verdict
            if verdict.kill is not None:
                self._say(f"{verdict.kill}: {verdict.reason}; it is killed")
                self.children.kill(verdict.kill, verdict.reason)
            for name in verdict.again:
                if (refused := self._start_again(name)) is not None:
                    return refused
            if verdict.comes_back:
                self.interrupted, self.comes_back = False, True
            if verdict.give_way:
                self._tell()

    def _view(self, waited: float) -> View:
        """What the supervisor sees now. Expensive observations are made only every `TICK` seconds."""
        hung = None
        soon = self.interrupted and not self.told  # what the first step wrote since the last look is to be kept
        if (soon or time.monotonic() - self.looked >= TICK) and not waited:
            self.looked = time.monotonic()
            hung = self._refresh()
        return View(
            processes=self.children.look(self._spare, None if hung is None else hung[0]),
            remote=self.starter.remote,
            begun=self.status.state != "starting",
            sigterm=self.starter.meaning_of_sigterm() if self.interrupted else None,
            notice=self.notice,
            asked=listed(self.paths.preempt),
            told=self.told,
            overdue=self.cfg.launcher.preempt_grace if time.monotonic() > self.leave_by else None,
            left=listed(self.paths.preempted),
            comes_back=self.comes_back,
            gone=self._gone(),
            hung=hung,
            waited=waited,
        )

    def _tell(self) -> None:
        """Tell the roles to write a checkpoint and leave."""
        self._say(f"the roles have {self.cfg.launcher.preempt_grace:g} s for a checkpoint")
        self.told = True
        self.leave_by = time.monotonic() + self.cfg.launcher.preempt_grace
        self.paths.ask_to_give_way()
        self._read_step()

    def _forget_done(self, view: View) -> None:
        """Stop tracking processes that are done or have left as told."""
        ended: dict[str, Process] = {process.name: process for process in view.processes if process.code is not None}
        for child in self.children.all:
            process = ended.get(child.spec.name)
            if child.pidfd >= 0 and process is not None and is_fine(process, view):
                self._say(f"{process.name} has left" if process.code == LEFT else f"{process.name} is done")
                self.selector.unregister(child.pidfd)
                self.children.forget(child)

    def _wait(self, timeout: float) -> None:
        if timeout < TICK:  # the pidfd of an exited process stays readable, so select would return at once
            time.sleep(timeout)
            timeout = 0.0
        for key, _ in self.selector.select(timeout):
            if key.data is not None:
                key.data()

    def _refresh(self) -> tuple[str, str] | None:
        """Update the status; return the process that has been silent for too long, if any."""
        self._read_step()
        beats = read_heartbeats(self.paths)
        if any(beat["phase"].startswith(EVALUATING) for beat in beats.values()):
            self.status.state = "running"  # `rlx eval` writes its first record when a whole version is played
        for child, process in zip(self.children.all, self.status.processes, strict=True):
            process["pid"] = process["pid"] or beats.get(child.spec.name, {}).get("pid")
        self._write_status()
        now = time.monotonic()
        ages = self.ages.look(beats, now)
        alive = {child.spec.name: child for child in self.children.all if child.running}
        silent = {name: ages.get(name, self.ages.since(child.started)) for name, child in alive.items()}
        self.stalls.look(beats, ages, self.metrics_offset, list(silent))
        return find_hung(silent, beats, self.cfg.launcher.heartbeat_timeout, self.hung_timeout)

    def _read_step(self) -> None:
        for record, offset in read_metrics(self.paths.metrics, self.metrics_offset):
            self.metrics_offset = offset
            self.status.state = "running"
            if record["source"] == self.cfg.progress_source == "trainer":
                self.status.step = max(self.status.step, record["step"] + 1)
            elif record["source"] == self.cfg.progress_source:
                self.counted.add(record["step"])  # each record is one
                self.status.step = len(self.counted)

    def _clear_memory(self) -> None:
        """Delete the versions of the weights that are in memory (`weight_broadcast.folder`): nobody reads them any more."""
        try:
            tmpfs.clear(self.paths.weights)
        except OSError as error:
            self._say(f"versions of the weights stay in memory, until the run is started again: {error}")

    # -- reporting

    def _write_status(self) -> None:
        """Write the status. On a full disk it stays unchanged; the process that needed the space reports the full disk."""
        with contextlib.suppress(OSError):
            self.status.write(self.paths)

    def _cause(self, verdict: Verdict) -> Cause | None:
        """The blamed process of a failed run, with the end of its log; `None` if the run did not fail."""
        if verdict.blamed is None:
            return None
        logs = {child.spec.name: child.log for child in self.children.all}  # of its last start
        log = logs.get(verdict.blamed, self.paths.log(self.status.attempt, verdict.blamed))
        relative, code, reason = str(log.relative_to(self.paths.root)), verdict.returncode, verdict.reason
        if verdict.blamed == "launcher":
            return Cause(role="launcher", replica=0, returncode=None, reason=reason, log=relative)
        spec, lines = self.specs[verdict.blamed], last_lines(log, self.cfg.launcher.log_tail_lines)
        if spec.role == "trainer" and isinstance(self.cfg, TrainingRoot) and ran_out(last_lines(log, LAST_WORDS)):
            reason += f"; {when_out_of_memory(self.cfg)}"
        if disk_is_full(self.paths.root):
            reason += f"; the disk of {self.paths.root} is full"  # which may have kept the error out of the log
        return Cause(role=spec.role, replica=spec.replica, returncode=code, reason=reason, log=relative, last_lines=lines)

    def _say(self, *lines: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):  # the log is on the same disk, which may be full
            for line in lines:
                print(f"{stamp} {line}", flush=True)
