"""`rlx eval`: play environments with a model and score it. Nothing is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.cli.command import Command

SUMMARY = "evaluate a model, the versions of a run, or an API, on environments"
KEYS = (
    "weights_dir",
    "steps",
    "eval_base",
    "num_examples",
    "rollouts_per_example",
    "pass_threshold",
    "sampling.max_tokens",
    "sampling.temperature",
    "client.base_url",
    "client.api_key_var",
    "client.endpoints",
    "client.endpoint",
    "inference.base_url",
    "orchestrator.max_concurrent",
    "run.name",
    "run.dir",
    "resume",
    "dry_run",
)


def help_text() -> str:
    from rlx.cli.help import groups, keys
    from rlx.config.schema_eval import EvalRoot

    return f"""\
rlx eval: {SUMMARY}.

usage: rlx eval [GROUP=OPTION …] [key=value …]

  rlx eval env=[math,sums] model=qwen3_0_6b rollouts_per_example=8
                                                        a model of the hub: avg@8 and pass@1, 2, 4, 8
  rlx eval weights_dir=outputs/mine                     all weights of a run, and its initial model, on its own environments
  rlx eval weights_dir=outputs/mine steps=[10,20] eval_base=false env=math num_examples=500
  rlx eval env=math client.base_url=https://api.openai.com/v1 model.name=gpt-4.1-mini
                                                        an OpenAI-compatible endpoint; its key is in $OPENAI_API_KEY
  rlx eval env=math client.endpoints=endpoints.yaml client.endpoint=mine
  rlx eval env=math inference.base_url=[http://host:8000] inference.api_key='${{oc.env:RLX_API_KEY}}' model=qwen3_0_6b
                                                        a server of rlx that runs already
  rlx eval run.name=mine … resume=latest                continue a killed evaluation; no finished rollout is played again

groups (from `conf/` and `slurm/`; with --config-dir also from your own directory)
{groups(EvalRoot)}

some keys (docs/evaluation.md)
{keys(EvalRoot, KEYS)}

exit codes: 0 done; 1 a role failed; 2 the configuration is invalid and nothing was started; 75 preempted; 130 interrupted"""


def run(argv: list[str]) -> int:
    from rlx.cli.start import run as start

    return start(argv, command())


def command() -> Command:
    """The command, for `rlx.cli.start`."""
    from rlx.cli.command import Command
    from rlx.cli.playing import EvalDisplay
    from rlx.config.roots import EVAL
    from rlx.runs.weights import resolve

    return Command(EVAL, EvalDisplay, resolve)
