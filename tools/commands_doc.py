"""Writes `docs/commands.md` from the help texts: `python tools/commands_doc.py`."""

from __future__ import annotations

import pkgutil
from pathlib import Path

from rlx.cli import COMMANDS
from rlx.cli.commands import EXIT_CODES, Command

ROLES = ("prepare", "inference", "orchestrator", "trainer")  # their help texts differ in the first line alone

HEAD = """\
# Commands

`rlx COMMAND --help` prints the same, with the options of each group and the most used keys. `python train.py` is `rlx train`.

| command | what it does |
| --- | --- |
"""


def render() -> str:
    """The whole page: a table of the commands, then the examples and options of each."""
    commands = {name: pkgutil.resolve_name(where) for name, where in COMMANDS.items()}
    parts = [HEAD + "".join(f"| [`rlx {name}`](#rlx-{name}) | {each.SUMMARY} |\n" for name, each in commands.items())]
    for name, command in commands.items():
        if isinstance(command, Command):
            text = command.examples.strip("\n")
        elif name in ROLES[1:]:
            parts.append(f"## `rlx {name}`\n\nTakes what [`rlx prepare`](#rlx-prepare) takes.\n")
            continue
        else:
            text = command.help_text().partition("\n\n")[2].strip("\n")
        parts.append(f"## `rlx {name}`\n\n```text\n{text}\n```\n")
    return "\n".join(parts) + f"\nOf `train`, `sft`, `eval`, `synthesize` and `gateway`, {EXIT_CODES}.\n"


if __name__ == "__main__":
    (Path(__file__).resolve().parent.parent / "docs" / "commands.md").write_text(render())
