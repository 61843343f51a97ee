"""What the commands with a run directory have in common: how one differs from another, and what each does before and after a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx.cli.display import Display
    from rlx.config.load import Composed
    from rlx.config.roots import Root
    from rlx.config.schema import CommandConfig
    from rlx.runs.status import Cause


def _same(cfg: Any) -> Any:
    return cfg


@dataclass(frozen=True)
class Command:
    """What distinguishes one command from another."""

    root: Root
    display: Callable[[Path, Any, Sequence[str]], Display]  # run directory, configuration, the command's arguments
    resolve: Callable[[Any], Any] = _same
    """Replaces what the command finds on this machine (the newest weights, absolute paths) in its configuration, before it is written.
    Raises ConfigError."""


def label_of(composed: Composed, command: Command) -> str:
    """`reverse_text-tiny-grpo`, or `eval-math+sums-tiny`: what the run is named after."""
    return composed.label if command.root.command == "train" else f"{command.root.command}-{composed.label}"


def check_nodes(cfg: CommandConfig, composed: Composed) -> None:
    """Build the open nodes of a configuration (loss, advantage, optim) where a rule cannot know whether they can be built.

    A dry run builds them, too, because it must refuse what a start refuses. Before a run that waits in a queue they are always built.
    """
    from rlx.config.targets import must_be_built, nodes_of

    if nodes_of(cfg) and ((cfg.launcher.name != "local" and not cfg.dry_run) or must_be_built(cfg, composed.origins)):
        from rlx.train.nodes import check_built

        check_built(cfg)


def check_cluster(composed: Composed) -> None:
    """Raise ConfigError if the command line describes the job of a cluster that the chosen launcher does not use.

    A file or a variable (RLX_SLURM) may describe a site's cluster for all runs. Whoever types it wants the run to be there.
    """
    from rlx.config.errors import ConfigError

    launcher = composed.cfg.launcher.name
    typed = [line for line in composed.overrides if re.match(r"\+*slurm[.=]", line) and line.partition("=")[2] != "null"]
    if typed and launcher != "slurm":
        shown = composed.origins.show("launcher.name", launcher)
        raise ConfigError(f"{', '.join(typed)} (command line) has no effect: {shown}.\nAdd launcher=slurm, or leave it out.")


def failure(cause: Cause, root: Path) -> str:
    """The message about a failure, with the last lines of the process's log."""
    name = f"{cause.role}_{cause.replica}" if cause.role == "inference" else cause.role
    lines = [f"{name} failed: {cause.reason}"]
    if cause.last_lines:
        lines += [f"last lines of {root / cause.log}:", *(f"  | {line}" for line in cause.last_lines)]
    else:
        lines.append(f"its log {root / cause.log} is empty")
    return "\n".join([*lines, "all other processes were stopped"])
