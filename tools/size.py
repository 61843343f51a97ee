"""Statements, lines and files of each room: `python tools/size.py`. Standard library only.

A statement is a node of type `ast.stmt`, so long lines and comments do not count. docs/architecture.md has the budget of each room.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = re.compile(r"^\| `([\w ,`/.]+)` \| (\d[\d,]*) \|", re.MULTILINE)


def room_of(path: Path) -> str:
    """The folder below `rlx/` that a file is in; `top` for modules of the package itself."""
    parts = path.relative_to(ROOT / "rlx").parts
    return parts[0] if len(parts) > 1 else "top"


def sizes(files: list[Path], name_of=room_of) -> dict[str, tuple[int, int, int]]:
    """Statements, lines and files by room."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path in files:
        text = path.read_text(encoding="utf-8")
        counts = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text))), text.count("\n"), 1
        found[name_of(path)] = [a + b for a, b in zip(found[name_of(path)], counts, strict=True)]
    return {room: (counts[0], counts[1], counts[2]) for room, counts in found.items()}


def budgets() -> dict[str, int]:
    """The largest number of statements of each room, from the table in docs/architecture.md."""
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Budgets")[2].partition("\n## ")[0]
    return {room: int(most.replace(",", "")) for room, most in BUDGET.findall(table)}


def main() -> int:
    """Print the table, largest room first."""
    found = sizes(sorted((ROOT / "rlx").rglob("*.py")))
    found["tests"] = sizes(sorted((ROOT / "tests").rglob("*.py")), lambda path: "tests")["tests"]
    most = budgets()
    print(f"{'room':12} statements  budget   lines  files")
    for room, (statements, lines, files) in sorted(found.items(), key=lambda item: -item[1][0]):
        print(f"{room:12} {statements:10,} {most.get(room, 0):7,} {lines:7,} {files:6}")
    whole = [sum(counts[i] for room, counts in found.items() if room != "tests") for i in range(3)]
    print(f"{'rlx':12} {whole[0]:10,} {sum(most.values()) - most.get('tests', 0):7,} {whole[1]:7,} {whole[2]:6}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
