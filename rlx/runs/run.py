"""Read-only view of a run directory: its configuration, its results and its current state.

It writes nothing and takes no lock, so it cannot disturb a run. It also works on other users' runs and on half-made directories:
missing files give `None` or an empty value, and unreadable files raise a ConfigError with the file's name. To write into a directory,
use `rlx.runs.run_dir`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlx.checkpoints import folders
from rlx.config.errors import ConfigError, may_read
from rlx.config.load import load_command
from rlx.config.nested import use_own_names
from rlx.config.roots import root_named
from rlx.config.schema import CommandConfig
from rlx.config.schema_eval import EvalRoot
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.config.yaml_files import parsed
from rlx.metrics import read_metrics
from rlx.paths import RunPaths, step_of
from rlx.plan.process_spec import ProcessSpec, read_plan
from rlx.process_tree import start_time
from rlx.runs.history import History
from rlx.runs.jobs import ENDED, GONE, job_of
from rlx.runs.members import members_in
from rlx.runs.status import FINAL, Status, read_status

STALE = 60.0  # seconds: a run on another host counts as dead when its status, written twice a second, is older than this
WAITS = ("PENDING", "REQUEUED", "REQUEUE_HOLD")  # SLURM's states of a job in the queue


class Run:
    """One run directory. Most properties read the files on each access; `config`, `overrides`, `plan`, `provenance`, `data` are cached."""

    def __init__(self, root: Path | RunPaths) -> None:
        self.paths = root if isinstance(root, RunPaths) else RunPaths(Path(root).expanduser())
        self._read: dict[str, Any] = {}

    @classmethod
    def open(cls, root: Path) -> Run:
        """The run in a directory. Raises ConfigError if there is none."""
        run = cls(root)
        with may_read(run.root):
            if not run.root.is_dir():
                raise ConfigError(f"there is no directory {run.root}.\n  fix: name a run directory; rlx runs lists them")
            there = run.paths.config.is_file() or run.paths.status.is_file()
        if not there:
            raise ConfigError(
                f"{run.root} is no run directory: it has neither {run.paths.config.name} nor {run.paths.status.name}.\n"
                "  fix: name a run directory; rlx runs lists them"
            )
        return run

    @property
    def root(self) -> Path:
        return self.paths.root

    @property
    def name(self) -> str:
        return self.root.absolute().name

    # configuration
    @property
    def config(self) -> CommandConfig | None:
        return self._once("config", self.paths.config, lambda path: load_command(path.parent, secrets=False))

    @property
    def command(self) -> str | None:
        """The command that made the run: `train`, `sft`, `eval`, `synthesize`. Unlike `config`, also known of a run of another version."""

        def read(path: Path) -> str:
            return root_named(parsed(path.read_text(encoding="utf-8")).get("defaults")).command

        return self._once("command", self.paths.config, read)

    @property
    def overrides(self) -> list[str]:
        """The overrides of the command line, as written."""
        return self._once("overrides", self.paths.overrides, lambda path: yaml.safe_load(path.read_text())) or []

    @property
    def plan(self) -> list[ProcessSpec]:
        return self._once("plan", self.paths.plan, read_plan) or []

    @property
    def provenance(self) -> Mapping[str, Any] | None:
        return self._once("provenance", self.paths.provenance, lambda path: json.loads(path.read_text()))

    @property
    def data(self) -> Mapping[str, Any] | None:
        """Digests of the examples by environment, or of the data sets; `None` if the run ended before it recorded them."""

        def read(path: Path) -> Mapping[str, Any]:
            found = json.loads(path.read_text(encoding="utf-8"))
            return found["envs"] if "envs" in found else found["sets"]

        return self._once("data", self.paths.data, read)

    # results
    @property
    def status(self) -> Status | None:
        return self._file(self.paths.status, lambda _: read_status(self.paths))

    @property
    def job(self) -> str | None:
        """Id of the run's last SLURM job."""
        return self._file(self.paths.job, lambda _: job_of(self.paths))

    @property
    def history(self) -> History:
        """The metrics so far."""
        history = History(self.paths)
        self._file(self.paths.metrics, lambda _: history.read())
        return history

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the complete checkpoints, in order."""
        return folders.steps(self.paths)

    @property
    def rollouts(self) -> list[int]:
        """Steps whose rollouts were saved, in order."""
        return sorted(step_of(path) or 0 for path in self.paths.rollouts.glob("step_*.jsonl.zst"))

    @property
    def recorded(self) -> list[int]:
        """Steps whose batches were recorded, in order."""
        return sorted(step_of(path) or 0 for path in self.paths.recorded.glob("step_*.batch.zst"))

    # state
    def state(self, jobs: Mapping[str, str] | None = None) -> str:
        """The state of the status file, or `waiting (…)`, `lost` or `not started`. `jobs`: job id → SLURM's state; `None` if unknown."""
        status, job = self.status, self.job
        if status is None:
            return "not started"
        if job is None or jobs is None or (job not in jobs and self.paths.status.stat().st_uid != os.geteuid()):  # someone else's job
            known = status.state in FINAL or (job is not None and jobs is None) or self.lives(status)
            return status.state if known or (status.state == "starting" and job is not None) else "lost"
        now = jobs.get(job, GONE)
        if now in WAITS:
            return f"waiting ({now.lower()})"
        waited = status.state == "preempted"
        if (now == "CANCELLED" and (waited or status.state not in FINAL)) or (now == GONE and waited):
            return "interrupted"  # the job was cancelled in the queue, so no process could write the status
        return status.state if status.state in FINAL or now not in ENDED else "lost"

    def lives(self, status: Status | None = None) -> bool:
        """Whether a process of the run is alive. On another host: whether the status was written a moment ago."""
        status = status or self.status
        if status is None:
            return False
        named = [each for each in (status.launcher, status.supervisor, *status.processes) if each is not None]
        here = [each["pid"] for each in named if each["host"] == socket.gethostname() and each["pid"] is not None]
        if any(_started_before(pid, status.updated) for pid in here):
            return True
        return abs(time.time() - status.updated) < STALE and any(each["host"] != socket.gethostname() for each in named)

    # reading

    def _once(self, name: str, path: Path, read: Any) -> Any:
        if name not in self._read:
            self._read[name] = self._file(path, read)
        return self._read[name]

    def _file(self, path: Path, read: Any) -> Any:
        """`read(path)`; `None` if the file does not exist. Raises ConfigError if it cannot be read or parsed."""
        try:
            with may_read(path):
                return read(path) if path.exists() else None
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"this version of rlx cannot read {path} ({type(error).__name__}: {error})") from error


def find(root: Path, depth: int = 3, planned: bool = False) -> Iterator[Run]:
    """All runs below a folder: `outputs/<name>` and `outputs/<sweep>/<element>`. In a run directory only a shared trainer's runs.

    `planned`: also those that have not started.

    A folder that may not be entered counts as a run: its properties raise ConfigError. One that may only not be listed is skipped.
    """
    try:
        is_run = RunPaths(root).status.is_file() or (planned and RunPaths(root).config.is_file())
    except PermissionError:
        is_run = True
    if is_run:
        yield Run(root)
        for name in members_in(root):
            yield from find(root / name, 0, planned)
        return
    try:
        if depth:
            for folder in sorted(root.iterdir()):
                if folder.is_dir() and not folder.is_symlink() and not folder.name.startswith("."):
                    yield from find(folder, depth - 1, planned)
    except PermissionError:
        return


def _started_before(pid: int, then: float) -> bool:
    """Whether process `pid` is alive and started before `then` (seconds since the epoch). A later process merely reuses the pid."""
    started = start_time(pid)
    if started is None:
        return False
    # The clock and not /proc/uptime, which in some containers counts from the container's start.
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    return time.time() - age <= then + 1.0


def has_done(paths: RunPaths, status: Status | None, cfg: CommandConfig) -> bool:
    """Whether the run in a directory is completed and `cfg` asks for nothing more. `status`: the directory's.

    The number of steps tells it of a training run. An evaluation may be asked for other versions, and a synthesis for other rollouts or
    another choice; what they have done is in their own files, because a resume that has not begun yet has changed `config.yaml` already.
    """
    if status is None or status.state != "completed":
        return False
    if isinstance(cfg, EvalRoot):
        done = {record["step"] for record, _ in read_metrics(paths.metrics) if record["source"] == "eval"}
        return bool(done) and (cfg.weights_dir is None or done.issuperset(cfg.versions))  # servers of others have any one version
    if isinstance(cfg, SynthesizeRoot):
        return _written(paths, cfg) in (cfg.output_options, cfg.output_options | {"play": True})
    return status.max_steps >= cfg.total_steps


def _written(paths: RunPaths, cfg: SynthesizeRoot) -> object:
    """What was asked for when the data of a synthesis were written; None if that is not known."""
    from rlx.rollout.sft_export import METADATA  # it loads numpy

    try:
        asked = json.loads(paths.synthesized.with_name(METADATA).read_text()).get("asked")
        use_own_names(asked or {})
        return asked
    except (OSError, ValueError):
        return None
