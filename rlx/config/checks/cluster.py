"""The rules for jobs of a SLURM cluster and their containers."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

from rlx.config.rules import Show, rule
from rlx.config.schema import CommandConfig

NOT_FOR_SBATCH = {  # an option of sbatch that would break the run -> what sets it, or why it cannot be set
    "array": "A sweep (-m) is one array; launcher.array_parallelism limits it",
    "clusters": "rlx asks the cluster of this login node for its jobs; submit on a login node of the other one",
    "error": "rlx shows the job's output as logs/attempt_N/job.log",
    "export": "All processes need the variables of the shell that submits (caches, secrets); slurm.setup sets and unsets others",
    "export-file": "All processes need the variables of the shell that submits (caches, secrets); slurm.setup sets and unsets others",
    "gpus": "It counts the GPUs of the whole job, and srun would ask for as many for each process; write gpus-per-node",
    "het-group": "All hosts of a run are alike: hardware.nodes",
    "input": "No process of a job reads its standard input",
    "no-kill": "A job whose host has failed must end, because that is how it comes back on other hosts",
    "no-requeue": "After the notice before its end a job goes back into the queue; launcher.max_requeues limits how often",
    "nodes": "hardware.nodes sets it",
    "ntasks": "The supervisor is the job's one task",
    "ntasks-per-gpu": "The supervisor is the job's one task",
    "ntasks-per-node": "The supervisor is the job's one task",
    "open-mode": "rlx shows the job's output as logs/attempt_N/job.log",
    "output": "rlx shows the job's output as logs/attempt_N/job.log",
    "parsable": "rlx reads the job's id from sbatch's usual answer",
    "quiet": "rlx reads the job's id from sbatch's usual answer",
    "signal": "slurm.signal_seconds sets it",
    "test-only": "dry_run=true submits nothing",
    "time": "slurm.time_minutes sets it",
    "wait": "launcher.wait=true waits for the run",
    "wrap": "rlx writes the script",
}
LETTERS = {
    "G": "gpus",
    "M": "clusters",
    "N": "nodes",
    "Q": "quiet",
    "W": "wait",
    "a": "array",
    "e": "error",
    "i": "input",
    "k": "no-kill",
    "n": "ntasks",
    "o": "output",
    "t": "time",
}
"""The short names of those options."""
TIMES = ("begin", "deadline", "time-min")
VARIABLES = {"array": "SBATCH_ARRAY_INX", "time": "SBATCH_TIMELIMIT"} | {
    name: f"SBATCH_{name.replace('-', '_').upper()}"
    for name in ("clusters", "error", "export", "gpus", "input", "no-kill", "no-requeue", "open-mode", "output", "signal", "wait")
}
"""Variables that sbatch reads as these options. They win over the script, and some sites set them for everybody."""
RUNTIMES = ("apptainer", "singularity", "enroot", "podman", "docker", "shifter")
APART = ("--pid", "-p", "--containall", "-C")  # options of Apptainer that give a container its own process ids
ACTIVATES = re.compile(r"\bbin/activate\b|\b(conda|mamba|micromamba)\s+activate\b")  # a Python of the host


@rule("hardware", "launcher", "slurm", "dry_run")
def slurm_cluster(cfg: CommandConfig, of: Show) -> Iterator[str]:
    if cfg.launcher.name != "slurm":
        return
    missing = [command for command in ("sbatch", "srun", "squeue", "scontrol") if shutil.which(command) is None]
    if missing and not cfg.dry_run:
        yield (
            f"launcher=slurm needs the commands of a SLURM cluster, but {', '.join(missing)} cannot be found here.\n"
            "Run the command on a login node, or use dry_run=true to see what would be submitted."
        )
    yield from _options(cfg, of)
    if cfg.slurm.gpus_per_node is not None and cfg.hardware.device == "cuda" and cfg.hardware.gpus_per_node > cfg.slurm.gpus_per_node:
        yield (
            f"the layout needs more GPUs per host than the cluster's nodes have: {of('hardware.gpus_per_node')} > "
            f"{of('slurm.gpus_per_node')}.\nChoose another hardware=, or another slurm=."
        )
    if cfg.launcher.preempt_grace + cfg.launcher.grace >= cfg.slurm.signal_seconds:
        yield (
            f"SLURM would kill the job before it can stop by itself: {of('launcher.preempt_grace')} + {of('launcher.grace')} seconds "
            f"are not less than {of('slurm.signal_seconds')}.\nRaise slurm.signal_seconds or lower launcher.preempt_grace."
        )
    if cfg.slurm.signal_seconds >= 60 * cfg.slurm.time_minutes:
        yield (
            f"the signal before the time limit would come before the job starts: {of('slurm.signal_seconds')} seconds are not less than "
            f"{of('slurm.time_minutes')} minutes.\nRaise slurm.time_minutes or lower slurm.signal_seconds."
        )


def _options(cfg: CommandConfig, of: Show) -> Iterator[str]:
    for name, value in cfg.slurm.options.items():
        shown, known = of(f"slurm.options.{name}"), name.replace("_", "-").lstrip("-")
        known = LETTERS.get(known, known)
        # sbatch takes the beginning of a long name, too; a letter that is left is an option of its own.
        bad = next((each for each in sorted(NOT_FOR_SBATCH) if len(known) > 1 and each.startswith(known)), None)
        if bad and (bad != "export" or not _exports_all(value)):
            yield f"sbatch's option {bad} would break the run: {shown}.\n{NOT_FOR_SBATCH[bad]}. Remove it."
        elif name.startswith("-"):
            yield f"options of sbatch are named without dashes in front: {shown}. Write {known}."
        elif len(known) == 1:
            yield f"options of sbatch are given by their long names: {shown}. `sbatch --help` lists both."
        elif isinstance(value, list | tuple | dict):
            yield f"an option of sbatch has one text: {shown}. Write it as sbatch takes it, such as {known}: 'a,b'."
        elif known in TIMES and isinstance(value, int | float) and value >= 60:  # YAML makes no less of hours and minutes
            yield (
                f"this option of sbatch is a time, and YAML reads 16:00 as the number 960: {shown}.\n"
                f"Quote it, as sbatch reads it: {known}: '16:00', or '{value}' for minutes; on the command line "
                f"slurm.options.{known}=\\'16:00\\'."
            )
        elif value is False:
            yield f"an option of sbatch cannot be false: {shown}. Write null, which takes the line out."
    for name, variable in VARIABLES.items():
        value = os.environ.get(variable)
        if value is not None and (name != "export" or not _exports_all(value)):
            read = f"sbatch reads the variable {variable}={value} as its option {name}"
            yield f"{read}, which would break the run.\n{NOT_FOR_SBATCH[name]}. Unset it."


def _exports_all(value: object) -> bool:
    """Whether a value of `export` leaves all variables to the job: `ALL`, or `ALL,NAME=VALUE`."""
    return str(value).partition(",")[0] == "ALL"


@rule("launcher", "slurm")
def slurm_container(cfg: CommandConfig, of: Show) -> Iterator[str]:
    its, slurm = cfg.slurm.container, cfg.slurm
    if its is None or cfg.launcher.name != "slurm":
        return
    if not its.python.startswith("/"):
        yield f"the Python in the container must be an absolute path: {of('slurm.container.python')}. Correct it: /opt/venv/bin/python."
    for mount in its.mounts:
        parts = mount.split(":")
        if "," in mount or len(parts) > 3 or not all(part.startswith("/") for part in parts[:2]) or parts[2:] not in ([], ["ro"], ["rw"]):
            yield (
                f"{mount} is no mount: {of('slurm.container.mounts')}.\n"
                "Write /SOURCE, /SOURCE:/TARGET or /SOURCE:/TARGET:ro, one in each element of the list."
            )
    if apart := [option for option in its.options if option in APART]:
        yield (
            f"the job's script could not signal the supervisor, which would have process ids of its own: {of('slurm.container.options')}. "
            f"Remove {apart[0]}."
        )
    for line in slurm.setup:
        if ACTIVATES.search(line):
            yield (
                f"a line of the set-up activates a Python of the host, and the processes run with that of the container: `{line}` in "
                f"slurm.setup, {of('slurm.container.python')}.\nRemove the line, or the container."
            )
    if words := [word for word in slurm.prefix if word.rpartition("/")[2] in RUNTIMES]:
        yield f"one container in another: {of('slurm.prefix')}, {of('slurm.container.image')}. Remove {words[0]} from the first."
    for name in slurm.options:
        if name.replace("_", "-").startswith("container"):
            yield (
                f"sbatch's option {name} would put the whole job's script into a container, where SLURM's commands are missing: "
                f"{of(f'slurm.options.{name}')}.\nUse slurm.container."
            )
