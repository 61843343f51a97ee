"""`rlx doctor`: what may stop a run on this machine or on a compute node, each with its remedy."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.terminal import raw

if TYPE_CHECKING:
    from rlx.preflight.doctor import Finding

SUMMARY = "examine this machine, or a compute node: limits, disks, packages, GPUs, SLURM, hub"
MARKS = {"ok": "ok", "warning": "warning", "failed": "FAILED", "skipped": "-"}


def help_text() -> str:
    return f"""\
rlx doctor: {SUMMARY}.

usage: rlx doctor [--node] [--json] [GROUP=OPTION …] [key=value …]

  rlx doctor                                            this machine, for the default run
  rlx doctor model=qwen3_8b hardware=node8 env=math     this machine, for that run: its GPUs, memory, disk, model
  rlx doctor launcher=slurm slurm=my_cluster            this login node, and whether SLURM has what the cluster's YAML names
  rlx doctor --node slurm=my_cluster hardware=node8     a compute node: a job of a few minutes, submitted like a run

It takes the configuration of `rlx train`, starts no run and changes nothing. It writes 64 MiB to measure a disk, and deletes them.
FAILED: a run of this configuration will fail. warning: it starts, but may be slow or stop later. -: not used by this configuration.

exit codes: 0 nothing fails; 1 something fails; 2 the configuration is invalid"""


def run(argv: list[str]) -> int:
    from rlx.config.load import compose
    from rlx.plan.environment import hub_variables
    from rlx.preflight.doctor import FAILED, Examined, examine
    from rlx.preflight.hub import use_cache

    flags = {part for part in argv if part in ("--node", "--json")}
    overrides = [part for part in argv if part not in flags]
    if unknown := [part for part in overrides if part.startswith("--") and not part.startswith("--config")]:
        print(f"rlx doctor: there is no option {unknown[0]}. See rlx doctor --help.", file=sys.stderr)
        return 2
    if "--node" in flags and not any(part.startswith("launcher=") for part in overrides):
        overrides.append("launcher=slurm")
    composed = [*overrides, "dry_run=true"]  # so that the rules accept what this machine lacks; this command reports it
    cfg = compose(composed).cfg
    use_cache(hub_variables(cfg))  # before anything imports the hub's library
    found: list[Finding] = []
    if "--node" in flags:
        from rlx.preflight.doctor_node import on_a_node

        signal.signal(signal.SIGTERM, signal.default_int_handler)  # exit code 130, and the job is cancelled, as after Ctrl-C
        host, found = on_a_node(cfg, composed)
    else:
        from rlx.preflight.doctor_services import CHECKS

        host = socket.gethostname()
        examined = Examined(cfg=cfg, run_dir=Path(cfg.run.dir or "outputs"), here=cfg.launcher.name == "local")
        waits = sys.stderr.isatty()
        for each in examine(examined, CHECKS):
            found.append(each)
            if waits:
                print(f"\r{len(found)} of {len(CHECKS)} checks", end="", file=raw(sys.stderr), flush=True)
        if waits:
            print("\r" + " " * 30 + "\r", end="", file=raw(sys.stderr), flush=True)
    failed = sum(each.state == FAILED for each in found)
    if "--json" in flags:
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
        if each.remedy:
            lines.append(f"  {' ' * (width + 9)}  → {each.remedy}")
    counts = {state: sum(each.state == state for each in found) for state in ("failed", "warning", "ok", "skipped")}
    shown = f"{counts['failed']} failed, {counts['warning']} warnings, {counts['ok']} fine, {counts['skipped']} not used"
    return "\n".join([*lines, shown])
