"""One attempt of a run over several hosts (`rlx pod`), on the first one. `rlx.launch.slurm.Attempt` does the same in a SLURM job.

The Job starts the pod again after a preemption or a lost host; the run then resumes in its directory from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rlx.config.chat_format import with_absolute_files
from rlx.config.errors import ConfigError
from rlx.config.load import load_command
from rlx.config.schema import CommandConfig
from rlx.config.secret import hidden
from rlx.launch.starters import AgentStarter
from rlx.launch.supervisor import Limits, Supervisor
from rlx.paths import RunPaths, write_text
from rlx.plan.record import ProcessSpec
from rlx.runs.claim import RunLock, create
from rlx.runs.differences import changed_keys
from rlx.runs.jobs import note_missed, note_progress, saved_of, unit_of
from rlx.runs.rewind import has_begun, rewind
from rlx.runs.status import Cause, Status, new_attempt, read_status
from rlx.waiting import LEFT

OLD_ATTEMPT = 120.0  # seconds to wait for the processes of an earlier attempt, whose pod may still end


def make_token(file: Path) -> str:
    """The token of a Job's hosts, which only the owner of the volume can read. The first attempt makes it."""
    try:
        if kept := file.read_text().strip():
            return kept
    except FileNotFoundError:
        pass
    file.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(32)
    write_text(file, token, 0o600)
    return token


def attempt(
    cfg: CommandConfig,
    overrides: Sequence[str],
    plan: Sequence[ProcessSpec],
    hosts: Sequence[tuple[str, int]],
    token: Path,
    job: str,
    show: Callable[[Path], None] = lambda root: None,
    given: CommandConfig | None = None,
) -> int:
    """Run the attempt and return the run's exit code. `show`: called with the run directory once the attempt begins.

    `given`: the configuration before what is looked up at each start, such as the newest weights; None: `cfg`.
    Raises ConfigError if the directory belongs to another run, or if this one cannot go on with the configuration.
    """
    paths = RunPaths(Path(str(cfg.run.dir)))
    mine = {**_start(job), "given": _digest(given or cfg)}
    owner = _owner(paths)
    its_own = _is_start_of(owner, job)
    if its_own and owner != mine and (changed := _changed(paths, cfg)):  # by hand: a Job's arguments do not change
        cfg = _resumed(cfg, changed, paths)
        its_own = False
    if its_own:
        before = read_status(paths)
        if before is not None and before.state == "completed":
            print(f"{paths.root} is completed", flush=True)
            return 0
        lock = RunLock(paths)
        if not lock.take(OLD_ATTEMPT):
            print(f"{paths.root} is in use by another run", file=sys.stderr)
            return 1
        step = before.step if before else 0
    else:
        paths, lock = create(cfg, overrides, plan)
        lock.take(OLD_ATTEMPT)
        paths.job.unlink(missing_ok=True)  # what an earlier Job, or a SLURM job, noted of its own starts
        write_text(paths.kubernetes, json.dumps(mine) + "\n")
        step = 0
    status = Status(attempt=new_attempt(paths), step=step, max_steps=cfg.total_steps)
    status.write(paths)
    lock.share()
    show(paths.root)  # before `_tee`: what it prints is not for the log
    end_tee = _tee(paths.log(status.attempt, "launcher"))
    try:
        return _supervise(cfg, paths, lock, status, hosts, token, job)
    finally:
        sys.stdout.flush()
        end_tee()


def is_restart(root: Path, job: str) -> bool:
    """Whether this start of the Job has begun an attempt of the run already."""
    paths = RunPaths(root)
    return _is_start_of(_owner(paths), job) and paths.logs(0).is_dir()


def after_missing(cfg: CommandConfig, missing: str) -> int:
    """The exit code of a restart whose hosts did not all come: the Job starts it again, `launcher.max_requeues` times without progress.

    `missing`: which host did not come. A node that is gone for good would keep the others' GPUs idle without end.
    """
    paths = RunPaths(Path(str(cfg.run.dir)))
    with contextlib.closing(RunLock(paths)) as lock:
        if not lock.take(OLD_ATTEMPT):
            print(f"{paths.root} is in use by another run", file=sys.stderr)
            return 1
        status = read_status(paths) or Status(max_steps=cfg.total_steps)
        barren = note_missed(paths, status.attempt + 1, saved_of(paths, cfg))
        if barren <= cfg.launcher.max_requeues:
            return LEFT
        times = f"{barren} starts in a row brought no new {unit_of(cfg)}, more than launcher.max_requeues={cfg.launcher.max_requeues}"
        return _fail(paths, status, f"{missing}. The Job is given up: {times}; the last ones waited for hosts")


def _start(job: str) -> dict[str, str]:
    return {"job": job, "uid": os.environ.get("JOB_UID", "")}


def _is_start_of(owner: dict[str, str] | None, job: str) -> bool:
    return owner is not None and _start(job).items() <= owner.items()


def _digest(cfg: CommandConfig) -> str:
    text = json.dumps(asdict(hidden(cfg)), sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _changed(paths: RunPaths, cfg: CommandConfig) -> list[str]:
    """What this start asks for and the run's own configuration has not."""
    before = load_command(paths.root, secrets=False)
    if type(before) is not type(cfg):
        return ["the command"]
    step = [f"resume: {cfg.resume}"] if cfg.resume is not None and cfg.resume.isdecimal() else []
    return [*changed_keys(before, replace(cfg, model=with_absolute_files(cfg.model))), *step]


def _resumed(cfg: CommandConfig, changed: Sequence[str], paths: RunPaths) -> CommandConfig:
    """The configuration with which the run goes on after a change of the arguments, as with `resume=latest`."""
    if cfg.clean:
        raise ConfigError(
            f"clean=true would delete the run in {paths.root}, which this start has begun with other values: {', '.join(changed)}.\n"
            "  fix: leave out clean=true, and the run goes on with the new values if it can; or give another JOB_UID, and it begins anew"
        )
    return cfg if cfg.resume is not None and cfg.resume.isdecimal() else replace(cfg, resume="latest")


def _supervise(
    cfg: CommandConfig, paths: RunPaths, lock: RunLock, status: Status, hosts: Sequence[tuple[str, int]], token: Path, job: str
) -> int:
    print(f"Job {job}, attempt {status.attempt}, on {', '.join(host for host, _ in hosts)}", flush=True)
    if has_begun(paths) and status.attempt:
        try:
            start = rewind(paths)
        except ConfigError as error:
            return _fail(paths, status, str(error))
        if cfg.has_checkpoints:
            status.step = start.step if start else 0
            status.write(paths)
    barren = note_progress(paths, status.attempt, saved_of(paths, cfg))
    if barren > cfg.launcher.max_requeues:
        most = f"launcher.max_requeues={cfg.launcher.max_requeues}"
        return _fail(paths, status, f"the Job was started {barren} times without a new {unit_of(cfg)}, more than {most}")
    supervisor = Supervisor(
        paths,
        Limits.of(cfg),
        token=secrets.token_hex(16),
        lock_fd=lock.fd,
        attempt=status.attempt,
        watched={},
        starter=AgentStarter(hosts, token, paths.root),
        meaning_of_sigterm=lambda: "preempted",  # the pod is evicted, drained or deleted: it does not say which
    )
    return supervisor.run()


def _owner(paths: RunPaths) -> dict[str, str] | None:
    try:
        return dict(json.loads(paths.kubernetes.read_text()))
    except FileNotFoundError:
        return None


def _fail(paths: RunPaths, status: Status, reason: str) -> int:
    log = os.path.relpath(paths.log(status.attempt, "launcher"), paths.root)
    status.finish("failed", Cause(role="launcher", replica=0, returncode=None, reason=reason, log=log))
    status.write(paths)
    print(reason, file=sys.stderr, flush=True)
    return 1


def _tee(log: Path) -> Callable[[], None]:
    """Copy this process's output into a log file as well. Returns a function that ends this."""
    shown, (read, written) = os.dup(1), os.pipe()
    for number in (1, 2):
        os.dup2(written, number)
    os.close(written)

    def copy() -> None:
        with log.open("ab", buffering=0) as file:
            while text := os.read(read, 65536):
                os.write(shown, text)
                try:
                    file.write(text)
                except OSError:  # a full disk: the container's own output has it
                    continue

    thread = threading.Thread(target=copy, name="tee", daemon=True)
    thread.start()

    def end() -> None:
        for number in (1, 2):
            os.dup2(shown, number)
        thread.join(2.0)  # a process that was left behind may hold the pipe open

    return end
