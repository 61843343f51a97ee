"""`rlx trainer`: one role alone, in the foreground."""

from __future__ import annotations

from rlx.cli import role

SUMMARY = "train on the orchestrator's batches and publish weights"


def help_text() -> str:
    return role.help_text("trainer", SUMMARY)


def run(argv: list[str]) -> int:
    return role.run("trainer", argv)
