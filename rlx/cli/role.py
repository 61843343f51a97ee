"""`rlx prepare`, `inference`, `orchestrator`, `trainer`: run one role in the foreground.

It runs in a run directory that other roles may join.

The process becomes the role (exec), so output, signals and exit code are the role's own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RoleCommand:
    """The command of one role, with what `rlx.cli` wants of a command's module."""

    role: str
    SUMMARY: str

    def help_text(self) -> str:
        return f"""\
rlx {self.role}: {self.SUMMARY}.

usage: rlx {self.role} run.dir=PATH [--replica N] [GROUP=OPTION …] [key=value …]

  run.dir=PATH           the run directory that all roles of the run share; the first role creates it,
                         the others must give the same configuration
  --replica N            number of the inference server or the trainer's rank (default 0)

One run in four terminals:
  rlx prepare run.dir=outputs/mine
  rlx inference run.dir=outputs/mine
  rlx orchestrator run.dir=outputs/mine
  rlx trainer run.dir=outputs/mine
On several hosts, with a folder that all see: docs/cluster.md.
`rlx train --help` lists the groups and keys."""

    def run(self, argv: list[str]) -> int:
        """Become the role. Returns only if there is nothing to do."""
        return _run(self.role, argv)


PREPARE = RoleCommand("prepare", "make the run's initial model, if the configuration has a warm start")
INFERENCE = RoleCommand("inference", "serve the policy with vLLM")
ORCHESTRATOR = RoleCommand("orchestrator", "roll out the environments and send batches to the trainer")
TRAINER = RoleCommand("trainer", "train on the orchestrator's batches and publish weights")


def _run(role: str, argv: list[str]) -> int:
    from rlx.cli.arguments import Parser
    from rlx.cli.start import check_nodes
    from rlx.config.checks.run import gpus_present
    from rlx.config.errors import ConfigError
    from rlx.config.gpus import visible_gpus
    from rlx.config.load import compose
    from rlx.plan.environment import environment_of
    from rlx.plan.make import make_plan
    from rlx.preflight.env_probe import environments_of, lines_of
    from rlx.process import SUPERVISOR
    from rlx.runs.provenance import begun_on
    from rlx.runs.run_dir import join, resolve_run_dir

    parser = Parser(role)
    parser.add_argument("--replica", type=int, default=0)
    given, overrides = parser.parse_known_args(argv)
    composed = compose(overrides, without=[gpus_present])  # which is about all processes of the run, and others may be on other hosts
    if role in ("orchestrator", "trainer") and composed.cfg.run.dir is None and composed.cfg.run.name is None:
        raise ConfigError(
            f"`rlx {role}` would wait for ever: in a directory of its own it meets no other role.\n"
            "  fix: run.dir=PATH, the same for all roles"
        )
    cfg = resolve_run_dir(composed.cfg, composed.label)
    root = str(cfg.run.dir)
    plan = make_plan(cfg, Path(root))
    spec = next((spec for spec in plan if (spec.role, spec.replica) == (role, given.replica)), None)
    if spec is None and (role != "prepare" or cfg.replay is not None):
        raise ConfigError(
            f"the run has no {role} {given.replica}; its processes are {', '.join(spec.name for spec in plan)}.\n  fix: start one of these"
        )
    if cfg.memory_folder is not None:
        raise ConfigError(
            f"weight_broadcast.folder={cfg.memory_folder} needs `rlx train`, which deletes what is left there when all roles have ended.\n"
            "  fix: use `rlx train`, or weight_broadcast.folder=null"
        )
    check_nodes(cfg, composed)
    environments = lines_of(environments_of([cfg])[0]) if role in ("orchestrator", "prepare") else []
    if cfg.dry_run:
        from rlx.plan.explain import explain

        print(explain(cfg, [spec] if spec else [], composed.choices, composed.notes, root, environments))
        print("\ndry run: nothing was started")
        return 0
    if spec is not None and spec.gpus and max(spec.gpus) >= (visible := visible_gpus()):
        raise ConfigError(
            f"{spec.name} computes on GPU {', '.join(map(str, spec.gpus))} of its host (counted from 0), and the number of GPUs visible "
            f"here is {visible}.\n  fix: start it on a host that has them, or choose a smaller hardware= than {cfg.hardware.name}"
        )
    environment = {} if spec is None else environment_of(spec, os.environ)
    paths, lock = join(cfg, composed.overrides, plan, composed.origins.files)
    if spec is None:
        print(f"nothing to prepare: model {cfg.model.name} is loaded as it is: model.warm_start is not set")
        return 0
    print(f"{spec.name} of the run in {paths.root}", flush=True)
    os.set_inheritable(lock.fd, True)  # the role holds the directory's lock while it is alive
    # The terminal or service manager stays the role's parent, so the role must die with it.
    return os.execve(spec.argv[0], list(spec.argv), {**environment, **begun_on(paths), SUPERVISOR: str(os.getppid())})
