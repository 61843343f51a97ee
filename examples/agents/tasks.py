"""Writes the tasks of the two small examples of agents: python examples/agents/tasks.py FOLDER

`files.jsonl`: put a word into a file, with a shell; a command in the box checks the file. `words.jsonl`: say a word backwards.
The first has a column `demonstration`, from which model=tiny learns before training.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"


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


def main(folder: Path) -> None:
    """Write both files."""
    draw = random.Random(0)
    words = ["".join(draw.choices(LETTERS, k=draw.randint(2, 5))) for _ in range(4000)]
    short = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 3))) for _ in range(4000)]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "files.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(file_task(word)) + "\n" for word in short)
    with open(folder / "words.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"question": word, "answer": word[::-1], "test": f"grep -qx {word[::-1]} answer.txt"}) + "\n" for word in words)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
