"""`rlx sft`: supervised fine-tuning, with the trainer of `rlx train`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.cli.command import Command
    from rlx.config.schema import SftRoot

SUMMARY = "fine-tune a model on prompts and answers, or on conversations"


def help_text() -> str:
    from rlx.cli.help import groups

    return f"""\
rlx sft: {SUMMARY}.

usage: rlx sft data.name=DATA [GROUP=OPTION …] [key=value …]

  rlx sft data.name=data.jsonl model=smollm2_135m       rows with `messages`, or with `prompt` and `completion`
  rlx sft data.name=folder val.name=held_out.jsonl val.interval=20
                                                        all JSONL and Parquet files of a folder; validation every 20 steps
  rlx sft +data.sets.a.name=a.jsonl +data.sets.b.name=b.parquet data.sets.b.weight=3
                                                        two data sets; three of four rows come from b
  rlx sft data.name=owner/name data.split=train[:90%] model=qwen3_8b hardware=node8 dry_run=true
                                                        a data set on the hub; show what would run, start nothing
  rlx sft data.name=data.jsonl -m optim.lr=1e-5,3e-5    two runs
  rlx sft data.name=data.jsonl env=reverse_text eval.interval=20
                                                        evaluate every 20 steps, beside training, on a server of its own
  rlx sft bench=true data=fake data.length=variable model=qwen3_0_6b
                                                        the trainer's speed, MFU and memory on random tokens
  rlx sft run.name=mine resume=latest data.name=data.jsonl
                                                        resume outputs/mine from its newest checkpoint
  rlx train model=smollm2_135m model.name=outputs/mine/weights/step_100
                                                        reinforcement learning from the result

groups (from `conf/`, `slurm/` and `sweeps/`; with --config-dir also from your own directory)
{groups()}

all keys: docs/configuration.md; data and masks: docs/sft.md

exit codes: 0 done; 1 a role failed; 2 the configuration is invalid and nothing was started; 75 preempted; 130 interrupted"""


def run(argv: list[str]) -> int:
    from rlx.cli.start import run as start

    return start(argv, command())


def command() -> Command:
    """The command, for `rlx.cli.start`."""
    from rlx.cli.command import Command
    from rlx.cli.console_bench import BenchConsole
    from rlx.cli.console_sft import SftConsole
    from rlx.config.roots import SFT

    return Command(SFT, lambda run_dir, cfg, argv: (BenchConsole if cfg.bench else SftConsole)(run_dir, cfg, argv), resolve)


def resolve(cfg: SftRoot) -> SftRoot:
    """The configuration with absolute paths of data sets. Raises ConfigError if one cannot be read."""
    from dataclasses import replace

    from rlx.config.errors import ConfigError
    from rlx.preflight.rows import absolute, check_rows

    try:
        val = replace(cfg.val, name=cfg.val.name and absolute(cfg.val.name))
        cfg = replace(cfg, data=cfg.data.with_sets(absolute), val=val)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for line in check_rows(cfg):
        print(line, flush=True)
    return cfg
