"""`rlx synthesize`: play environments with a model, and write what is worth learning as supervised data."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.cli.command import Command

SUMMARY = "make training data: play environments with a model, keep what scored well"
KEYS = (
    *("num_examples", "rollouts_per_example", "min_reward", "max_reward", "prefer", "per_example", "exactly", "duplicates"),
    *("drop_failed", "drop_truncated", "format", "play", "weights_dir", "step", "sampling.max_tokens", "sampling.temperature"),
    *("client.base_url", "client.api_key_var", "client.endpoints", "client.endpoint", "inference.base_url"),
    *("orchestrator.max_concurrent", "run.name", "run.dir", "resume", "dry_run"),
)


def help_text() -> str:
    from rlx.cli.help import groups, keys
    from rlx.config.schema_synthesize import SynthesizeRoot

    return f"""\
rlx synthesize: {SUMMARY}.

usage: rlx synthesize env=NAME [GROUP=OPTION …] [key=value …]

  rlx synthesize env=tool_math model=qwen3_0_6b rollouts_per_example=8 num_examples=500 min_reward=1
                                                        every rollout that scored 1, once
  rlx synthesize env=[math,countdown] weights_dir=outputs/mine prefer=best per_example=1
                                                        with a run's newest weights; the best rollout of each example
  rlx synthesize env=sums client.base_url=https://api.example.com/v1 client.api_key_var=MY_KEY model.name=big-model
                                                        with a model that somebody else serves
  rlx synthesize run.name=mine resume=latest            go on after a kill; nothing is played twice. Give the same keys
  rlx synthesize --config-dir outputs/mine --config-name config resume=latest play=false min_reward=0.5
                                                        choose again from what was played; starts no server

The data is `data/train.parquet` of the run directory, or `train.jsonl` with format=jsonl; `data/metadata.json` says where it comes from.
`rlx sft` reads it. docs/synthesis.md has the columns and the rules.

groups (from `conf/` and `slurm/`; with --config-dir also from your own directory)
{groups(SynthesizeRoot)}

some keys
{keys(SynthesizeRoot, KEYS)}

exit codes: 0 done; 1 a role failed, or no rollout is kept; 2 the configuration is invalid and nothing was started; 75 preempted;
130 interrupted"""


def run(argv: list[str]) -> int:
    from rlx.cli.start import run as start

    return start(argv, command())


def command() -> Command:
    """The command, for `rlx.cli.start`."""
    from rlx.cli.command import Command
    from rlx.cli.synthesized import SynthesisDisplay
    from rlx.config.roots import SYNTHESIZE
    from rlx.runs.weights import resolve_step

    return Command(SYNTHESIZE, SynthesisDisplay, resolve_step)
