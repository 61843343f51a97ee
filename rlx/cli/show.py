"""`rlx show RUN`: print a few rollouts: prompt, completion, reward."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

SUMMARY = "what the policy wrote: a few rollouts of a run"
HOW_MANY = 3


def help_text() -> str:
    return f"""\
rlx show: {SUMMARY}.

usage: rlx show RUN [step=N] [count=M]        RUN: a run directory, or one file of its rollouts/

  rlx show outputs/mine                        {HOW_MANY} rollouts of the newest step
  rlx show outputs/mine step=12 count=10       ten rollouts of step 12"""


def run(argv: list[str]) -> int:
    from rlx.config.errors import ConfigError
    from rlx.rollout.record import read_rollouts
    from rlx.runs.run import Run

    options = dict(part.split("=", 1) for part in argv[1:] if "=" in part)
    if not argv or len(options) != len(argv) - 1 or not set(options) <= {"step", "count"} or not all(map(str.isdecimal, options.values())):
        print("usage: rlx show RUN [step=N] [count=M]. See rlx show --help.", file=sys.stderr)
        return 2
    path = Path(argv[0]).expanduser()
    if not path.is_file():
        found = Run.open(path)
        steps = found.rollouts
        if not steps:
            raise ConfigError(f"{found.root} has no rollouts (no step yet, or orchestrator.save_rollouts=false).\n  fix: name another run")
        step = int(options.get("step", steps[-1]))
        if step not in steps:
            raise ConfigError(
                f"{found.root} has no rollouts of step {step}, only of steps {steps[0]} … {steps[-1]}.\n  fix: step={steps[-1]}"
            )
        path = found.paths.rollouts_of(step)
    print(as_text(islice(read_rollouts(path), int(options.get("count", HOW_MANY)))))
    return 0


def as_text(records: Iterable[Mapping[str, Any]]) -> str:
    """Prompt, completion and reward of each rollout."""
    return "\n\n".join(_one(record) for record in records)


def _one(record: Mapping[str, Any]) -> str:
    advantage = "" if record["advantage"] is None else f"   advantage {record['advantage']:+.3f}"
    reward = "no reward" if record["reward"] is None else f"reward {record['reward']:.3f}"
    head = f"{record['env']}, example {record['example_id']}   {reward}{advantage}   {record['num_tokens']} tokens, {record['stop']}"
    return "\n".join([head, *_messages(record["prompt"]), *_messages(record["completion"])])


def _messages(messages: Any) -> list[str]:
    """One line per message; environments without chat have plain text."""
    if isinstance(messages, str):
        return [f"  {messages}"]
    return [f"  {message.get('role')}: {message.get('content')}" for message in messages or ()]
