"""`rlx inference`: one role alone, in the foreground."""

from __future__ import annotations

from rlx.cli import role

SUMMARY = "serve the policy with vLLM"


def help_text() -> str:
    return role.help_text("inference", SUMMARY)


def run(argv: list[str]) -> int:
    return role.run("inference", argv)
