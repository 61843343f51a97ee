"""The runs of a shared trainer before they start: where their directories are, and whether the trainer can train them."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import replace
from pathlib import Path

from rlx.config.errors import ConfigError
from rlx.config.load import load_command
from rlx.config.schema import Config, RunConfig
from rlx.config.shared_trainer import differing
from rlx.invocation import program
from rlx.paths import MEMBER, RunPaths
from rlx.polling import WaitTimeout, wait_for
from rlx.runs.rewind import say
from rlx.runs.status import FINAL, read_status
from rlx.shared.membership import is_present, response_of

START_SECONDS = 60.0  # seconds to wait for a shared trainer that is starting
LET_GO = 3600.0  # seconds to wait for one that is in the middle of a step


def member_of(cfg: Config, directory: Path | None) -> Config:
    """The configuration with `run.name`, `run.dir` and an absolute `trainer.shared_trainer_dir`.

    The directory is `run_NAME` in the trainer's.

    `directory`: the one that the user gave. Raises ConfigError if it is another, or if there is no name.
    """
    assert cfg.trainer.shared_trainer_dir is not None
    host = Path(cfg.trainer.shared_trainer_dir).expanduser().absolute()
    if directory is not None and (directory.parent.resolve() != host.resolve() or not directory.name.startswith(MEMBER)):
        raise ConfigError(
            f"run.dir={directory} is not the directory of a run of the shared trainer in {host}, which looks for {MEMBER}* there.\n"
            f"  fix: leave out run.dir=, and give run.name=NAME: the directory is then {host}/{MEMBER}NAME"
        )
    name = directory.name.removeprefix(MEMBER) if directory is not None else cfg.run.name
    if not name or Path(name).name != name or (cfg.run.name or name) != name:
        raise ConfigError(
            f"a run of a shared trainer needs a name, which is that of one folder: run.name={cfg.run.name}"
            + (f" with run.dir={directory}" if directory is not None else "")
            + ".\n  fix: run.name=NAME"
        )
    own = RunConfig(name=name, dir=str(RunPaths(host).member(name).root))
    return replace(cfg, run=own, trainer=replace(cfg.trainer, shared_trainer_dir=str(host)))


def members_in(directory: Path) -> list[str]:
    """Names of the folders of runs in a shared trainer's directory."""
    return sorted(path.name for path in directory.glob(f"{MEMBER}*") if path.is_dir())


def check_shared(cfg: Config) -> None:
    """Raise ConfigError unless `trainer.shared_trainer_dir` is a shared trainer that is alive and can train this run."""
    assert cfg.trainer.shared_trainer_dir is not None
    root = Path(cfg.trainer.shared_trainer_dir)
    if not (root / "config.yaml").is_file():
        raise ConfigError(
            f"trainer.shared_trainer_dir={root}: there is no shared trainer.\n"
            f"  fix: start one first: {program()} {shlex.quote(f'run.dir={root}')} "
            f"trainer.max_concurrent_runs=2 lora.rank={cfg.lora.rank} model.dtype={cfg.model.dtype}"
        )
    host = load_command(root, secrets=False)
    if not isinstance(host, Config) or not host.is_shared_trainer:
        raise ConfigError(
            f"trainer.shared_trainer_dir={root} is a run with a trainer of its own (trainer.max_concurrent_runs=null).\n"
            "  fix: name the directory of a shared trainer"
        )
    if problems := differing(host, cfg):
        raise ConfigError([f"trainer.shared_trainer_dir={root}: {problem}" for problem in problems])
    paths = RunPaths(root)
    status = read_status(paths)
    with contextlib.suppress(WaitTimeout):
        starts = status is not None and status.state not in FINAL
        wait_for(lambda: is_present(paths), "the shared trainer", START_SECONDS if starts else 0.0)
        return
    raise ConfigError(
        f"trainer.shared_trainer_dir={root}: the shared trainer is not alive, or still loads its model (its logs: {paths.latest_logs}).\n"
        f"  fix: start it again: {program()} --config-dir {shlex.quote(str(root))} --config-name config resume=latest"
    )


def wait_until_let_go(paths: RunPaths, host: RunPaths) -> None:
    """Return when the shared trainer has finished what it was writing for the run's last attempt: at the latest when its step ends.

    Until then, files of the run may still appear, such as the rest of its newest checkpoint. Raises ConfigError if that takes too long.
    """

    def free() -> bool:
        said = response_of(paths)
        return said is None or said.state != "in" or is_present(paths) or not is_present(host)

    if free():
        return
    say(f"waiting until the shared trainer in {host.root} has finished its step: it still holds the last attempt of this run")
    try:
        wait_for(free, "the end of its step", LET_GO)
    except WaitTimeout:
        raise ConfigError(
            f"the shared trainer in {host.root} still holds the last attempt of this run after {LET_GO:g} s "
            f"(its logs: {host.latest_logs}).\n"
            "  fix: try again when its step is done"
        ) from None
