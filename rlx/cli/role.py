"""`rlx prepare`, `inference`, `orchestrator`, `trainer`: run one role in the foreground.

It runs in a run directory that other roles may join.

The process becomes the role (exec), so output, signals and exit code are the role's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.config.schema import Config
    from rlx.plan.record import ProcessSpec


@dataclass(frozen=True)
class RoleCommand:
    """The command of one role, with what `rlx.cli` wants of a command's module."""

    role: str
    SUMMARY: str

    def help_text(self) -> str:
        return _help_text(self.role, self.SUMMARY)

    def run(self, argv: list[str]) -> int:
        """Become the role. Returns only if there is nothing to do."""
        return _run(self.role, argv)


PREPARE = RoleCommand("prepare", "make the run's initial model, if the configuration has a warm start")
INFERENCE = RoleCommand("inference", "serve the policy with vLLM")
ORCHESTRATOR = RoleCommand("orchestrator", "roll out the environments and send batches to the trainer")
TRAINER = RoleCommand("trainer", "train on the orchestrator's batches and publish weights")


def _help_text(role: str, summary: str) -> str:
    numbered = {
        "inference": "  --replica N            number of the server, below hardware.inference_replicas (default 0)\n",
        "trainer": "  --replica N            number of the rank, below the number of trainer processes (default 0)\n",
    }
    more = numbered.get(role, "")
    return f"""\
rlx {role}: {summary}.

usage: rlx {role} run.dir=PATH [GROUP=OPTION …] [key=value …]

  run.dir=PATH           the run directory that all roles of the run share; the first role creates it,
                         the others must give the same configuration
{more}
One run in four terminals:
  rlx prepare run.dir=outputs/mine
  rlx inference run.dir=outputs/mine
  rlx orchestrator run.dir=outputs/mine
  rlx trainer run.dir=outputs/mine
On several hosts, with a folder that all see: docs/cluster.md.
`rlx train --help` lists the groups and keys."""


def _run(role: str, argv: list[str]) -> int:
    from rlx.cli.command import check_nodes
    from rlx.config.checks.run import gpus_present
    from rlx.config.errors import ConfigError
    from rlx.config.gpus import visible_gpus
    from rlx.config.load import compose
    from rlx.plan.environment import MissingGPU, environment_of
    from rlx.plan.make import make_plan
    from rlx.preflight.probes import environments_of, lines_of
    from rlx.process import SUPERVISOR
    from rlx.runs.claim import join, settle
    from rlx.runs.provenance import begun_on

    replica, overrides = _replica(role, argv)
    composed = compose(overrides, without=[gpus_present])  # which is about all processes of the run, and others may be on other hosts
    if composed.cfg.run.dir is None and composed.cfg.run.name is None and role in ("orchestrator", "trainer") and not composed.cfg.dry_run:
        raise ConfigError(
            f"`rlx {role}` would wait for ever: in a directory of its own it meets no other role.\n"
            "  fix: run.dir=PATH, the same for all roles"
        )
    cfg = settle(composed.cfg, composed.label)
    assert cfg.run.dir is not None
    plan = make_plan(cfg, Path(cfg.run.dir))
    spec = next((spec for spec in plan if (spec.role, spec.replica) == (role, replica)), None)
    if spec is None and (role != "prepare" or cfg.replay is not None):
        raise ConfigError(_absent(role, replica, cfg, plan))
    if cfg.memory_folder is not None:
        raise ConfigError(
            f"weight_broadcast.folder={cfg.memory_folder} needs `rlx train`, which deletes what is left there when all roles have ended.\n"
            "  fix: use `rlx train`, or weight_broadcast.folder=null"
        )
    check_nodes(cfg, composed)
    environments = lines_of(environments_of([cfg])[0]) if role in ("orchestrator", "prepare") else []
    if cfg.dry_run:
        from rlx.plan.explain import explain

        print(explain(cfg, [spec] if spec else [], composed.choices, composed.notes, cfg.run.dir, environments))
        print("\ndry run: nothing was started")
        return 0
    if spec is not None and spec.gpus and max(spec.gpus) >= (visible := visible_gpus()):
        raise ConfigError(
            f"{spec.name} computes on GPU {', '.join(map(str, spec.gpus))} of its host (counted from 0), and the number of GPUs visible "
            f"here is {visible}.\n  fix: start it on a host that has them, or choose a smaller hardware= than {cfg.hardware.name}"
        )
    try:
        environment = {} if spec is None else environment_of(spec, os.environ)
    except MissingGPU as error:
        raise ConfigError(str(error)) from error
    paths, lock = join(cfg, composed.overrides, plan)
    if spec is None:
        print(f"nothing to prepare: model {cfg.model.name} is loaded as it is: model.warm_start is not set")
        return 0
    print(f"{spec.name} of the run in {paths.root}", flush=True)
    os.set_inheritable(lock.fd, True)  # the role holds the directory's lock while it is alive
    # The terminal or service manager stays the role's parent, so the role must die with it.
    return os.execve(spec.argv[0], list(spec.argv), {**environment, **begun_on(paths), SUPERVISOR: str(os.getppid())})


def _absent(role: str, replica: int, cfg: Config, plan: Sequence[ProcessSpec]) -> str:
    """The error text for a process that the plan does not have."""
    names = ", ".join(spec.name for spec in plan)
    if cfg.replay is not None:
        why = f"replay={cfg.replay} trains on recorded batches"
    elif cfg.measured in ("trainer", "inference"):
        why = f"a benchmark (bench=true bench_role={cfg.bench_role}) measures one role alone"
        return f"the run has no {role}: {why}.\n  fix: its processes are {names}; rlx train starts all of them, with these keys"
    elif role != "inference":
        why = f"the number of {role} processes is {sum(spec.role == role for spec in plan)}"
    elif cfg.inference.base_url:
        why = f"inference.base_url={cfg.inference.base_url} names servers that are already running"
    else:
        why = f"hardware.inference_replicas={cfg.hardware.inference_replicas}, counted from 0"
    what = f"inference server {replica}" if role == "inference" else f"{role} {replica}" if replica else role
    return f"the run has no {what}: {why}.\n  fix: its processes are {names}; start one of these"


def _replica(role: str, argv: list[str]) -> tuple[int, list[str]]:
    """Split `--replica N` from the command line. Raises ConfigError if the role has only one process."""
    from rlx.config.errors import ConfigError

    if "--replica" not in argv:
        return 0, argv
    at = argv.index("--replica")
    value = argv[at + 1] if at + 1 < len(argv) else ""
    if role not in ("inference", "trainer"):
        raise ConfigError(f"--replica {value} selects a server or a trainer rank, but there is one {role}.\n  fix: omit --replica")
    if not value.isdigit():
        raise ConfigError(f"--replica needs the number of a process, not {value!r}.\n  fix: --replica 0")
    return int(value), argv[:at] + argv[at + 2 :]
