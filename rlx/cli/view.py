"""`rlx view RUN`: a browser for rollouts and evaluation results in the terminal; a plain list where there is no terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SUMMARY = "browse rollouts and evaluation results in the terminal"
OPTIONS = ("step", "filter", "sort", "count", "plain")
HOW_MANY = 20


def help_text() -> str:
    from rlx.runs.selection import HELP, SORTS

    conditions = HELP.replace("; ", ";\n  ")
    return f"""\
rlx view: {SUMMARY}.

usage: rlx view RUN [step=N] [filter='CONDITIONS'] [sort=COLUMN] [plain=true] [count=M]

RUN is a run directory, the folder of an evaluation (also of verifiers' own), or one file of rollouts.

  rlx view outputs/mine                                   all steps and evaluations; ? shows the keys
  rlx view outputs/mine filter='reward<0.5 env=math'      only these
  rlx view outputs/mine sort=-tokens                      the longest first
  rlx view outputs/mine plain=true count=50               a list as plain text, also when there is no terminal

A filter is a list of conditions with spaces between; a rollout must meet all. ! before a condition negates it.
  {conditions}
Columns to sort by, with - for the largest first: {", ".join(SORTS)}."""


def run(argv: list[str]) -> int:
    from rlx.runs.rollouts import Rollouts
    from rlx.view.chosen import as_list, choose, damaged, parse, say, summary

    options = parse("view", argv, OPTIONS)
    if options is None:
        return 2
    if (plain := options.get("plain", "false")) not in ("true", "false"):
        print(f"rlx view: plain={plain} is neither true nor false.", file=sys.stderr)
        return 2
    rollouts = Rollouts(Path(argv[0]))
    if plain == "false" and can_draw():
        from rlx.view.app import ViewApp

        return ViewApp(rollouts, options).run() or 0
    table, rows = choose(rollouts, options)
    shown = rows[: int(options.get("count", HOW_MANY))]
    more = f"… {len(rows) - len(shown):,} more: count={len(rows)}, or a filter. rlx show prints the texts."
    lines = [f"{argv[0]}: {summary(table, rows)}", *as_list(table, shown), *([more] if len(shown) < len(rows) else [])]
    say([*lines, *damaged(rollouts)])
    return 0


def can_draw() -> bool:
    """Whether input and output are a terminal that can place its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
