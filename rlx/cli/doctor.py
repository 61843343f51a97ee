"""`rlx doctor`: what may stop a run on this machine, each with its remedy."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.preflight.doctor import Finding

SUMMARY = "examine this machine: packages, GPUs, limits, disks, memory, SLURM, hub"
MARKS = {"failed": "FAILED", "warning": "warning", "ok": "ok", "skipped": "-"}


def help_text() -> str:
    return f"""\
rlx doctor: {SUMMARY}.

usage: rlx doctor [--json] [GROUP=OPTION …] [key=value …]

  rlx doctor                                            this machine, for the default run
  rlx doctor model=qwen3_8b hardware=node8 env=math     this machine, for that run: its GPUs, memory, disk, model
  rlx doctor launcher=slurm slurm=my_cluster            this login node, and whether SLURM has what the cluster's YAML names
  srun --partition=NAME --gpus=8 rlx doctor hardware=node8
                                                        a compute node

It takes the configuration of `rlx train`, starts no run and changes nothing.
FAILED: a run of this configuration will fail. warning: it starts, but may be slow or stop later. -: not used by this configuration.

exit codes: 0 nothing fails; 1 something fails; 2 the configuration is invalid"""


def run(argv: list[str]) -> int:
    from rlx.config.load import compose
    from rlx.plan.environment import hub_variables
    from rlx.preflight import doctor
    from rlx.preflight.hub import use_cache

    overrides = [part for part in argv if part != "--json"]
    cfg = compose([*overrides, "dry_run=true"]).cfg  # so that the rules accept what this machine lacks; this command reports it
    use_cache(hub_variables(cfg))  # before anything imports the hub's library
    found, host = list(doctor.examine(cfg, doctor.CHECKS)), socket.gethostname()
    failed = sum(each.state == doctor.FAILED for each in found)
    if "--json" in argv:
        print(json.dumps({"host": host, "failed": failed, "findings": [asdict(each) for each in found]}, indent=1))
    else:
        print(table(host, found))
    return 1 if failed else 0


def table(host: str, found: Iterable[Finding]) -> str:
    """The findings for people: one line each, and below it the remedy of what is wrong."""
    found = list(found)
    width = max(len(each.name) for each in found)
    lines = [f"{host}, for the configuration that was given"]
    for each in found:
        lines.append(f"  {MARKS[each.state].ljust(8)} {each.name.ljust(width)}  {each.found}")
        lines += [f"  {' ' * (width + 9)}  → {each.remedy}"] if each.remedy else []
    counts = [f"{sum(each.state == state for each in found)} {state}" for state in MARKS]
    return "\n".join([*lines, ", ".join(counts)])
