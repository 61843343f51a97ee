"""The local launch: the supervisor runs as a submitit job on this machine, and the launcher waits in the foreground until it ends."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Protocol, cast

from submitit import LocalExecutor, LocalJob

from rlx.config.load import load_command
from rlx.config.schema import CommandConfig
from rlx.launch.supervisor import Supervisor
from rlx.lock import FileLock
from rlx.paths import RunPaths
from rlx.plan.environment import DEVICES
from rlx.process_tree import kill_all, start_time
from rlx.runs.status import FINAL, Status, new_attempt, read_status

POLL_SECONDS = 0.1  # seconds between two checks of the job
UPDATE = 0.2  # seconds between two calls of the observer
MARGIN = 3.0  # seconds beyond `grace` that the supervisor has to stop everything before it counts as stuck
YEAR = 366 * 24 * 60  # minutes; submitit's local jobs time out after two by default
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Observer(Protocol):
    """Displays a run while it is alive."""

    def update(self) -> None:
        """Called about five times a second."""

    def close(self, exit_code: int) -> None:
        """Called once, after the last process of the run has exited."""


def launch(paths: RunPaths, cfg: CommandConfig, lock: FileLock, observer: Observer | None = None) -> int:
    """Run the plan in `paths.plan` and return the run's exit code: 0, 1 or 130. Call it on the main thread.

    While it waits, SIGINT, SIGTERM and SIGHUP stop the run, which first writes a checkpoint; a second one kills it at once.
    The run also stops when this process dies.
    """
    paths.job.unlink(missing_ok=True)  # of an earlier attempt on a cluster
    status = Status(attempt=new_attempt(paths), max_steps=cfg.total_steps, launcher={"host": socket.gethostname(), "pid": os.getpid()})
    status.write(paths)
    token = secrets.token_hex(16)
    launcher = (os.getpid(), start_time(os.getpid()))
    (paths.root / ".submitit").mkdir(mode=0o700, exist_ok=True)  # its pickle is executed
    executor = LocalExecutor(paths.root / ".submitit", python=shlex.quote(sys.executable))
    executor.update_parameters(timeout_min=YEAR, stderr_to_stdout=True)
    requests: list[int] = []
    # Ctrl-C reaches every process of the terminal's foreground group, and submitit's process would kill the supervisor a second later.
    # So the children inherit that these signals are ignored, and only the launcher acts on them.
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in STOP_SIGNALS}
    try:
        visible = os.environ.get(DEVICES)
        job = cast("LocalJob[int]", executor.submit(_supervise, str(paths.root), token, status.attempt, launcher, visible))
        for signum in STOP_SIGNALS:
            if signum != signal.SIGHUP or before[signum] is not signal.SIG_IGN:  # nohup asks to survive the terminal
                signal.signal(signum, lambda number, frame: requests.append(number))
        try:
            _follow(cfg, job, token, requests, observer)
        except BaseException:  # the observer failed: stop the run, because a run must not outlive its launcher
            requests.append(signal.SIGTERM)
            _follow(cfg, job, token, requests, None)
            raise
        finally:
            _end(paths, cfg, lock, job, token)
        status = _close(paths, cfg, job, interrupted=bool(requests))
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert status.exit_code is not None
    if observer is not None:
        observer.close(status.exit_code)
    return status.exit_code


def _supervise(run_dir: str, token: str, attempt: int, launcher: tuple[int, int | None], visible: str | None) -> int:
    """The function that the submitit job runs. `visible`: the launcher's CUDA_VISIBLE_DEVICES, which submitit replaces by an empty one."""
    os.environ.pop(DEVICES, None)
    if visible is not None:
        os.environ[DEVICES] = visible
    paths = RunPaths(Path(run_dir))
    lock = FileLock(paths.lock)
    lock.share()
    log = os.open(paths.log(attempt, "launcher"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    parent = os.getppid()
    watched = {f"the launcher (process {launcher[0]})": launcher, f"submitit's process {parent}": (parent, start_time(parent))}
    return Supervisor(paths, load_command(paths.root), token=token, lock_fd=lock.fd, attempt=attempt, watched=watched).run()


def _follow(cfg: CommandConfig, job: LocalJob[int], token: str, requests: list[int], observer: Observer | None) -> None:
    """Wait until the job ends. Forwards stop requests, and gives up if the job does not stop in time."""
    updated = asked = 0.0
    deadline = float("inf")
    while not job.done():
        now = time.monotonic()
        if requests and now - asked > 0.5:  # send SIGTERM repeatedly: a job that is just starting may miss the first
            if not asked:
                print("stopping the run after a checkpoint; a second signal kills it at once", file=sys.stderr, flush=True)
                deadline = now + cfg.launcher.preempt_grace + cfg.launcher.grace + MARGIN
            asked = now
            os.kill(int(job.job_id), signal.SIGTERM)
        if len(requests) > 1:
            kill_all([], token)
        if now > deadline:
            return
        if observer is not None and now - updated > UPDATE:
            updated = now
            observer.update()
        time.sleep(POLL_SECONDS)


def _end(paths: RunPaths, cfg: CommandConfig, lock: FileLock, job: LocalJob[int], token: str) -> None:
    """Return when no process of the run is left: kill the job if it is stuck, and what it left if it lost one of its own processes."""
    if job.done():  # if only submitit's process died, the supervisor stops everything by itself; if the supervisor died, the reaper does
        lock.take(cfg.launcher.grace + MARGIN)
    status = read_status(paths)
    assert status is not None
    for pid in (status.supervisor["pid"] if status.supervisor is not None else None, None if job.done() else int(job.job_id)):
        if pid is not None and start_time(pid) is not None:
            os.kill(pid, signal.SIGKILL)
    status = read_status(paths) or status
    kill_all([] if status.state in FINAL else [process["pid"] for process in status.processes], token)
    lock.take(10)
    lock.share()


def _close(paths: RunPaths, cfg: CommandConfig, job: LocalJob[int], *, interrupted: bool) -> Status:
    """Return the final status. Writes it if the supervisor died before it could, or was stuck and had to be killed."""
    status = read_status(paths)
    assert status is not None
    killed = status.cause is not None and status.cause.role == "supervisor"
    if interrupted and (killed or status.state not in FINAL):
        status.finish("interrupted")
        status.write(paths)
    elif status.state not in FINAL:
        log = paths.log(status.attempt, "launcher")
        log = log if log.exists() and log.stat().st_size else Path(job.paths.stdout)
        status.fail(paths, "supervisor", "the supervisor died before it started any process", log, cfg.launcher.log_tail_lines)
    return status
