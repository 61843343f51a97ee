"""`rlx train`: compose, check, plan, launch, and follow the run until it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rlx.cli.command import Command
    from rlx.cli.console import Console
    from rlx.config.schema import Config

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
  rlx train bench=true model=qwen3_0_6b bench_length=variable
                                                        the trainer's speed, MFU and memory on random tokens
  rlx train bench=true bench_role=rl                    the same of the whole run; bench_role=inference: of the servers alone
  rlx train -m loss=grpo,gspo seed=1,2,3                six runs, one after the other; with launcher=slurm one job array
  rlx train -m sweeps=losses                            the sweep of the file sweeps/losses.yaml
  rlx train launcher=slurm slurm=my_cluster hardware=node8
                                                        a job on a cluster: docs/slurm.md
  rlx train run.name=mine resume=latest                 resume outputs/mine from its newest checkpoint
  rlx train resume=outputs/mine max_steps=200           a new run, from the newest checkpoint of outputs/mine
  rlx train run.name=host trainer.max_concurrent_runs=2 lora.rank=16
                                                        a trainer for the adapters of several runs: docs/many_runs.md
  rlx train --config-dir DIR --config-name config       the saved configuration of another run

groups (from `conf/`, `slurm/` and `sweeps/`; with --config-dir also from your own directory)
{groups()}

some keys (all of them: docs/configuration.md)
{keys()}

exit codes: 0 done; 1 a role failed; 2 the configuration is invalid and nothing was started; 75 preempted; 130 interrupted"""


def run(argv: list[str]) -> int:
    from rlx.cli.start import run as start

    return start(argv, command())


def command() -> Command:
    """The command, for `rlx.cli.start`."""
    from rlx.cli.command import Command
    from rlx.config.roots import TRAIN

    def display(run_dir: Path, cfg: Config, argv: Sequence[str]) -> Console:
        from rlx.cli.console import Console  # a dry run needs none
        from rlx.cli.console_bench import BenchConsole
        from rlx.cli.console_shared import SharedConsole

        return (BenchConsole if cfg.bench else SharedConsole if cfg.hosts else Console)(run_dir, cfg, argv)

    return Command(TRAIN, display)
