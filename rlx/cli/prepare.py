"""`rlx prepare`: one role alone, in the foreground."""

from __future__ import annotations

from rlx.cli import role

SUMMARY = "make the run's initial model, if the configuration has a warm start or a GGUF file"


def help_text() -> str:
    return role.help_text("prepare", SUMMARY)


def run(argv: list[str]) -> int:
    return role.run("prepare", argv)
