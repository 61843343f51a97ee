"""The commands with a run directory: `rlx train`, `sft`, `eval`, `synthesize`, `gateway`. Each is one record; `rlx.cli.start` runs them."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx.cli.display import Display
    from rlx.config.roots import Root

EXIT_CODES = "exit codes: 0 done; 1 a role failed; 2 the configuration is invalid and nothing was started; 75 preempted; 130 interrupted"
OF_A_RUN = ("run.name", "run.dir", "resume", "dry_run")
OF_PLAYING = (
    *("sampling.max_tokens", "sampling.temperature", "client.base_url", "client.api_key_var", "client.endpoints", "client.endpoint"),
    *("inference.base_url", "orchestrator.max_concurrent"),
)


@dataclass(frozen=True)
class Command:
    """A command. Modules are named by strings, so that help texts load none of them."""

    name: str
    SUMMARY: str
    examples: str  # and what else its help text says
    keys: tuple[str, ...]  # the most common ones
    configures: str = ""  # the command whose configuration it has; empty: its own
    fixed: tuple[str, ...] = ()  # overrides before the user's
    notice: str = ""  # printed before the start
    display: str = "rlx.cli.eval_display:PlayDisplay"  # made of the run directory and the configuration
    resolves: str = ""  # function that replaces what is found on this machine in the configuration, before it is written

    @property
    def root(self) -> Root:
        from rlx.config.roots import ROOTS

        return next(root for root in ROOTS if root.command == (self.configures or self.name))

    def help_text(self) -> str:
        from rlx.cli.help import groups, keys

        schema = self.root.schema
        return f"""\
rlx {self.name}: {self.SUMMARY}.

usage: rlx {self.name} [GROUP=OPTION …] [key=value …]

{self.examples.strip(chr(10))}

groups (from `conf/`, `slurm/` and `sweeps/`; with --config-dir also from your own directory)
{groups(schema)}

some keys (all of them: docs/configuration.md)
{keys(schema, self.keys)}

{EXIT_CODES}"""

    def run(self, argv: list[str]) -> int:
        from rlx.cli.start import run

        if self.notice:
            print(self.notice, flush=True)
        return run([*self.fixed, *argv], self)

    def show(self, run_dir: Path, cfg: Any) -> Display:
        return pkgutil.resolve_name(self.display)(run_dir, cfg)

    def resolve(self, cfg: Any) -> Any:
        """The configuration with the newest weights, absolute paths and the like. Raises ConfigError."""
        return pkgutil.resolve_name(self.resolves)(cfg) if self.resolves else cfg


TRAIN = Command(
    "train",
    "train a policy: all roles, on this machine or a SLURM cluster",
    """
  rlx train                                             the default: a tiny model learns to reverse words on a CPU (python train.py)
  rlx train loss=gspo env=sums seed=1                   another objective, environment and seed
  rlx train env=[sums,reverse_text] max_steps=80        a mix of two environments
  rlx train loss=gspo env=math model=qwen3_8b hardware=node8 dry_run=true
                                                        show what would run where and what it needs; start nothing
  rlx train bench=true model=qwen3_0_6b                 the trainer's speed, MFU and memory on random tokens
  rlx train bench=true bench_role=rl                    the same of the whole run; bench_role=inference: of the servers alone
  rlx train -m loss=grpo,gspo seed=1,2,3                six runs, one after the other; with launcher=slurm one job array
  rlx train -m sweeps=losses                            the sweep of the file sweeps/losses.yaml
  rlx train launcher=slurm slurm=my_cluster hardware=node8
                                                        a job on a cluster: docs/cluster.md
  rlx train run.name=mine resume=latest                 resume outputs/mine from its newest checkpoint
  rlx train resume=outputs/mine max_steps=200           a new run, from the newest checkpoint of outputs/mine
  rlx train run.name=host trainer.max_concurrent_runs=2 lora.rank=16
                                                        a trainer for the adapters of several runs: docs/lora.md
  rlx train --config-dir DIR --config-name config       the saved configuration of another run
""",
    (
        *("max_steps", "seed", "max_async_level", "seq_len", "sampling.max_tokens", "sampling.temperature", "orchestrator.batch_size"),
        *("orchestrator.rollouts_per_example", "trainer.num_minibatches", "inference.base_url", "hardware.inference_replicas"),
        *("hardware.trainer_processes", "clean", *OF_A_RUN),
    ),
    display="rlx.cli.console:Console",
)
SFT = Command(
    "sft",
    "fine-tune a model on prompts and completions, or on conversations",
    """
  rlx sft data.name=data.jsonl model=smollm2_135m       rows with `messages`, or with `prompt` and `completion`
  rlx sft data.name=folder val.name=held_out.jsonl val.interval=20
                                                        all JSONL and Parquet files of a folder; validation every 20 steps
  rlx sft +data.sets.a.name=a.jsonl +data.sets.b.name=b.parquet data.sets.b.weight=3
                                                        two data sets; three of four rows come from b
  rlx sft data.name=owner/name 'data.split="train[:90%]"' model=qwen3_8b hardware=node8 dry_run=true
                                                        a data set on the hub; show what would run, start nothing
  rlx sft data.name=data.jsonl -m optim.lr=1e-5,3e-5    two runs
  rlx sft data.name=data.jsonl env=reverse_text eval.interval=20
                                                        evaluate every 20 steps, alongside training, on a server of its own
  rlx sft bench=true data=fake data.length=variable model=qwen3_0_6b
                                                        the trainer's speed, MFU and memory on random tokens
  rlx train model=smollm2_135m model.name=outputs/mine/weights/step_100
                                                        reinforcement learning from the result
Data and masks: docs/sft.md
""",
    ("data.name", "data.split", "data.batch_size", "val.name", "val.interval", "max_steps", "seed", "seq_len", "clean", *OF_A_RUN),
    display="rlx.cli.console:Console",
    resolves="rlx.preflight.dataset_check:resolve",
)
EVAL = Command(
    "eval",
    "evaluate a model, the versions of a run, or an API, on environments",
    """
  rlx eval env=[math,sums] model=qwen3_0_6b rollouts_per_example=8
                                                        a model of the hub: avg@8 and pass@1, 2, 4, 8
  rlx eval bench=[gsm8k,math500] model=qwen3_0_6b       benchmarks by name: env=[…] num_examples=null
  rlx eval weights_dir=outputs/mine                     all weights of a run, and its initial model, on its own environments
  rlx eval weights_dir=outputs/mine steps=[10,20] eval_base=false env=math num_examples=500
  rlx eval env=math client.base_url=https://api.openai.com/v1 model.name=gpt-4.1-mini
                                                        an OpenAI-compatible endpoint; its key is in $OPENAI_API_KEY
  rlx eval env=math client.endpoints=endpoints.yaml client.endpoint=mine
  rlx eval env=math inference.base_url=[http://host:8000] inference.api_key='${oc.env:RLX_API_KEY}' model=qwen3_0_6b
                                                        a server of rlx that runs already
  rlx eval run.name=mine … resume=latest                continue a killed evaluation; finished rollouts stay
docs/evaluation.md
""",
    (
        *("weights_dir", "steps", "eval_base", "num_examples", "rollouts_per_example", "pass_threshold"),
        *(*OF_PLAYING, *OF_A_RUN),
    ),
    resolves="rlx.runs.weights:resolve",
)
SYNTHESIZE = Command(
    "synthesize",
    "make training data: sample rollouts of environments, keep what scored well",
    """
  rlx synthesize env=tool_math model=qwen3_0_6b rollouts_per_example=8 num_examples=500 min_reward=1
                                                        every rollout that scored 1, once
  rlx synthesize env=[math,countdown] weights_dir=outputs/mine select_by=best per_example=1
                                                        with a run's newest weights; the best rollout of each example
  rlx synthesize env=sums client.base_url=https://api.example.com/v1 client.api_key_var=MY_KEY model.name=big-model
                                                        with a model that somebody else serves
  rlx synthesize run.name=mine … resume=latest          continue after a kill, with the same keys; finished rollouts stay
  rlx synthesize --config-dir outputs/mine --config-name config resume=latest play=false min_reward=0.5
                                                        choose again from the finished rollouts; starts no server

The data is `data/train.jsonl` of the run directory; `data/metadata.json` says where it comes from.
`rlx sft` reads it. docs/distillation.md has the columns and the rules.
""",
    (
        *("num_examples", "rollouts_per_example", "min_reward", "max_reward", "select_by", "per_example", "require_all", "duplicates"),
        *("drop_failed", "drop_truncated", "play", "weights_dir", "step", *OF_PLAYING, *OF_A_RUN),
    ),
    resolves="rlx.runs.weights:resolve_step",
)
GATEWAY = Command(
    "gateway",
    "serve a model to programs by base URL and key, and record what they do with it",
    """
  rlx gateway model=qwen3_0_6b num_examples=100         until 100 sessions have ended, or Ctrl-C
  rlx gateway model=qwen3_0_6b env.args.data=tasks.jsonl env.args.port=9000
  rlx gateway weights_dir=outputs/mine                  the weights of a run

  curl -X POST -H "Authorization: Bearer $(cat gateway.key)" http://127.0.0.1:8765/sessions
                                                        → {"id", "key", "base_url", "task", …}
  OPENAI_BASE_URL=… OPENAI_API_KEY=… my-agent           or ANTHROPIC_BASE_URL (without /v1) and ANTHROPIC_API_KEY
  curl -X POST -H "Authorization: Bearer KEY" -d '{"reward": 1}' http://127.0.0.1:8765/sessions/ID/end

It is `rlx eval env=gateway`: the rollouts are in the run directory. `rlx train env=gateway` trains from programs in the same way, and
`rlx synthesize env=gateway` makes training data of them. docs/agents.md has the routes.
""",
    ("num_examples", "sampling.max_tokens", "sampling.temperature", "orchestrator.max_concurrent", *OF_A_RUN),
    configures="eval",
    fixed=("env=gateway", "eval_base=true", "num_examples=null"),
    notice="programs ask for sessions at http://127.0.0.1:8765/sessions (env.args.host, env.args.port) as soon as the file gateway.key "
    "(env.args.key_file) is there, which holds the key (docs/agents.md)",
    resolves="rlx.runs.weights:resolve",
)
BY_NAME = {command.name: command for command in (TRAIN, SFT, EVAL, SYNTHESIZE)}  # those with a configuration of their own
