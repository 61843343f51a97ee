"""The runs of a sweep: find those that still have to run, and run them as SLURM job arrays or in a pool on this machine.

    outputs/<sweep>/<the run's overrides>/   a run directory like any other

Starting the same sweep again does the remaining work: completed runs are skipped, queued and running ones are left alone, and all
others resume from their last checkpoint. Keys may change as when one run resumes: with more steps, or other versions to evaluate,
completed runs go on.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlx.config.errors import ConfigError
from rlx.config.load import load_command
from rlx.config.schema import CommandConfig
from rlx.launch.local import launch
from rlx.launch.slurm import FOLDER, sbatch_options, submit
from rlx.lock import FileLock
from rlx.paths import RunPaths
from rlx.plan.environment import DEVICES
from rlx.plan.explain import table
from rlx.plan.place import require_one_host
from rlx.plan.process_spec import ProcessSpec
from rlx.process import SUPERVISOR, die_with_parent
from rlx.runs.config_diff import differences
from rlx.runs.history import final_reward
from rlx.runs.jobs import is_alive, job_of
from rlx.runs.rewind import has_begun, rewind
from rlx.runs.run import Run, has_done
from rlx.runs.run_dir import ask_slurm, create, looks_like_run, writing
from rlx.runs.status import FINAL, Status, new_attempt, read_status

SWEEP = ".sweep.lock"  # the lock of a sweep, in its directory, in which each run has a directory of its own
POLL_SECONDS = 0.2  # seconds between two checks of the pool


@dataclass
class Element:
    """One run of a sweep, with its final, checked configuration."""

    name: str
    cfg: CommandConfig
    overrides: list[str]
    plan: list[ProcessSpec]
    options: Mapping[str, Path] = field(default_factory=dict)  # the user's own option files
    state: str = "new"  # new | done | alive (queued or running) | again (to be resumed)
    job: str | None = None
    environments: list[str] = field(default_factory=list)  # what is known of each environment, one line each

    @property
    def paths(self) -> RunPaths:
        assert self.cfg.run.dir is not None
        return RunPaths(Path(self.cfg.run.dir))


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Lock a sweep's directory. Raises ConfigError while another process starts the sweep or runs its pool."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / SWEEP)
    try:
        if not lock.exclusive():
            raise ConfigError(
                f"another process starts or runs the sweep in {directory}.\n  fix: wait until it has ended; or give another run.name="
            )
        yield
    finally:
        lock.close()


def find_states(elements: Sequence[Element]) -> dict[str, str] | None:
    """Set each element's `state` and `job` from its directory. Raises ConfigError if one holds a run of another configuration.

    Returns job id → SLURM's state, which is asked for once; None if no element has a job.
    """
    others = []
    runs = [Run(element.paths) for element in elements]
    noted = [element.paths for element in elements if looks_like_run(element.paths) and job_of(element.paths) is not None]
    jobs = ask_slurm(noted[0]) if noted else None
    for element, run in zip(elements, runs, strict=True):
        paths, status = element.paths, run.status
        if element.cfg.clean or not looks_like_run(paths):
            continue
        if changed := differences(load_command(paths.root, secrets=False), element.cfg):
            others.append(f"{paths.root}: {'; '.join(changed[:3])}")
        elif has_done(paths, status, element.cfg):
            element.state = "done"
        elif (job := job_of(paths)) is not None and is_alive(job, jobs):
            element.state, element.job = "alive", job
        else:
            ended = status is not None and status.state in FINAL
            element.state = "alive" if not ended and run.lives(status) else "again"
    if others:
        raise ConfigError(
            "the sweep's directory holds runs of another configuration (there ≠ here):\n  "
            + "\n  ".join(others[:8])
            + "\n  fix: give another run.name= for this sweep; or clean=true, which deletes them"
        )
    return jobs


def check_local(elements: Sequence[Element], visible: Sequence[str], parallel: int | None) -> int:
    """How many runs may run at a time on this machine. Raises ConfigError if they need more GPUs or hosts than there are."""
    for element in elements:
        require_one_host(element.plan)
    gpus = max(element.cfg.num_gpus for element in elements)
    if not gpus:
        return parallel or 1
    if parallel and parallel * gpus > len(visible):
        raise ConfigError(
            f"launcher.array_parallelism={parallel} runs of {gpus} GPUs need {parallel * gpus}, and {len(visible)} are visible here.\n"
            f"  fix: launcher.array_parallelism={max(1, len(visible) // gpus)}"
        )
    return parallel or max(1, len(visible) // gpus)


def make_directories(elements: Sequence[Element], jobs: dict[str, str] | None = None) -> list[FileLock]:
    """Create the run directories, or rewind existing ones to their last checkpoint; return their locks, held shared.

    This includes a run that was stopped between its last checkpoint and its end: it completes at once. `jobs`: job id → SLURM's state;
    without it SLURM is asked for each run that has a job. Raises ConfigError if all checkpoints of a run are damaged.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(elements) + 256  # a lock is an open file
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    locks: list[FileLock] = []
    try:
        for element in elements:
            cfg = element.cfg if element.state == "new" else replace(element.cfg, resume="latest")
            locks.append(create(cfg, element.overrides, element.plan, options=element.options, jobs=jobs, even_done=True)[1])
    except BaseException:
        release(locks)
        raise
    return locks


def release(locks: Sequence[FileLock]) -> None:
    for lock in locks:
        lock.close()


def submit_arrays(elements: Sequence[Element], name: str, directory: Path) -> None:
    """Submit runs as job arrays, one for each set of equal SLURM options, and set their `job`.

    Raises RuntimeError if SLURM rejects an array; the elements of arrays accepted before that have their `job` set.
    """
    groups: dict[str, list[Element]] = {}
    for element in elements:
        groups.setdefault(repr(sorted(sbatch_options(element.cfg, name, directory).items())), []).append(element)
    for group in groups.values():
        jobs = submit([(element.paths, element.cfg) for element in group], name, directory / FOLDER)
        for element, job in zip(group, jobs, strict=True):
            element.job = job


def run_pool(elements: Sequence[Element], parallel: int, visible: Sequence[str], say: Callable[[str], None]) -> None:
    """Run elements on this machine, `parallel` at a time, each with its own GPUs. KeyboardInterrupt stops them all and is re-raised."""
    waiting = list(elements)
    running: dict[subprocess.Popen[bytes], tuple[Element, int]] = {}
    slots = list(range(parallel))
    width = max((element.cfg.num_gpus for element in elements), default=0)  # GPUs of a slot, whichever run has it
    try:
        while waiting or running:
            while waiting and slots:
                element, slot = waiting.pop(0), slots.pop(0)
                gpus = element.cfg.num_gpus
                mine = {DEVICES: ",".join(visible[slot * width : slot * width + gpus])} if gpus else {}
                command = [sys.executable, "-m", "rlx.launch.sweep", str(element.paths.root)]
                say(f"{element.name}: starting")
                # Its own session: Ctrl-C then reaches only the pool, which forwards it once.
                child = subprocess.Popen(
                    command,
                    env=os.environ | mine | {SUPERVISOR: str(os.getpid())},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
                running[child] = (element, slot)
            for child in [child for child in running if child.poll() is not None]:
                element, slot = running.pop(child)
                slots.append(slot)
                say("  ".join(part for part in row_of(element) if part not in ("", "-")))
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        for child in running:
            child.send_signal(signal.SIGTERM)
        for child in running:
            child.wait()
        raise


def row_of(element: Element) -> list[str]:
    """How far an element's run has come: name, state, steps, reward, job, why it failed; `-` for what is not known."""
    status, reward = read_status(element.paths), final_reward(element.paths)
    return [
        element.name,
        status.state if status else "-",
        f"{status.step}/{status.max_steps}" if status else "-",
        "-" if reward is None else f"{reward:.3f}",
        element.job or "-",
        status.cause.line if status and status.cause else "",
    ]


def summary(elements: Sequence[Element]) -> list[str]:
    """The sweep's table, one line per run."""
    return table(["run", "state", "steps", "reward", "job", ""], list(map(row_of, elements)))


def failed(elements: Sequence[Element]) -> list[Element]:
    """The elements whose runs are not completed."""
    return [element for element in elements if row_of(element)[1] != "completed"]


def run_element(run_dir: str) -> int:
    """One run of the pool, in its own process. Its CUDA_VISIBLE_DEVICES lists its GPUs. Displays no progress; the pool does."""
    paths = RunPaths(Path(run_dir))
    cfg = load_command(paths.root)
    lock = FileLock(paths.lock)
    if not lock.exclusive():
        print(f"{paths.root} is in use by another run", file=sys.stderr)
        return 1
    # The directory may have waited in the pool for days without a lock, so its state may have changed.
    status = read_status(paths)
    if has_done(paths, status, cfg):
        return 0
    if has_begun(paths):
        try:
            rewind(paths)
        except ConfigError as error:
            status = status or Status(max_steps=cfg.total_steps)
            status.attempt = new_attempt(paths)
            paths.log(status.attempt, "launcher").write_text(f"{error}\n")
            status.give_up(paths, str(error))
            return 1
    lock.share()
    return launch(paths, cfg, lock)


if __name__ == "__main__":
    die_with_parent()
    sys.exit(run_element(sys.argv[1]))
