"""The rules for jobs of a SLURM cluster and their containers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from rlx.config.rules import Rule, Show, check_of, problem, table
from rlx.config.schema import CommandConfig
from rlx.config.tree import Problem

NOT_FOR_SBATCH = {  # an option of sbatch that would break the run -> what sets it, or why it cannot be set
    "array": "a sweep (-m) is one array; launcher.array_parallelism limits it",
    "clusters": "submit on a login node of the other cluster",
    **dict.fromkeys(("error", "output", "open-mode"), "rlx shows the job's output as logs/attempt_N/job.log"),
    **dict.fromkeys(("export", "export-file"), "all processes need the variables of the shell that submits; slurm.setup sets others"),
    "gpus": "it counts the GPUs of the whole job; write gpus-per-node",
    "het-group": "all hosts of a run are alike: hardware.nodes",
    "input": "no process of a job reads its standard input",
    "no-kill": "a job whose host has failed must end, because that is how it comes back on other hosts",
    "no-requeue": "after the notice before its end a job goes back into the queue; launcher.max_requeues limits how often",
    "nodes": "hardware.nodes sets it",
    **dict.fromkeys(("ntasks", "ntasks-per-gpu", "ntasks-per-node"), "the supervisor is the job's one task"),
    **dict.fromkeys(("parsable", "quiet"), "rlx reads the job's id from sbatch's usual answer"),
    "signal": "slurm.signal_seconds sets it",
    "test-only": "dry_run=true submits nothing",
    "time": "slurm.time_minutes sets it",
    "wait": "launcher.wait=true waits for the run",
    "wrap": "rlx writes the script",
}
VARIABLES = {"array": "SBATCH_ARRAY_INX", "time": "SBATCH_TIMELIMIT"} | {
    name: f"SBATCH_{name.replace('-', '_').upper()}"
    for name in ("clusters", "error", "export", "gpus", "input", "no-kill", "no-requeue", "open-mode", "output", "signal", "wait")
}
"""Variables that sbatch reads as these options. They win over the script, and some sites set them for everybody."""
RUNTIMES = ("apptainer", "singularity", "enroot", "podman", "docker", "shifter")
APART = {"--pid", "-p", "--containall", "-C"}  # options of Apptainer that give a container its own process ids


def _on_slurm(cfg: CommandConfig) -> bool:
    return cfg.launcher.name == "slurm"


SLURM: list[Rule[CommandConfig]] = [
    Rule(
        "launcher.name",
        lambda c: _on_slurm(c) and not c.dry_run and not all(map(shutil.which, ("sbatch", "srun", "squeue", "scontrol"))),
        "the commands of a SLURM cluster (sbatch, srun, squeue, scontrol) cannot be found here",
        "run the command on a login node, or dry_run=true to see what would be submitted",
    ),
    Rule(
        "hardware.gpus_per_node slurm.gpus_per_node",
        lambda c: _on_slurm(c) and c.num_gpus and c.slurm.gpus_per_node is not None and c.hardware.gpus_per_node > c.slurm.gpus_per_node,
        "the layout needs more GPUs per host than the cluster's nodes have",
        "another hardware=, or another slurm=",
    ),
    Rule(
        "launcher.preempt_grace launcher.grace slurm.signal_seconds",
        lambda c: _on_slurm(c) and c.launcher.preempt_grace + c.launcher.grace >= c.slurm.signal_seconds,
        "SLURM would kill the job before it can stop by itself",
        "a larger slurm.signal_seconds or a smaller launcher.preempt_grace",
    ),
    Rule(
        "slurm.signal_seconds slurm.time_minutes",
        lambda c: _on_slurm(c) and c.slurm.signal_seconds >= 60 * c.slurm.time_minutes,
        "the signal before the time limit would come before the job starts",
        "a larger slurm.time_minutes or a smaller slurm.signal_seconds",
    ),
    Rule(
        "slurm.container.options",
        lambda c: _on_slurm(c) and c.slurm.container and APART.intersection(c.slurm.container.options),
        "the job's script could not signal the supervisor, which would have process ids of its own",
        "leave out --pid and --containall",
    ),
    Rule(
        "slurm.prefix slurm.container.image",
        lambda c: _on_slurm(c) and c.slurm.container and any(word.rpartition("/")[2] in RUNTIMES for word in c.slurm.prefix),
        "one container in another",
        "leave one",
    ),
]
table(CommandConfig, SLURM)


@check_of(CommandConfig)
def options_of_sbatch(cfg: CommandConfig, of: Show) -> Iterator[Problem]:
    if not _on_slurm(cfg):
        return
    for name, value in cfg.slurm.options.items():
        known = name.replace("_", "-")
        # sbatch takes the beginning of a long name, too.
        bad = next((each for each in sorted(NOT_FOR_SBATCH) if each.startswith(known)), None)
        if len(known) == 1 or name.startswith("-"):
            yield problem("options of sbatch are given by their long names, without dashes", [f"slurm.options.{name}"], "sbatch --help", of)
        elif known.startswith("container"):
            yield problem("the job's script would run in a container, without SLURM", [f"slurm.options.{name}"], "slurm.container", of)
        elif bad and (bad != "export" or not _exports_all(value)):
            yield problem(f"sbatch's {bad} would break the run", [f"slurm.options.{name}"], f"leave it out: {NOT_FOR_SBATCH[bad]}", of)
    for name, variable in VARIABLES.items():
        value = os.environ.get(variable)
        if value is not None and (name != "export" or not _exports_all(value)):
            yield Problem(f"sbatch's {name} would break the run: the variable {variable}={value}.\n  fix: unset it: {NOT_FOR_SBATCH[name]}")


def _exports_all(value: object) -> bool:
    """Whether a value of `export` leaves all variables to the job: `ALL`, or `ALL,NAME=VALUE`."""
    return str(value).partition(",")[0] == "ALL"
