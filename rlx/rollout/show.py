"""A few rollouts of a step as text: `python -m rlx.rollout.show RUN/rollouts/step_000012.jsonl.zst [HOW_MANY]`.

Reads the file that `rlx.rollout.record` writes, and knows its fields alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rlx.rollout.record import read_rollouts

HOW_MANY = 3


def as_text(records: Iterable[Mapping[str, Any]]) -> str:
    """Question, answers and scores of each."""
    return "\n\n".join(_one(record) for record in records)


def _one(record: Mapping[str, Any]) -> str:
    advantage = "" if record["advantage"] is None else f"   advantage {record['advantage']:+.3f}"
    reward = "no reward" if record["reward"] is None else f"reward {record['reward']:.3f}"
    head = f"{record['env']}, example {record['example_id']}   {reward}{advantage}   {record['num_tokens']} tokens, {record['stop']}"
    return "\n".join([head, *_messages(record["prompt"]), *_messages(record["completion"])])


def _messages(messages: Any) -> list[str]:
    """Messages line by line; an environment that does not chat has a text."""
    if isinstance(messages, str):
        return [f"  {messages}"]
    return [f"  {message.get('role')}: {message.get('content')}" for message in messages or ()]


def main(argv: list[str]) -> int:
    if not 1 <= len(argv) <= 2 or (len(argv) == 2 and not argv[1].isdecimal()):
        print("usage: python -m rlx.rollout.show FILE [HOW_MANY]", file=sys.stderr)
        return 2
    if not Path(argv[0]).is_file():
        print(f"there is no file {argv[0]}", file=sys.stderr)
        return 2
    print(as_text(islice(read_rollouts(Path(argv[0])), int(argv[1]) if len(argv) == 2 else HOW_MANY)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
