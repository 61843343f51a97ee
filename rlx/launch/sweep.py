"""The runs of a sweep: find those that still have to run, and run them as SLURM job arrays or in a pool on this machine.

    outputs/<sweep>/<the run's overrides>/   a run directory like any other

Starting the same sweep again does the remaining work: completed runs are skipped, queued and running ones are left alone, and all
others resume from their last checkpoint. Keys may change as when one run resumes: with more steps, or other versions to evaluate,
completed runs go on.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from rlx.checkpoints.folders import Start
from rlx.config.errors import ConfigError
from rlx.config.load import load_command
from rlx.config.schema import CommandConfig
from rlx.launch.processes import bound
from rlx.launch.slurm import FOLDER, sbatch_options, submit
from rlx.paths import RunPaths
from rlx.plan.environment import DEVICES
from rlx.plan.explain import table
from rlx.plan.make import make_plan
from rlx.plan.place import require_one_host
from rlx.plan.record import ProcessSpec
from rlx.runs.claim import create, looks_like_run, writing
from rlx.runs.completed import has_done
from rlx.runs.differences import differences
from rlx.runs.history import final_reward
from rlx.runs.jobs import ENDED, GONE, is_alive, job_of, max_array_size, queue
from rlx.runs.lock import SWEEP, RunLock
from rlx.runs.rewind import Found, find_start
from rlx.runs.run import PATIENCE, WAITS, Run
from rlx.runs.status import FINAL, read_status

POLL = 0.2  # seconds between two checks of the pool
LOOK = 1.0  # seconds between two looks at the status files of submitted runs


@dataclass
class Element:
    """One run of a sweep, with its final, checked configuration."""

    name: str
    cfg: CommandConfig
    overrides: list[str]
    plan: list[ProcessSpec]
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
        lock = RunLock(directory / SWEEP)
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

    Returns job id → SLURM's state, which is asked for once; None if no element that is to be started has a job.
    """
    jobs: dict[str, str] | None = None
    others = []
    runs = [Run(element.paths, PATIENCE) for element in elements]
    statuses = [run.status for run in runs]  # the first look at all of them, so that their patience ends at the same time
    for element, run, status in zip(elements, runs, statuses, strict=True):
        paths = element.paths
        if not looks_like_run(paths):
            continue
        if element.cfg.clean:
            if (job := job_of(paths)) is not None and jobs is None:
                jobs = _queue(paths, job)
            continue
        changed = differences(load_command(paths.root, secrets=False), element.cfg)
        if changed:
            others.append(f"{paths.root}: {'; '.join(changed[:3])}")
            continue
        job = job_of(paths)
        completed = has_done(paths, status, element.cfg)
        if job is not None and not completed:
            if jobs is None:
                jobs = _queue(paths, job)
            if is_alive(job, jobs):
                element.state, element.job = "alive", job
                continue
        ended = status is not None and status.state in FINAL
        element.state = "done" if completed else "alive" if not ended and run.lives(status) else "again"
    if others:
        raise ConfigError(
            "the sweep's directory holds runs of another configuration (there ≠ here):\n  "
            + "\n  ".join(others[:8])
            + "\n  fix: give another run.name= for this sweep; or clean=true, which deletes them"
        )
    return jobs


def _queue(paths: RunPaths, job: str) -> dict[str, str]:
    try:
        return queue()
    except RuntimeError as error:
        raise ConfigError(
            f"{paths.root} belongs to SLURM job {job}, and SLURM does not tell whether that job is alive: {error}.\n"
            "  fix: try again where SLURM answers, or give another run.name="
        ) from error


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


def make_directories(elements: Sequence[Element], jobs: dict[str, str] | None = None) -> list[RunLock]:
    """Create the run directories, or rewind existing ones to their last checkpoint; return their locks, held shared.

    This includes a run that was stopped between its last checkpoint and its end: it completes at once. `jobs`: job id → SLURM's state;
    without it SLURM is asked for each run that has a job.
    Raises ConfigError, before any directory is changed, if all checkpoints of a run are damaged.
    """
    starts = _find_starts([element for element in elements if element.state == "again"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(elements) + 256  # a lock is an open file
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    locks = []
    try:
        for element in elements:
            cfg = element.cfg if element.state == "new" else replace(element.cfg, resume="latest")
            found = Found(starts.get(element.name), jobs)
            locks.append(create(cfg, element.overrides, element.plan, found=found)[1])
    except BaseException:
        release(locks)
        raise
    return locks


def _find_starts(elements: Sequence[Element]) -> dict[str, Start | None]:
    """By name, the checkpoints from which runs go on. Raises one ConfigError for all runs whose checkpoints are all damaged."""
    starts: dict[str, Start | None] = {}
    problems: list[str] = []
    for element in elements:
        try:
            starts[element.name] = find_start(element.paths)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return starts


def release(locks: Sequence[RunLock]) -> None:
    for lock in locks:
        lock.close()


def check_arrays(elements: Sequence[Element], name: str, directory: Path) -> None:
    """Raises ConfigError if an array would have more jobs than SLURM takes. It rejects it only when everything else is done."""
    largest = max(map(len, _arrays(elements, name, directory)), default=0)
    if largest > 1 and (most := max_array_size()) is not None and largest > most:
        raise ConfigError(
            f"the sweep's largest array would have {largest} jobs, and this cluster takes at most {most} (MaxArraySize of scontrol show "
            "config).\n  fix: start the sweep in parts, for example with fewer seeds each"
        )


def _arrays(elements: Sequence[Element], name: str, directory: Path) -> list[list[Element]]:
    """The elements by equal SLURM options."""
    groups: dict[str, list[Element]] = {}
    for element in elements:
        groups.setdefault(repr(sorted(sbatch_options(element.cfg, name, directory).items())), []).append(element)
    return list(groups.values())


def submit_arrays(elements: Sequence[Element], name: str, directory: Path) -> list[str]:
    """Submit runs as job arrays, one for each set of equal SLURM options; return the job ids.

    Raises RuntimeError if SLURM rejects an array; the elements of arrays accepted before that have their `job` set.
    """
    jobs = []
    for group in _arrays(elements, name, directory):
        jobs += submit([(element.paths, element.cfg) for element in group], name, directory / FOLDER)
        for element in group:
            element.job = jobs[len(jobs) - len(group) + group.index(element)]
    return jobs


def wait_for_jobs(elements: Sequence[Element]) -> None:
    """Wait until the jobs of all elements have ended, and write the final status of those that could not write it themselves.

    Prints meanwhile why jobs wait in the queue.
    """
    from rlx.launch.follow import ASK, LATE, Waiting, close

    gone: dict[str, int] = {}
    queued = Waiting()
    waiting = [element for element in elements if element.job is not None]
    asked = -math.inf
    while waiting:
        time.sleep(LOOK)
        waiting = [element for element in waiting if not _is_over(element)]
        if time.monotonic() - asked < ASK:
            continue
        asked = time.monotonic()
        try:
            states = queue() if waiting else {}
        except RuntimeError:  # the controller may answer later
            continue
        queued.tell({each.job: f"{each.name} (job {each.job})" for each in waiting if each.job and states.get(each.job) in WAITS})
        for element in list(waiting):
            assert element.job is not None
            state = states.get(element.job, GONE)
            gone[element.job] = gone.get(element.job, 0) + 1 if state in ENDED else 0
            if gone[element.job] >= LATE:
                if job_of(element.paths) in (None, element.job):  # else the run was submitted again
                    close(element.paths, element.job, state)
                waiting.remove(element)


def _is_over(element: Element) -> bool:
    status = read_status(element.paths)
    return status is not None and status.state in FINAL and status.state != "preempted"


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
                command = [sys.executable, "-m", "rlx.launch.element", str(element.paths.root)]
                say(f"{element.name}: starting")
                # Its own session: Ctrl-C then reaches only the pool, which forwards it once.
                child = subprocess.Popen(
                    bound(command, os.environ),
                    env=os.environ | mine,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
                running[child] = (element, slot)
            for child in [child for child in running if child.poll() is not None]:
                element, slot = running.pop(child)
                slots.append(slot)
                say(f"{element.name}: {ending_of(element)}")
            time.sleep(POLL)
    except KeyboardInterrupt:
        for child in running:
            child.send_signal(signal.SIGTERM)
        for child in running:
            child.wait()
        raise


def ending_of(element: Element) -> str:
    """How an element's run ended, as text."""
    status = read_status(element.paths)
    if status is None:
        return "not started"
    reward = final_reward(element.paths)
    cause = f": {status.cause.line}" if status.cause is not None else ""
    return (
        f"{status.state} after {status.step} of {status.max_steps} steps" + (f", reward {reward:.3f}" if reward is not None else "") + cause
    )


class Started(Protocol):
    """A run of a sweep, in its directory."""

    name: str
    job: str | None

    @property
    def paths(self) -> RunPaths: ...


def summary(elements: Sequence[Started]) -> list[str]:
    """The sweep's table, one line per run."""
    rows = []
    for element in elements:
        status, reward = read_status(element.paths), final_reward(element.paths)
        cause = status.cause.line if status is not None and status.cause is not None else ""
        rows.append(
            [
                element.name,
                status.state if status else "-",
                f"{status.step}/{status.max_steps}" if status else "-",
                "-" if reward is None else f"{reward:.3f}",
                element.job or "-",
                cause,
            ]
        )
    return table(["run", "state", "steps", "reward", "job", ""], rows)


def failed(elements: Sequence[Element]) -> list[Element]:
    """The elements whose runs are not completed."""
    return [element for element in elements if (status := read_status(element.paths)) is None or status.state != "completed"]


def plan_of(cfg: CommandConfig) -> list[ProcessSpec]:
    assert cfg.run.dir is not None
    return make_plan(cfg, Path(cfg.run.dir))
