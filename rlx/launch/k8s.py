"""One attempt of a run over several hosts (`rlx pod`), on the first one. `rlx.launch.slurm.Attempt` does the same in a SLURM job.

The Job starts the pod again after a preemption or a lost host; the run then resumes in its directory from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlx.config.schema import CommandConfig
from rlx.launch.starters import AgentStarter
from rlx.launch.supervisor import Supervisor
from rlx.lock import FileLock
from rlx.paths import RunPaths, write_text
from rlx.plan.process_spec import ProcessSpec
from rlx.polling import LEFT
from rlx.runs.jobs import note_progress, saved_of
from rlx.runs.run import has_done
from rlx.runs.run_dir import create
from rlx.runs.status import Status, new_attempt, read_status

OLD_ATTEMPT = 120.0  # seconds to wait for the processes of an earlier attempt, whose pod may still end


def make_token(file: Path) -> str:
    """The token of a Job's hosts, which only the owner of the volume can read. The first attempt makes it."""
    with contextlib.suppress(FileNotFoundError):
        if kept := file.read_text(encoding="utf-8").strip():
            return kept
    token = secrets.token_hex(32)
    write_text(file, token, 0o600)
    return token


def attempt(
    cfg: CommandConfig,
    overrides: Sequence[str],
    plan: Sequence[ProcessSpec],
    options: Mapping[str, Path],
    hosts: Sequence[tuple[str, int]],
    token: Path,
    job: str,
    show: Callable[[Path], None] = lambda root: None,
) -> int:
    """Run the attempt and return the run's exit code. `show`: called with the run directory once the attempt begins.

    A restart of the same Job goes on as with `resume=latest`. Raises ConfigError if the directory belongs to another run, or if this one
    cannot go on with the configuration.
    """
    paths = RunPaths(Path(str(cfg.run.dir)))
    restart = is_restart(paths.root, job)
    if restart:
        if has_done(paths, read_status(paths), cfg):
            print(f"{paths.root} is completed", flush=True)
            return 0
        with contextlib.closing(FileLock(paths.lock)) as lock:
            lock.take(OLD_ATTEMPT)
        cfg = replace(cfg, resume="latest", clean=False)
    paths, lock = create(cfg, overrides, plan, options=options, even_done=restart)
    if not restart:
        paths.job.unlink(missing_ok=True)  # what an earlier Job, or a SLURM job, noted of its own starts
        write_text(paths.kubernetes, json.dumps(_owner(job)) + "\n")
    status = Status(attempt=new_attempt(paths), max_steps=cfg.total_steps)
    status.write(paths)
    show(paths.root)  # before `_tee`: what it prints is not for the log
    with _tee(paths.log(status.attempt, "launcher")):
        print(f"Job {job}, attempt {status.attempt}, on {', '.join(host for host, _ in hosts)}", flush=True)
        if is_given_up(paths, cfg, status, ""):
            return 1
        starter = AgentStarter(hosts, token, paths.root)
        return Supervisor(paths, cfg, lock_fd=lock.fd, attempt=status.attempt, starter=starter).run()


def is_restart(root: Path, job: str) -> bool:
    """Whether this start of the Job has begun an attempt of the run already."""
    paths = RunPaths(root)
    return paths.kubernetes.is_file() and json.loads(paths.kubernetes.read_text()) == _owner(job) and paths.logs(0).is_dir()


def _owner(job: str) -> dict[str, str]:
    return {"job": job, "uid": os.environ.get("JOB_UID", "")}


def after_missing(cfg: CommandConfig, missing: str) -> int:
    """The exit code of a restart whose hosts did not all come: the Job starts it again, `launcher.max_requeues` times without progress.

    `missing`: which host did not come. A node that is gone for good would keep the others' GPUs idle without end.
    """
    paths = RunPaths(Path(str(cfg.run.dir)))
    status = read_status(paths) or Status(max_steps=cfg.total_steps)
    status.attempt = new_attempt(paths)
    return 1 if is_given_up(paths, cfg, status, f"{missing}; ") else LEFT


def is_given_up(paths: RunPaths, cfg: CommandConfig, status: Status, missing: str) -> bool:
    """Whether the Job was started too often without progress; writes that into the status."""
    barren = note_progress(paths, status.attempt, saved_of(paths, cfg))
    if barren <= cfg.launcher.max_requeues:
        return False
    reason = f"{missing}the Job was started {barren} times without progress, more than launcher.max_requeues={cfg.launcher.max_requeues}"
    status.give_up(paths, reason)
    return True


@contextlib.contextmanager
def _tee(log: Path) -> Iterator[None]:
    """Copy this process's output into a log file as well."""
    shown = os.dup(1), os.dup(2)
    copier = subprocess.Popen(["tee", "-a", str(log)], stdin=subprocess.PIPE, start_new_session=True)
    assert copier.stdin is not None
    for number in (1, 2):
        os.dup2(copier.stdin.fileno(), number)
    copier.stdin.close()
    try:
        yield
    finally:
        sys.stdout.flush()
        for number, own in zip((1, 2), shown, strict=True):
            os.dup2(own, number)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that was left behind may hold the pipe open
            copier.wait(2.0)
