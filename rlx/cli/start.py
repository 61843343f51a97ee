"""Starts a run of any command that has a run directory: compose, check, plan, launch, and follow the run until it ends."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.config.errors import ConfigError
from rlx.config.instantiate import must_be_built, nodes_of
from rlx.config.load import Composed, compose, to_yaml
from rlx.config.run_config import is_fork
from rlx.config.schema import CommandConfig
from rlx.config.sweeps import is_sweep
from rlx.plan.environment import hub_variables
from rlx.plan.explain import explain
from rlx.plan.make import make_plan
from rlx.plan.memory import fit_lines
from rlx.plan.place import require_one_host
from rlx.plan.process_spec import ProcessSpec
from rlx.preflight.chat_template_check import check_chats
from rlx.preflight.doctor import ask_first
from rlx.preflight.env_probe import environments_of, lines_of
from rlx.preflight.hub import check_cache, use_cache
from rlx.runs.config_diff import change_note
from rlx.runs.run_dir import changes, create, resolve_run_dir, sources, write_description
from rlx.runs.status import Cause, read_status

if TYPE_CHECKING:
    from rlx.cli.commands import Command
    from rlx.config.composition import Kept


def run(argv: list[str], command: Command) -> int:
    """Run the command line and return the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # exit code 130, as after Ctrl-C
    if is_sweep(argv):
        from rlx.cli import sweep

        return sweep.run(argv, command)
    composed, resolved = resolve(argv, command)
    cfg = resolve_run_dir(resolved, label_of(composed, command))
    root = Path(str(cfg.run.dir))
    plan = make_plan(cfg, root)
    if cfg.launcher.name == "slurm":
        from rlx.launch.slurm import check_directory

        check_directory(root)
    elif not cfg.dry_run:  # a plan may be for other machines
        require_one_host(plan)
    check_nodes(cfg, composed)
    (environments,) = look([cfg])
    if cfg.dry_run:
        return _dry_run(cfg, composed, plan, environments)
    here = cfg.launcher.name == "local"
    for note in [*composed.notes, *(f"environment {line}" for line in environments), *fit_lines(cfg, only_wrong=True)]:
        print(note, flush=True)
    paths, lock = create(cfg, composed.overrides, plan, options=composed.origins.files)

    if here:
        from rlx.launch.local import launch

        exit_code = launch(paths, cfg, lock, command.show(paths.root, cfg))
    else:
        from rlx.launch.slurm import FOLDER, submit
        from rlx.launch.wait_for_job import follow

        try:
            (job,) = submit([(paths, cfg)], str(cfg.run.name), paths.root / FOLDER)  # the name that a dry run shows
        except RuntimeError as error:
            print(f"rlx: {error}", file=sys.stderr)
            return 1
        finally:
            lock.close()  # the job owns the directory now, and its id is recorded
        print(f"job {job}: {paths.root}")
        if not cfg.launcher.wait:
            print(f"  state    squeue -j {job}; {paths.status}\n  stop     scancel {job}")
            return 0
        exit_code = follow(paths, job, command.show(paths.root, cfg))
    status = read_status(paths)
    if status is not None and status.cause is not None:
        print(failure(status.cause, paths.root), file=sys.stderr)
    return exit_code


def resolve(argv: Sequence[str], command: Command, kept: Kept | None = None) -> tuple[Composed, Any]:
    """A composed configuration, and the same with what is found on this machine."""
    composed = compose(argv, None, command.root, kept)
    check_cluster(composed)
    if not composed.cfg.dry_run:  # the cache may be absent where a dry run is made
        use_cache(hub_variables(composed.cfg))
    return composed, command.resolve(composed.cfg)


def look(configs: Sequence[CommandConfig]) -> list[list[str]]:
    """Look at what runs need besides themselves: models, logins, ports, environments, chat templates. Raises ConfigError.

    Returns a line for each environment of each configuration.
    """
    check_cache(configs)
    ask_first(configs[0])
    environments = environments_of(configs)
    check_chats(configs, environments)
    return list(map(lines_of, environments))


def _dry_run(cfg: CommandConfig, composed: Composed, plan: Sequence[ProcessSpec], environments: Sequence[str]) -> int:
    """Print the configuration, the plan and the batch script, and write them where the next run will be."""
    root, script = Path(str(cfg.run.dir)), None
    sources(cfg)
    explained = explain(cfg, plan, composed.choices, composed.notes, str(root), environments)
    print(f"{to_yaml(cfg)}\n{explained}")
    if changed := changes(cfg, composed.origins.files):
        print("\n" + (f"starts from {cfg.resume}, with {', '.join(changed)}" if is_fork(cfg.resume) else change_note(root, changed)))
    if cfg.launcher.name == "slurm":
        from rlx.launch.slurm import FOLDER, sbatch_script

        script = sbatch_script(cfg, str(cfg.run.name), root / FOLDER, [root])
        print("\nsbatch script\n" + "".join(f"  {line}\n" for line in script.splitlines()), end="")
    try:
        written = write_description(cfg, composed.overrides, plan, script, explained)
        print(f"\nwritten to {written.root}" if written else f"\nnot written: {root} holds a run")
    except ConfigError as error:
        if composed.cfg.run.dir or composed.cfg.run.name:
            raise
        print(f"\nnot written: {error}")
    print("\ndry run: nothing was started")
    return 0


def label_of(composed: Composed, command: Command) -> str:
    """`reverse_text-tiny-grpo`, or `eval-math+sums-tiny`: what the run is named after."""
    name = command.root.command
    return composed.label if name == "train" else f"{name}-{composed.label}"


def check_nodes(cfg: CommandConfig, composed: Composed) -> None:
    """Build the open nodes of a configuration (loss, advantage, optim) where a rule cannot know whether they can be built.

    A dry run builds them, too, because it must refuse what a start refuses. Before a run that waits in a queue they are always built.
    """
    if nodes_of(cfg) and ((cfg.launcher.name != "local" and not cfg.dry_run) or must_be_built(cfg, composed.origins)):
        from rlx.train.trial import check_built

        check_built(cfg)


def check_cluster(composed: Composed) -> None:
    """Raise ConfigError if the command line describes the job of a cluster that the chosen launcher does not use.

    A file or a variable (RLX_SLURM) may describe a site's cluster for all runs. Whoever types it wants the run to be there.
    """
    launcher = composed.cfg.launcher.name
    typed = [line for line in composed.overrides if re.match(r"\+*slurm[.=]", line) and line.partition("=")[2] != "null"]
    if typed and launcher != "slurm":
        shown = composed.origins.show("launcher.name", launcher)
        raise ConfigError(f"{', '.join(typed)} (command line) has no effect: {shown}.\n  fix: add launcher=slurm, or leave it out")


def failure(cause: Cause, root: Path) -> str:
    """The message about a failure, with the last lines of the process's log."""
    name = f"{cause.role}_{cause.replica}" if cause.role == "inference" else cause.role
    lines = [f"{name} failed: {cause.reason}", f"last lines of {root / cause.log}:", *(f"  | {line}" for line in cause.last_lines)]
    return "\n".join([*lines, "all other processes were stopped"])
