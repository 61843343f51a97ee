"""`rlx train`: compose, check, plan, launch, and follow the run until it ends."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.runs.status import Cause

SUMMARY = "train a policy: all roles, on this machine or a SLURM cluster"


def help_text() -> str:
    from rlx.cli.help import groups, keys

    return f"""\
rlx train: {SUMMARY}.

usage: rlx train [GROUP=OPTION …] [key=value …]        same as: python train.py …

  rlx train                                             the default: a tiny model learns to reverse words on a CPU
  rlx train loss=gspo env=sums seed=1                   another objective, environment and seed
  rlx train env=[sums,reverse_text] max_steps=80        a mix of two environments
  rlx train loss=gspo env=math model=qwen3_8b hardware=node8 dry_run=true
                                                        show what would run where and what it needs; start nothing
  rlx train -m loss=grpo,gspo seed=1,2,3                six runs, one after the other; with launcher=slurm one job array
  rlx train -m sweeps=losses                            the sweep of the file sweeps/losses.yaml
  rlx train launcher=slurm slurm=my_cluster hardware=node8
                                                        a job on a cluster: docs/slurm.md
  rlx train run.name=mine resume=latest                 resume outputs/mine from its newest checkpoint
  rlx train resume=outputs/mine max_steps=200           a new run, from the newest checkpoint of outputs/mine
  rlx train --config-dir DIR --config-name config       the saved configuration of another run

groups (from `conf/`, `slurm/` and `sweeps/`; with --config-dir also from your own directory)
{groups()}

some keys (all of them: docs/configuration.md)
{keys()}

exit codes: 0 done; 1 a role failed; 2 the configuration is invalid and nothing was started; 75 preempted; 130 interrupted"""


def run(argv: list[str]) -> int:
    from rlx.config.errors import ConfigError
    from rlx.config.load import compose
    from rlx.config.sweeps import is_sweep
    from rlx.config.targets import must_be_built
    from rlx.launch.chats import check_chats
    from rlx.launch.probes import environments_of, lines_of
    from rlx.plan.place import require_one_host
    from rlx.plan.rl import make_plan
    from rlx.runs.claim import create, settle, write_description

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # exit code 130, as after Ctrl-C
    if is_sweep(argv):
        from rlx.cli import sweep

        return sweep.run(argv)
    composed = compose(argv)
    cfg = settle(composed.cfg, composed.label)
    assert cfg.run.dir is not None
    plan = make_plan(cfg, Path(cfg.run.dir))
    if cfg.launcher.name == "local":
        require_one_host(plan)
    else:
        from rlx.launch.slurm import check_directory

        check_directory(Path(cfg.run.dir))
    if not cfg.dry_run and (cfg.launcher.name == "slurm" or must_be_built(cfg, composed.origins)):
        from rlx.train.nodes import check_built

        check_built(cfg)
    (found,) = environments_of([cfg])
    check_chats([cfg], [found])
    environments = lines_of(found)
    if cfg.dry_run:
        from rlx.config.load import to_yaml
        from rlx.plan.explain import explain

        print(to_yaml(cfg), end="\n")
        explained = explain(cfg, plan, composed.choices, composed.notes, cfg.run.dir, environments)
        print(explained)
        script = None
        if cfg.launcher.name == "slurm":
            from rlx.launch.slurm import FOLDER, sbatch_script

            script = sbatch_script(cfg, str(cfg.run.name), Path(cfg.run.dir) / FOLDER)
            print("\nsbatch script\n" + "".join(f"  {line}\n" for line in script.splitlines()), end="")
        try:
            written = write_description(cfg, composed.overrides, plan, script, explained)
            print(f"\nwritten to {written.root}" if written else f"\nnot written: {cfg.run.dir} holds a run")
        except ConfigError as error:
            if composed.cfg.run.dir or composed.cfg.run.name:
                raise
            print(f"\nnot written: {error}")
        print("\ndry run: nothing was started")
        return 0
    for note in [*composed.notes, *(f"environment {line}" for line in environments)]:
        print(note, flush=True)
    paths, lock = create(cfg, composed.overrides, plan)

    from rlx.cli.console import Console
    from rlx.runs.status import read_status

    if cfg.launcher.name == "slurm":
        from rlx.launch.follow import follow
        from rlx.launch.slurm import FOLDER, submit

        try:
            (job,) = submit([(paths, cfg)], paths.root.name, paths.root / FOLDER)
        except RuntimeError as error:
            print(f"rlx: {error}", file=sys.stderr)
            return 1
        finally:
            lock.close()  # the job owns the directory now, and its id is recorded
        print(f"job {job}: {paths.root}")
        if not cfg.launcher.wait:
            print(f"  state    squeue -j {job}; {paths.status}\n  stop     scancel {job}")
            return 0
        exit_code = follow(paths, job, Console(paths.root, cfg, argv))
    else:
        from rlx.launch.local import launch
        from rlx.launch.supervisor import Limits

        exit_code = launch(paths, Limits.of(cfg), lock, Console(paths.root, cfg, argv))
    status = read_status(paths)
    if status is not None and status.cause is not None:
        print(failure(status.cause, paths.root), file=sys.stderr)
    return exit_code


def failure(cause: Cause, root: Path) -> str:
    """The message about a failure, with the last lines of the process's log."""
    name = f"{cause.role}_{cause.replica}" if cause.role == "inference" else cause.role
    lines = [f"{name} failed: {cause.reason}"]
    if cause.last_lines:
        lines += [f"last lines of {root / cause.log}:", *(f"  | {line}" for line in cause.last_lines)]
    else:
        lines.append(f"its log {root / cause.log} is empty")
    return "\n".join([*lines, "all other processes were stopped"])
