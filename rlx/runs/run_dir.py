"""Names, locks and fills run directories before any process starts.

A directory belongs to the processes that hold a shared lock on its `.lock`. Creating a run there takes the lock exclusively for a
moment, so two runs never share one directory.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar, cast

import yaml

from rlx.checkpoints.folders import NoCheckpoint, Start, adopt, write_start
from rlx.config.chat_format import with_absolute_files
from rlx.config.errors import ConfigError
from rlx.config.load import load_command, to_yaml
from rlx.config.run_config import is_fork
from rlx.config.schema import CommandConfig, Config, RunConfig
from rlx.config.schema_eval import PlayWithModel
from rlx.config.schema_synthesize import SynthesizeRoot
from rlx.config.secret import redact_lines, secrets_of
from rlx.lock import FileLock
from rlx.paths import RunPaths, listed, write_text
from rlx.plan.process_spec import ProcessSpec, write_plan
from rlx.polling import WaitTimeout, wait_for
from rlx.runs import own_code
from rlx.runs.config_diff import NOT_COMPARED, change_note, changed_keys, differences, differing
from rlx.runs.jobs import is_alive, job_of, queue
from rlx.runs.members import check_shared, member_of, members_in, wait_until_let_go
from rlx.runs.provenance import keep_changes, write_provenance
from rlx.runs.replay import check_replay
from rlx.runs.rewind import (
    LATEST,
    check_fork,
    find_fork,
    lacks_last_evaluation,
    note_fork,
    refuse_ended,
    rewind,
    say,
    source_of,
)
from rlx.runs.run import Run
from rlx.runs.status import FINAL, new_attempt, read_status
from rlx.runs.weights import initial_model
from rlx.weights import tmpfs

FILL = 300.0  # seconds for another role to fill the run directory: it hashes the code, perhaps on a slow file system
MAKING = ".making"  # marks a run directory under construction; a half-made directory counts as free

C = TypeVar("C", bound=CommandConfig)


def resolve_run_dir(cfg: C, label: str) -> C:
    """The configuration with `run.name` and an absolute `run.dir` filled in.

    The default is `outputs/<label>-<short id>`; for a dry run `outputs/dry_run-<label>`, which the next dry run replaces.
    """
    directory = Path(cfg.run.dir).expanduser().absolute() if cfg.run.dir else None
    if isinstance(cfg, Config) and cfg.trainer.shared_trainer_dir is not None:
        return cast("C", member_of(cfg, directory))
    label = re.sub(r"[^\w.+-]+", "_", label)
    default = f"dry_run-{label}" if cfg.dry_run else f"{label}-{secrets.token_hex(3)}"
    name = cfg.run.name or (directory.name if directory else default)
    if Path(name).name != name:
        raise ConfigError(
            f"run.name={name} is not the name of one folder.\n  fix: give only the folder's name, or the whole path as run.dir="
        )
    return replace(cfg, run=RunConfig(name=name, dir=str(directory or Path("outputs").absolute() / name)))


def create(
    cfg: CommandConfig,
    overrides: Sequence[str],
    plan: Sequence[ProcessSpec],
    *,
    options: Mapping[str, Path] = own_code.NO_OPTIONS,
    jobs: Mapping[str, str] | None = None,
    even_done: bool = False,
) -> tuple[RunPaths, FileLock]:
    """Create the run directory of a settled configuration and write its initial files. Returns the lock held shared.

    With `replay`, the run starts from the initial model of the replayed run. With `resume=latest` or a step, the run resumes in its own
    directory; with a path, a new run starts from that checkpoint. `options`: the user's own option files, by name. `jobs`: job id → SLURM's
    state; None: SLURM is asked. `even_done`: a run whose checkpoint already contains its last step is accepted too; it ends at once.
    Raises ConfigError if the directory is taken, in use, or cannot be written, and if there is nothing to resume or to replay.
    """
    paths = _paths(cfg)
    cfg = replace(cfg, model=with_absolute_files(cfg.model))
    if isinstance(cfg, Config) and cfg.trainer.shared_trainer_dir is not None:
        check_shared(cfg)
        wait_until_let_go(paths, RunPaths(Path(cfg.trainer.shared_trainer_dir)))
    if isinstance(cfg, Config) and cfg.replay is not None:
        cfg = replace(cfg, replay=str(Path(cfg.replay).expanduser().absolute()))
        if Path(str(cfg.replay)).resolve() == paths.root.resolve():  # clean=true would delete it
            raise ConfigError(
                f"replay={cfg.replay} is also the directory of this run.\n  fix: give the replay its own run.name= or run.dir="
            )
    if isinstance(cfg, SynthesizeRoot) and not cfg.play and not (cfg.resume is not None and paths.finished.is_file()):
        raise ConfigError(
            f"play=false needs resume=latest of a synthesis that has played; resume={cfg.resume or 'null'}, and {paths.root} holds no "
            "finished rollout.\n  fix: name such a run with run.dir= and resume=latest, or leave out play=false"
        )
    with writing(paths.root):
        if cfg.resume is not None and not is_fork(cfg.resume) and (cfg.resume != LATEST or (paths.root.exists() and not _is_free(paths))):
            lock = _go_on(paths, cfg, overrides, plan, options, jobs, even_done)
        else:
            lock = _begin(paths, cfg, overrides, plan, options, jobs)
    lock.share()
    return paths, lock


def _begin(
    paths: RunPaths,
    cfg: CommandConfig,
    overrides: Sequence[str],
    plan: Sequence[ProcessSpec],
    options: Mapping[str, Path],
    jobs: Mapping[str, str] | None,
) -> FileLock:
    """Make the directory of a new run. Returns the lock held exclusively."""
    if cfg.resume == LATEST:
        say(f"there is no run in {paths.root} yet: starting {'at step 0' if cfg.has_checkpoints else 'a new one'}")
        cfg = replace(cfg, resume=None)
    start, replayed = sources(cfg)
    cfg = replace(cfg, resume=str(start.checkpoint)) if start else cfg
    lock = _claim(paths, clean=cfg.clean, jobs=jobs)
    try:
        if source := note_fork(paths, start, cfg, options) if start else replayed:
            write_text(paths.initial_model, source.initial_model.read_text())
        write_start(paths, _adopt(paths, start) if start else None)
        _fill(paths, cfg, overrides, plan, options)
        (paths.root / MAKING).unlink()
    except BaseException:
        lock.close()
        raise
    return lock


def sources(cfg: CommandConfig) -> tuple[Start | None, RunPaths | None]:
    """The checkpoint of another run from which a new one starts, and the run that it replays. Only reads.

    A dry run does not read all of the checkpoint, which may take minutes. Raises ConfigError if there is none, or if this configuration
    cannot start from it.
    """
    start = find_fork(str(cfg.resume), digests=not cfg.dry_run) if is_fork(cfg.resume) else None
    if start:
        check_fork(start, cfg)
    return start, check_replay(cfg, start.step if start else 0) if isinstance(cfg, Config) and cfg.replay is not None else None


def _adopt(paths: RunPaths, start: Start) -> Start:
    say(f"{paths.root}: starting after {start.step} steps, from {start.checkpoint}")
    try:
        return adopt(paths, start)
    except NoCheckpoint as error:
        raise ConfigError(f"resume={start.checkpoint}: {error}.\n  fix: name another checkpoint") from error


def _go_on(
    paths: RunPaths,
    cfg: CommandConfig,
    overrides: Sequence[str],
    plan: Sequence[ProcessSpec],
    options: Mapping[str, Path],
    jobs: Mapping[str, str] | None,
    even_done: bool,
) -> FileLock:
    """Take over the directory of an ended run and rewind it to the checkpoint of `cfg.resume`. Returns the lock held exclusively.

    Raises ConfigError before any change if that is impossible.
    """
    assert cfg.resume is not None
    if not paths.config.is_file() or not looks_like_run(paths):
        raise ConfigError(f"resume={cfg.resume}: {paths.root} holds no run.\n  fix: name the run with run.name= or run.dir=")
    lock = _alone(paths, jobs)
    try:
        before = load_command(paths.root, secrets=False)
        if other := differences(before, cfg):
            raise ConfigError(
                f"the run in {paths.root} has another configuration (there ≠ here):{_listed(other)}\n"
                f"  fix: resume with its own, --config-dir {paths.root} --config-name config resume={cfg.resume}; or start another run, "
                f"run.name=NEW" + (f" resume={paths.root}" if cfg.has_checkpoints else "")
            )
        even_done = even_done or lacks_last_evaluation(paths, cfg)
        start = rewind(paths, cfg.resume, max_steps=None if even_done else cfg.total_steps)
        if cfg.has_checkpoints:
            say(f"{paths.root}: resuming after {start.step} steps" if start else f"{paths.root} has no checkpoint: starting from step 0")
        if changed := changes(cfg, options):
            say(change_note(paths.root, changed))
        keep_changes(paths, own_code.changed(paths, cfg, own_code.NO_OPTIONS))
        write_provenance(paths, cfg, options, again=True)
        _keep_secrets(paths, cfg)
        _describe(paths, replace(cfg, resume=before.resume), overrides, plan)
        paths.make_folders()  # one may have been deleted since
    except BaseException:
        lock.close()
        raise
    return lock


def _listed(lines: Sequence[str]) -> str:
    return "".join(f"\n  {line}" for line in lines[:8]) + ("\n  …" if len(lines) > 8 else "")


def changes(cfg: CommandConfig, options: Mapping[str, Path] = own_code.NO_OPTIONS) -> list[str]:
    """What resuming changes in the run's configuration, or a fork in that of its source, `max_steps: 40 → 100`; empty without a run."""
    paths = _paths(cfg)
    if is_fork(cfg.resume):
        paths = source_of(find_fork(str(cfg.resume), digests=False))
    if cfg.resume is None or not paths.config.is_file() or not looks_like_run(paths):
        return []
    before = load_command(paths.root, secrets=False)
    return [*changed_keys(before, cfg), *own_code.changed(paths, cfg, options)] if type(before) is type(cfg) else []


def join(
    cfg: CommandConfig, overrides: Sequence[str], plan: Sequence[ProcessSpec], options: Mapping[str, Path] = own_code.NO_OPTIONS
) -> tuple[RunPaths, FileLock]:
    """Join the run directory of other roles of the same run, or create it. Returns the lock held shared.

    Raises ConfigError if it holds a run with another configuration, or one whose roles have all ended.
    """
    paths = _paths(cfg)
    if cfg.resume is not None:
        raise ConfigError(
            f"resume={cfg.resume} works only with `rlx train`, which prepares the directory for all roles.\n  fix: use `rlx train`"
        )
    with writing(paths.root):
        paths.root.mkdir(parents=True, exist_ok=True)
        if paths.status.exists():
            raise ConfigError(
                f"{paths.root} belongs to `rlx train`; a role started separately cannot join it.\n  fix: give another run.dir="
            )
        try:
            _refuse_taken(paths, clean=False)
        except ConfigError:
            if not listed(paths.lock):  # not a run; with a lock, another role fills the directory at this moment, or has filled it
                raise
        lock = FileLock(paths.lock)
        refuse_ended(paths, lock)

        # If several roles start at once, one fills the directory and the others wait for it.
        def ready() -> bool:
            if not listed(paths.config) and lock.exclusive() and not listed(paths.config):
                new_attempt(paths)  # environment workers of a role by hand write their logs there
                _fill(paths, cfg, overrides, plan, options)
            return listed(paths.config)

        try:
            wait_for(ready, f"the role that holds {paths.lock} to write {paths.config}", timeout=FILL, poll=0.02)
        except WaitTimeout as error:
            raise ConfigError(f"{error}\n  fix: end that role, or give another run.dir=") from error
        lock.share()
    here, there = asdict(cfg), asdict(load_command(paths.root))
    if others := list(differing(there, here, NOT_COMPARED)):
        raise ConfigError(
            f"run.dir={paths.root} holds a run with another configuration (there ≠ here):{_listed(others)}\n"
            "  fix: give the same overrides, or another run.dir="
        )
    return paths, lock


def write_description(
    cfg: CommandConfig, overrides: Sequence[str], plan: Sequence[ProcessSpec], sbatch: str | None = None, explained: str | None = None
) -> RunPaths | None:
    """Write the files of a dry run: configuration, overrides, plan, its explanation, sbatch script. A run may use the directory later.

    Returns `None` and changes nothing if the directory holds a run. Raises ConfigError if the directory cannot be written.
    """
    paths = _paths(cfg)
    with writing(paths.root):
        if paths.root.exists() and not _is_free(paths):
            return None
        _describe(paths, cfg, overrides, plan)
        for path, text in ((paths.sbatch, sbatch), (paths.explained, explained)):
            if text is not None:
                write_text(path, f"{text.rstrip()}\n")
    return paths


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn an OSError about an unusable directory into a ConfigError."""
    try:
        yield
    except OSError as error:
        what = f"{error.strerror}: {error.filename}" if error.strerror else str(error)
        raise ConfigError(f"the run directory {directory} cannot be written: {what}\n  fix: give another run.dir=") from error


def looks_like_run(paths: RunPaths) -> bool:
    """Whether rlx created this directory. Only such directories are ever deleted."""
    whole = not (paths.root / MAKING).exists()
    return whole and paths.lock.is_file() and (paths.status.is_file() or (paths.config.is_file() and paths.plan.is_file()))


def _is_free(paths: RunPaths) -> bool:
    """Whether a directory is empty, half-made, or holds only the files of a dry run."""
    if (paths.root / MAKING).exists():
        return True
    entries = {entry.name for entry in paths.root.iterdir()} - {paths.lock.name}
    described = {paths.config.name, paths.overrides.name, paths.plan.name}
    return entries - {paths.sbatch.name, paths.explained.name, paths.report.name} in (set(), described)


def _claim(paths: RunPaths, *, clean: bool, jobs: Mapping[str, str] | None) -> FileLock:
    """Create the directory, or empty it if it holds an old run and `clean` is set. Returns the lock held exclusively."""
    root = paths.root
    root.mkdir(parents=True, exist_ok=True)
    if clean and (runs := members_in(root)):
        raise ConfigError(
            f"clean=true would delete the runs of the shared trainer in {root}: {', '.join(runs)}.\n"
            "  fix: resume=latest, which keeps them; or remove them first"
        )
    _refuse_taken(paths, clean=clean)
    lock = _alone(paths, jobs)
    _refuse_taken(paths, clean=clean)  # again, now that the lock keeps others out
    (root / MAKING).touch()
    tmpfs.clear(paths.weights)
    for entry in {*root.iterdir()} - {paths.lock, root / MAKING}:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return lock


def ask_slurm(paths: RunPaths) -> dict[str, str]:
    """SLURM's states by job id. Raises ConfigError, about a run that has a job, if SLURM does not answer."""
    try:
        return queue()
    except RuntimeError as error:
        raise ConfigError(
            f"{paths.root} belongs to SLURM job {job_of(paths)}, and SLURM does not tell whether that job is alive: {error}.\n"
            "  fix: try again where SLURM answers, or give another run.name= or run.dir="
        ) from error


def _alone(paths: RunPaths, jobs: Mapping[str, str] | None) -> FileLock:
    """The directory's lock, held exclusively. Raises ConfigError if another process holds it or a SLURM job owns the directory."""
    lock, problem = FileLock(paths.lock), ""
    try:
        job, status = job_of(paths), read_status(paths)
        if not lock.exclusive():
            problem = "a run is alive there.\n  fix: stop it"
        elif job is not None and is_alive(job, ask_slurm(paths) if jobs is None else jobs):  # a queued job holds no lock
            problem = f"it belongs to SLURM job {job}, which waits or runs.\n  fix: scancel {job}"
        elif not lock.sees_other_hosts and status is not None and status.state not in FINAL and Run(paths).lives(status):
            problem = "a run is alive there: its status changes, and the file system has no locks.\n  fix: stop it"
        if problem:
            raise ConfigError(f"{paths.root} is in use: {problem}, or give another run.name= or run.dir=")
    except BaseException:
        lock.close()
        raise
    return lock


def _refuse_taken(paths: RunPaths, *, clean: bool) -> None:
    if _is_free(paths):
        return
    if not looks_like_run(paths):
        names = sorted(entry.name for entry in paths.root.iterdir())
        raise ConfigError(
            f"{paths.root} holds files that are not a run ({', '.join(names[:3])}{', …' if len(names) > 3 else ''}); "
            "clean=true does not delete them.\n  fix: give another run.name= or run.dir="
        )
    if not clean:
        raise ConfigError(
            f"{paths.root} already holds a run.\n"
            "  fix: give another run.name= or run.dir=; or resume=latest, which continues it; or clean=true, which deletes it"
        )


def _fill(paths: RunPaths, cfg: CommandConfig, overrides: Sequence[str], plan: Sequence[ProcessSpec], options: Mapping[str, Path]) -> None:
    write_provenance(paths, cfg, options)
    _keep_secrets(paths, cfg)
    paths.make_folders()
    is_member = (
        isinstance(cfg, Config) and cfg.trainer.shared_trainer_dir is not None
    )  # the shared trainer writes the name of its initial model
    if isinstance(cfg, PlayWithModel) and (started_from := initial_model(cfg)) is not None:
        write_text(paths.initial_model, f"{started_from}\n")
    elif not cfg.model.prepared and not paths.initial_model.exists() and not is_member:
        # Store an absolute path: the roles may not share the launcher's working directory.
        local = Path(cfg.model.name).expanduser()
        write_text(paths.initial_model, f"{local.absolute() if local.is_dir() else cfg.model.name}\n")
    _describe(paths, cfg, overrides, plan)


def _keep_secrets(paths: RunPaths, cfg: CommandConfig) -> None:
    """Write the secret values; the roles read them with `load_run`."""
    if kept := secrets_of(cfg):
        write_text(paths.secrets, yaml.safe_dump(kept), 0o600)
    else:
        paths.secrets.unlink(missing_ok=True)


def _describe(paths: RunPaths, cfg: CommandConfig, overrides: Sequence[str], plan: Sequence[ProcessSpec]) -> None:
    write_text(paths.overrides, yaml.safe_dump(redact_lines(overrides, cfg), allow_unicode=True))
    write_plan(paths.plan, plan)
    write_text(paths.config, to_yaml(replace(cfg, dry_run=False, clean=False)))  # last, because joining roles wait for it


def _paths(cfg: CommandConfig) -> RunPaths:
    assert cfg.run.dir is not None, "the configuration is not settled"
    return RunPaths(Path(cfg.run.dir))
