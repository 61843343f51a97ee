"""`rlx orchestrator`: one role alone, in the foreground."""

from __future__ import annotations

from rlx.cli import role

SUMMARY = "roll out the environments and send batches to the trainer"


def help_text() -> str:
    return role.help_text("orchestrator", SUMMARY)


def run(argv: list[str]) -> int:
    return role.run("orchestrator", argv)
