"""Runs as jobs of a SLURM cluster: one allocation for a run, one job array for a sweep, submitted through submitit.

    login node: submit(…) ── sbatch ──► first node of the job: submitit ──► Attempt(directory)() ──► Supervisor ──► one srun step a process

A job carries only the path of its run directory. When SLURM takes the machine away (time limit, preemption, requeue), the supervisor
has the roles write a checkpoint, and the job goes back into the queue: same job, same directory, next attempt.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit import JobEnvironment, SlurmExecutor

from rlx.checkpoints.folders import steps
from rlx.config.errors import ConfigError
from rlx.config.load import load_command
from rlx.config.schema import CommandConfig
from rlx.launch.starters import SrunStarter
from rlx.launch.supervisor import Limits, Supervisor
from rlx.paths import RunPaths, write_text
from rlx.plan.environment import DEVICES
from rlx.process import full_disk
from rlx.runs.claim import RunLock, new_attempt
from rlx.runs.history import final_reward
from rlx.runs.jobs import ask, barren_requeues, is_ending, job_of, note_job, note_progress, restarts_of
from rlx.runs.provenance import code_change
from rlx.runs.rewind import has_begun, rewind
from rlx.runs.snapshot import environment, take_snapshot
from rlx.runs.status import Cause, Status, read_status

FOLDER = ".submitit"  # submitit's files for the jobs of a run or sweep, inside its directory
START = 60.0  # seconds by which an attempt may begin later than its job, whose time limit counts from there
OLD_ATTEMPT = 60.0  # seconds to wait for the processes of an earlier attempt to exit
QUIET = ("RLX_RUN_TOKEN", "RLX_HOST", "RLX_SUPERVISOR_PID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", DEVICES)
"""Variables that a new job must not inherit: those of a run or job array inside which it is submitted, and this host's GPUs."""

BEGINNING = r"""
trap '' USR2 # the notice would kill the job before Python handles it
# If the job ends before rlx runs, this writes the reason into the run's status.json and keeps the job's output in its logs.
rlx_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
rlx_job=${rlx_job:-$SLURM_JOB_ID}
rlx_run=$rlx_base/${rlx_runs[${SLURM_ARRAY_TASK_ID:-0}]}
rlx_end() {
  local code=$? attempt=0 log line lines= reason
  set +e
  if [ -e "$rlx_run/job.json" ] && ! grep -qF "\"$rlx_job\"" "$rlx_run/job.json"; then return; fi # now another job's
  if grep -q '^ "state": "completed"' "$rlx_run/status.json"; then return; fi
  while [ -e "$rlx_run/logs/attempt_$attempt" ]; do attempt=$((attempt + 1)); done
  log=logs/attempt_$attempt/job.log
  mkdir -p "$rlx_run/logs/attempt_$attempt"
  ln -sfn "attempt_$attempt" "$rlx_run/logs/latest"
  cp "$rlx_base/$rlx_output/${rlx_job}_0_log.out" "$rlx_run/$log"
  while IFS= read -r line; do
    line=${line//\\/\\\\}
    lines="$lines${lines:+, }\"${line//\"/\\\"}\""
  done < <(tr -cd '\12\40-\176' <"$rlx_run/$log" | grep . | tail -n "$rlx_last")
  reason="SLURM job $rlx_job ended on ${SLURMD_NODENAME:-$HOSTNAME} with exit code $code before rlx could start:"
  reason="$reason a line of slurm.setup failed, or Python cannot import rlx there"
  while IFS= read -r line; do
    case $line in
      ' "state":'*) line=' "state": "failed",' ;;
      ' "attempt":'*) line=" \"attempt\": $attempt," ;;
      ' "exit_code":'*) line=' "exit_code": 1,' ;;
      ' "cause":'*)
        if [ "$line" = ' "cause": {' ]; then while IFS= read -r line && [ "$line" != ' },' ]; do :; done; fi
        line=' "cause": {"role": "launcher", "replica": 0, "returncode": '"$code"', "reason": "'"$reason"'",'
        line="$line \"log\": \"$log\", \"last_lines\": [$lines]},"
        ;;
      ' "job":'*) line=" \"job\": \"$rlx_job\"," ;;
      ' "updated":'*) line=" \"updated\": $(date +%s)" ;;
    esac
    printf '%s\n' "$line"
  done <"$rlx_run/status.json" >"$rlx_run/.status.json.$$" && mv "$rlx_run/.status.json.$$" "$rlx_run/status.json"
}
trap rlx_end EXIT
trap 'trap - EXIT; exit 143' TERM # cancelled or requeued: SLURM knows it
set -e
"""
"""Beginning of the script, before `slurm.setup`. Works without Python.

It reads `rlx_base`, an absolute folder; `rlx_runs`, the run directories in it; `rlx_output`, the folder of the jobs' output in it; and
`rlx_last`, how many lines of output to report. It relies on `Status.write`, which puts each field on a line of its own.
"""


class _Executor(SlurmExecutor):
    """submitit's SlurmExecutor without its own check for a cluster, so that it can write the script anywhere. rlx checks earlier."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def check_directory(directory: Path) -> None:
    """Raise ConfigError if a run or sweep cannot be submitted from `directory`."""
    if "%" in str(directory):
        raise ConfigError(f"sbatch reads the % in {directory} as a placeholder.\n  fix: give another run.name= or run.dir=")


def sbatch_options(cfg: CommandConfig, name: str, code: Path | None = None) -> dict[str, Any]:
    """The submitit parameters of a job for this configuration. `code`: the code snapshot that the job runs."""
    slurm, hardware = cfg.slurm, cfg.hardware
    further = {name.replace("-", "_"): value for name, value in slurm.options.items()}
    whole = slurm.cpus_per_node is None and not {"mem_per_cpu", "mem_per_gpu"} & set(further)  # --exclusive alone may not give all memory
    memory = f"{round(slurm.memory_gb * 1024)}M" if slurm.memory_gb is not None else "0" if whole else None
    options: dict[str, Any] = {
        "job_name": name,
        "nodes": hardware.nodes,
        "ntasks_per_node": 1,
        "time": slurm.time_minutes,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "cpus_per_task": slurm.cpus_per_node,
        "exclusive": True if slurm.cpus_per_node is None else None,
        "mem": memory,
        "gres": f"{slurm.gres}:{hardware.gpus_per_node}" if hardware.device == "cuda" else None,
        "setup": [
            f"cd {shlex.quote(os.getcwd())}",
            *_exports(code),
            *slurm.setup,
            f"{shlex.quote(sys.executable)} -c 'import rlx.launch.slurm'",  # fails here, where the reason is reported, and not in the job
        ],
        "stderr_to_stdout": True,
        "use_srun": False,  # the supervisor runs in the batch script and starts the steps itself
        "array_parallelism": cfg.launcher.array_parallelism or 100_000,
        # --signal=B: only the batch script gets the signal, and that is the supervisor
        "additional_parameters": {"requeue": True, "signal": f"B:USR2@{slurm.signal_seconds}", **further},
    }
    left_out = {name for name, value in further.items() if value is None}
    options["additional_parameters"] = {k: v for k, v in options["additional_parameters"].items() if k not in left_out}
    return {name: value for name, value in options.items() if value is not None and name not in left_out}


def _exports(code: Path | None) -> list[str]:
    inherited = {"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}
    return [f"export {name}={shlex.quote(value)}" for name, value in (environment(code) if code else inherited).items()]


def _executor(folder: Path, options: dict[str, Any], runs: Sequence[Path], last_lines: int) -> _Executor:
    base = folder.parent
    beginning = [
        f"rlx_base={shlex.quote(str(base))}",
        f"rlx_runs=({' '.join(shlex.quote(os.path.relpath(run, base)) for run in runs)})",
        f"rlx_output={shlex.quote(folder.name)}",
        f"rlx_last={last_lines}",
        BEGINNING.strip(),
    ]
    executor = _Executor(folder, python=f"exec {shlex.quote(sys.executable)}")
    given = {key: value for key, value in options.items() if key != "mem"}
    executor.update_parameters(**{**given, "setup": [*beginning, *options["setup"]]})
    # Set directly: submitit would read `mem` as a number of GB, and would set a wckey that the cluster may not have.
    executor.parameters |= {"mem": options.get("mem"), "wckey": None}
    return executor


def sbatch_script(cfg: CommandConfig, name: str, folder: Path, runs: Sequence[Path], code: Path | None = None) -> str:
    """The sbatch script for one run or for an array, with the runs' directories. `code`: the code snapshot that they run."""
    executor = _executor(folder, sbatch_options(cfg, name, code), runs, cfg.launcher.last_lines)
    if len(runs) > 1:
        executor.parameters["map_count"] = len(runs)
    return executor._make_submission_file_text(executor._submitit_command_str, uid="")


def submit(runs: Sequence[tuple[RunPaths, CommandConfig]], name: str, folder: Path) -> list[str]:
    """Submit runs with existing directories and equal `sbatch_options` as one job or one array; return their job ids.

    The caller holds the runs' locks meanwhile. A job that starts at once waits for the lock, and by then its id is recorded.
    Raises RuntimeError with SLURM's message if SLURM rejects the job.
    """
    code = take_snapshot(folder) if runs[0][1].launcher.code_changes == "snapshot" else None
    roots = [paths.root for paths, _ in runs]
    script = sbatch_script(runs[0][1], name, folder, roots, code)
    for paths, cfg in runs:
        Status(max_steps=cfg.total_steps, launcher={"host": os.uname().nodename, "pid": os.getpid()}).write(paths)
        paths.job.unlink(missing_ok=True)  # the new job would read an older id here as that of its successor
        write_text(paths.sbatch, script)
    executor = _executor(folder, sbatch_options(runs[0][1], name, code), roots, runs[0][1].launcher.last_lines)
    inherited = {name: os.environ.pop(name) for name in QUIET if name in os.environ}
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:  # by submitit: what sbatch said, which an error repeats
            jobs = executor.submit_array([Attempt(str(paths.root)) for paths, _ in runs])
        print(said.getvalue(), end="", file=sys.stderr)
    except Exception as error:  # submitit reports sbatch's errors through several exception types
        text = getattr(error, "stderr", None) or str(error)
        reason = text.decode(errors="replace") if isinstance(text, bytes) else text
        for paths, cfg in runs:
            _fail(paths, Status(max_steps=cfg.total_steps), f"SLURM rejected the job: {reason.strip()}", tell=False)
        raise RuntimeError(f"SLURM rejected the job: {reason.strip()}") from error
    finally:
        os.environ.update(inherited)
    for (paths, _), job in zip(runs, jobs, strict=True):
        note_job(paths, job.job_id, job.paths.stdout)
    return [job.job_id for job in jobs]


class Attempt:
    """The function that the SLURM job runs: one attempt at the run in a directory."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    def __call__(self) -> float | None:
        """Run the attempt and return the final reward. Raises SystemExit with the run's exit code if that is not 0."""
        try:
            return self._run()
        except OSError as error:
            if (line := full_disk(error, Path(self.run_dir))) is None:
                raise
            print(line, file=sys.stderr, flush=True)
            raise SystemExit(1) from None

    def _run(self) -> float | None:
        received: list[int] = []
        for number in (signal.SIGUSR2, signal.SIGTERM):  # submitit's own handlers would requeue without recording it in the status
            signal.signal(number, lambda number, _: received.append(number))
        paths = RunPaths(Path(self.run_dir))
        cfg = load_command(paths.root)
        environment = JobEnvironment()
        # For an array task this is `12_5`. SLURM_JOB_ID must not be used: for the last task it is the array's id, and SLURM acts on all.
        job = environment.job_id
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        lock = RunLock(paths)
        if not lock.take(timeout=OLD_ATTEMPT):
            print(f"{paths.root} is in use by another run; this job ends", file=sys.stderr)
            raise SystemExit(1)
        self._leave_to_others(paths, job)
        before = read_status(paths)
        status = Status(attempt=new_attempt(paths), step=before.step if before else 0, max_steps=cfg.total_steps, job=job)
        status.write(paths)
        lock.share()
        output = Path(os.readlink("/proc/self/fd/1"))  # the job's own, where SLURM also writes
        if output.is_file():
            paths.log(status.attempt, "job").symlink_to(os.path.relpath(output, paths.logs(status.attempt).resolve()))
        log = os.open(paths.log(status.attempt, "launcher"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        print(f"job {job}, restart {restarts}, on {', '.join(environment.hostnames)}", flush=True)
        self._may_come_back(paths, cfg, status, barren_requeues(paths, restarts, _saved(paths, cfg)))
        self._has_its_code(paths, cfg, status)
        if restarts or has_begun(paths):
            try:
                start = rewind(paths)
            except ConfigError as error:
                _fail(paths, status, str(error))
                raise SystemExit(1) from None
            if cfg.has_checkpoints:
                status.step = start.step if start else 0
                status.write(paths)
                print(f"resuming after {start.step} steps" if start else "no checkpoint yet: starting from step 0", flush=True)
            else:
                print("continuing with what is not done yet", flush=True)
        saved = _saved(paths, cfg)  # not before: the newest checkpoint may have been damaged
        barren = note_progress(paths, restarts, saved)
        self._may_come_back(paths, cfg, status, barren)
        supervisor = Supervisor(
            paths,
            Limits.of(cfg),
            token=secrets.token_hex(16),
            lock_fd=lock.fd,
            attempt=status.attempt,
            watched={},
            starter=SrunStarter(job, environment.hostnames, cfg.hardware.gpus_per_node, cfg.slurm.container),
            meaning_of_sigterm=lambda: "preempted" if restarts_of(job) > restarts else "interrupted",
        )
        code = supervisor.run(received)
        if supervisor.status.state == "preempted":
            barren = 0 if _saved(paths, cfg) != saved else barren + 1
            code = self._requeue(paths, cfg, supervisor, job, restarts, barren)
        if code != 0:
            raise SystemExit(code)
        return final_reward(paths)

    def _leave_to_others(self, paths: RunPaths, job: str) -> None:
        """Exit without touching the directory if the run is completed or now belongs to another job."""
        status, other = read_status(paths), job_of(paths)
        if status is not None and status.state == "completed":
            print(f"{paths.root} is completed; job {job} has nothing to do", file=sys.stderr)
            raise SystemExit(0)
        if other is not None and other != job:
            print(f"{paths.root} is job {other}'s now; job {job} ends", file=sys.stderr)
            raise SystemExit(1)

    def _may_come_back(self, paths: RunPaths, cfg: CommandConfig, status: Status, barren: int) -> None:
        """Exit if the job was requeued too often without saving anything new."""
        if barren > cfg.launcher.max_requeues:
            most = f"launcher.max_requeues={cfg.launcher.max_requeues}"
            _fail(paths, status, f"the job was requeued {barren} times without a new {_unit(cfg)}, more than {most}")
            raise SystemExit(1)

    def _has_its_code(self, paths: RunPaths, cfg: CommandConfig, status: Status) -> None:
        """Exit, or warn, if the code has changed since the job was submitted."""
        change = None if cfg.launcher.code_changes == "snapshot" else code_change(paths)  # a snapshot does not change
        if change and cfg.launcher.code_changes == "refuse":
            _fail(paths, status, f"{change}; continue with resume=latest, or set launcher.code_changes=snapshot or =warn next time")
            raise SystemExit(1)
        if change:
            print(f"warning: {change}", flush=True)

    def _requeue(self, paths: RunPaths, cfg: CommandConfig, supervisor: Supervisor, job_id: str, restarts: int, barren: int) -> int:
        """Requeue the job unless SLURM has done so or the limit is reached; return the exit code.

        `barren`: how many attempts in a row, up to this one, have ended without saving anything new.
        """
        status = supervisor.status
        if restarts_of(job_id) > restarts:
            return status.exit_code or 0
        if supervisor.interrupted or is_ending(job_id):  # the job was cancelled; a requeue would revive it
            status.finish("interrupted")
            status.write(paths)
            return status.exit_code or 0
        lasted, until_notice = time.time() - status.started, 60 * cfg.slurm.time_minutes - cfg.slurm.signal_seconds
        if barren >= 2:
            begin = "start, first step and checkpoint" if cfg.has_checkpoints else "start and first rollout"
            why = f"{barren} attempts in a row were preempted before a new {_unit(cfg)} was saved, this one after {lasted:.0f} s"
            if lasted >= until_notice - START:
                _fail(
                    paths,
                    status,
                    f"{why}, by the notice before the time limit: {begin} take longer than slurm.time_minutes="
                    f"{cfg.slurm.time_minutes} less slurm.signal_seconds={cfg.slurm.signal_seconds}; continue with resume=latest and a "
                    "larger slurm.time_minutes",
                )
                return 1
            print(f"warning: {why}", flush=True)
        if barren > cfg.launcher.max_requeues:
            most = f"launcher.max_requeues={cfg.launcher.max_requeues}"
            _fail(paths, status, f"preempted, and {most} requeues without a new {_unit(cfg)} are used up; continue with resume=latest")
            return 1
        try:
            done = ask("scontrol", "requeue", job_id)
            refused = done.stderr.strip() if done.returncode != 0 else None
        except RuntimeError as error:
            refused = str(error)
        if refused is not None:
            _fail(paths, status, f"preempted, and SLURM refuses to requeue the job: {refused}; continue with resume=latest")
            return 1
        print("back in the queue", flush=True)
        return status.exit_code or 0


def _saved(paths: RunPaths, cfg: CommandConfig) -> int:
    """How much a requeue does not lose: steps of the newest checkpoint or, for a command that keeps all its records, bytes of these."""
    if cfg.has_checkpoints:
        return max(steps(paths), default=0)
    files = (paths.finished, *paths.evaluations.glob("*/step_*/*.jsonl"))
    return sum(file.stat().st_size for file in files if file.exists())


def _unit(cfg: CommandConfig) -> str:
    """What `_saved` grows by, for messages."""
    return "step" if cfg.has_checkpoints else "rollout"


def _fail(paths: RunPaths, status: Status, reason: str, *, tell: bool = True) -> None:
    log = os.path.relpath(paths.log(status.attempt, "launcher"), paths.root)
    status.finish("failed", Cause(role="launcher", replica=0, returncode=None, reason=reason, log=log))
    status.write(paths)
    if tell:
        print(reason, file=sys.stderr, flush=True)
