"""Wrote the tasks of this folder: python examples/agents/tasks.py

`files.jsonl`: put a word into a file, with a shell; a command in the box tests the file. `words.jsonl`: say a word backwards.
The first has a column `demonstration`, from which model=tiny learns before training.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

HERE = Path(__file__).parent


def file_task(word: str) -> dict:
    """Put a word into the file f."""
    command = json.dumps({"command": f"echo {word}>f"})
    call = {"type": "function", "id": "a", "function": {"name": "shell", "arguments": command}}
    said = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "(exit code 0)"},
        {"role": "assistant", "content": "ok"},
    ]
    return {"question": word, "test": f"grep -qx {word} f", "demonstration": said}


def word_task(word: str) -> dict:
    """Say a word backwards."""
    return {"question": word, "answer": word[::-1], "test": f"grep -qx {word[::-1]} answer.txt"}


def main() -> None:
    """Write both files."""
    draw = random.Random(0)
    short = ["".join(letters) for size in (1, 2, 3) for letters in itertools.product("abcdefgh", repeat=size)]
    draw.shuffle(short)
    for name, tasks in (("files", map(file_task, short)), ("words", map(word_task, short))):
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")


if __name__ == "__main__":
    main()
