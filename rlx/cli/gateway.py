"""`rlx gateway`: serve a model to programs in other shells, and keep what they made of it. An evaluation whose environment is `gateway`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.cli.command import Command

SUMMARY = "serve a model to programs by base URL and key, and record what they do with it"
KEYS = ("num_examples", "sampling.max_tokens", "sampling.temperature", "orchestrator.max_concurrent", "run.name", "run.dir", "dry_run")


def help_text() -> str:
    from rlx.cli.help import groups, keys
    from rlx.config.schema_eval import EvalRoot

    return f"""\
rlx gateway: {SUMMARY}.

usage: rlx gateway [GROUP=OPTION …] [key=value …]

  rlx gateway model=qwen3_0_6b num_examples=100         until 100 sessions have ended, or Ctrl-C
  rlx gateway model=qwen3_0_6b env.args.data=tasks.jsonl env.args.port=9000
  rlx gateway weights_dir=outputs/mine                  the weights of a run

  curl -X POST -H "Authorization: Bearer $(cat gateway.key)" http://127.0.0.1:8765/sessions
                                                        → {{"id", "key", "base_url", "task", …}}
  OPENAI_BASE_URL=… OPENAI_API_KEY=… my-agent           or ANTHROPIC_BASE_URL (without /v1) and ANTHROPIC_API_KEY
  curl -X POST -H "Authorization: Bearer KEY" -d '{{"reward": 1}}' http://127.0.0.1:8765/sessions/ID/end

It is `rlx eval env=gateway`: what was played is in the run directory. `rlx train env=gateway` trains from programs in the same way, and
`rlx synthesize env=gateway` makes training data of them. docs/agents.md has the routes.

groups (from `conf/` and `slurm/`; with --config-dir also from your own directory)
{groups(EvalRoot)}

some keys
{keys(EvalRoot, KEYS)}

exit codes: 0 done; 1 a role failed; 2 the configuration is invalid and nothing was started; 75 preempted; 130 interrupted"""


def run(argv: list[str]) -> int:
    from rlx.cli.start import run as start

    given = dict(part.split("=", 1) for part in argv if part.startswith("env.args.") and "=" in part)
    place = f"http://{given.get('env.args.host', '127.0.0.1')}:{given.get('env.args.port', '8765')}/sessions"
    key = given.get("env.args.key_file", "gateway.key")
    print(f"programs ask for sessions at {place} as soon as the file {key} is there, which holds the key (docs/agents.md)")
    return start(["env=gateway", "eval_base=true", "num_examples=null", *argv], command())


def command() -> Command:
    """The command, for `rlx.cli.start`."""
    from rlx.cli.eval import command as evaluation

    return evaluation()
