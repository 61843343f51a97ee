"""What the commands of single roles share: one role of a run, in the foreground, in a run directory that others may join.

The process becomes the role: what the role prints, how it is stopped and its exit code are its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.config.schema import Config
    from rlx.types import ProcessSpec


def help_text(role: str, summary: str) -> str:
    more = "  --replica N            which of hardware.inference_replicas servers (default 0)\n" if role == "inference" else ""
    return f"""\
rlx {role}: {summary}.

usage: rlx {role} run.dir=PATH [GROUP=OPTION …] [key=value …]

  run.dir=PATH           the run directory that the roles of one run share; the first one makes it,
                         the others must give the same configuration
{more}
One run in four terminals:
  rlx prepare run.dir=outputs/mine
  rlx inference run.dir=outputs/mine
  rlx orchestrator run.dir=outputs/mine
  rlx trainer run.dir=outputs/mine
Groups and keys are those of `rlx train --help`."""


def run(role: str, argv: list[str]) -> int:
    """Become the role. Returns only when there is nothing to do."""
    from rlx.config.errors import ConfigError
    from rlx.config.load import compose
    from rlx.plan.environment import MissingGPU, environment_of
    from rlx.plan.rl import make_plan
    from rlx.process import SUPERVISOR
    from rlx.runs.claim import join, settle

    replica, overrides = _replica(role, argv)
    composed = compose(overrides)
    cfg = settle(composed.cfg, composed.label)
    assert cfg.run.dir is not None
    plan = make_plan(cfg, Path(cfg.run.dir))
    spec = next((spec for spec in plan if (spec.role, spec.replica) == (role, replica)), None)
    if spec is None and (role != "prepare" or cfg.replay is not None):
        raise ConfigError(_absent(role, replica, cfg, plan))
    if cfg.dry_run:
        from rlx.plan.explain import explain

        print(explain(cfg, [spec] if spec else [], composed.choices, composed.notes, cfg.run.dir))
        print("\ndry run: nothing was started")
        return 0
    try:
        environment = {} if spec is None else environment_of(spec, os.environ)
    except MissingGPU as error:
        raise ConfigError(str(error)) from error
    paths, lock = join(cfg, composed.overrides, plan)
    if spec is None:
        print(f"nothing to prepare: model {cfg.model.name} has no warm start")
        return 0
    print(f"{spec.name} of the run in {paths.root}", flush=True)
    os.set_inheritable(lock.fd, True)  # the role holds the directory as long as it lives
    # The role is to end with the terminal or service manager that started it, which stays its parent.
    return os.execve(spec.argv[0], list(spec.argv), {**environment, SUPERVISOR: str(os.getppid())})


def _absent(role: str, replica: int, cfg: Config, plan: Sequence[ProcessSpec]) -> str:
    """Why the run has no such process, and which it has."""
    names = ", ".join(spec.name for spec in plan)
    if cfg.replay is not None:
        why = f"replay={cfg.replay} trains on recorded batches"
    elif role != "inference":
        why = f"it has {sum(spec.role == role for spec in plan)} of {role}"
    elif cfg.inference.base_url:
        why = f"inference.base_url={cfg.inference.base_url} names servers that run already"
    else:
        why = f"hardware.inference_replicas={cfg.hardware.inference_replicas}, counted from 0"
    what = f"inference server {replica}" if role == "inference" else f"{role} {replica}" if replica else role
    return f"the run has no {what}: {why}.\n  fix: its processes are {names}; start one of these"


def _replica(role: str, argv: list[str]) -> tuple[int, list[str]]:
    """Take `--replica N` out of the command line. Raises ConfigError where the role has none to choose from."""
    from rlx.config.errors import ConfigError

    if "--replica" not in argv:
        return 0, argv
    at = argv.index("--replica")
    value = argv[at + 1] if at + 1 < len(argv) else ""
    if role not in ("inference", "trainer"):
        raise ConfigError(f"--replica {value} chooses one of several servers or trainer ranks; there is one {role}.\n  fix: leave it out")
    if not value.isdigit():
        raise ConfigError(f"--replica is followed by the number of a process, not by {value!r}.\n  fix: --replica 0")
    return int(value), argv[:at] + argv[at + 2 :]
