"""What the commands of single roles share: one role of a run, in the foreground, in a run directory that others may join.

The process becomes the role: what the role prints, how it is stopped and its exit code are its own.
"""

from __future__ import annotations

import os
from pathlib import Path


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
    from rlx.plan.rl import make_plan, visible_gpus
    from rlx.process import SUPERVISOR
    from rlx.runs.claim import join, settle

    replica, overrides = _replica(argv)
    composed = compose(overrides)
    cfg = settle(composed.cfg, composed.label)
    assert cfg.run.dir is not None
    plan = make_plan(cfg, Path(cfg.run.dir), visible_gpus())
    spec = next((spec for spec in plan if (spec.role, spec.replica) == (role, replica)), None)
    if spec is None and role == "inference":
        why = (
            f"inference.base_url={cfg.inference.base_url} names servers that run already"
            if cfg.inference.base_url
            else f"hardware.inference_replicas={cfg.hardware.inference_replicas}, counted from 0"
        )
        raise ConfigError(f"the run has no inference server {replica}: {why}.\n  fix: leave the one or the other out")
    if cfg.dry_run:
        from rlx.plan.explain import explain

        print(explain(cfg, [spec] if spec else [], composed.choices, composed.notes, cfg.run.dir))
        print("\ndry run: nothing was started")
        return 0
    paths, lock = join(cfg, composed.overrides, plan)
    if spec is None:
        print(f"nothing to prepare: model {cfg.model.name} has no warm start")
        return 0
    print(f"{spec.name} of the run in {paths.root}", flush=True)
    os.set_inheritable(lock.fd, True)  # the role holds the directory as long as it lives
    # The role is to end with the terminal or service manager that started it, which stays its parent.
    return os.execve(spec.argv[0], list(spec.argv), {**os.environ, **spec.env, SUPERVISOR: str(os.getppid())})


def _replica(argv: list[str]) -> tuple[int, list[str]]:
    """Take `--replica N` out of the command line."""
    from rlx.config.errors import ConfigError

    if "--replica" not in argv:
        return 0, argv
    at = argv.index("--replica")
    value = argv[at + 1] if at + 1 < len(argv) else ""
    if not value.isdigit():
        raise ConfigError(f"--replica is followed by the number of a server, not by {value!r}.\n  fix: --replica 0")
    return int(value), argv[:at] + argv[at + 2 :]
