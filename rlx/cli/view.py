"""`rlx view RUN`: a browser for rollouts and evaluation results in the terminal; a plain list where there is no terminal."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

SUMMARY = "browse rollouts and evaluation results in the terminal"
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


def arguments(command: str, argv: list[str], count: int) -> argparse.Namespace:
    """`RUN name=value …` of `rlx view` and `rlx show`. `count`: the default."""
    from rlx.cli.arguments import Parser

    parser = Parser(command)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--filter", default="")
    parser.add_argument("--sort", default="")
    parser.add_argument("--count", type=int, default=count)
    if command == "view":
        parser.add_argument("--plain", choices=("true", "false"), default="false")
    return parser.parse_args([*argv[:1], *(f"--{part}" for part in argv[1:])])


def run(argv: list[str]) -> int:
    from rlx.runs.rollouts import Rollouts
    from rlx.view.selection import as_list, choose, summary

    given = arguments("view", argv, HOW_MANY)
    rollouts = Rollouts(given.run)
    if given.plain == "false" and can_draw():
        from rlx.view.app import ViewApp

        conditions = given.filter if given.step is None else f"step={given.step} {given.filter}"
        return ViewApp(rollouts, conditions, given.sort or "-step").run() or 0
    rows, total = choose(rollouts, given.step, given.filter, given.sort)
    print(f"{given.run}: {summary(rows, total)}", *as_list(rows[: given.count]), sep="\n")
    if given.count < len(rows):
        print(f"… {len(rows) - given.count:,} more: count={len(rows)}, or a filter. rlx show prints the texts.")
    print(*(f"not shown: {problem}\n" for problem in rollouts.problems), sep="", end="")
    return 0


def can_draw() -> bool:
    """Whether input and output are a terminal that can place its cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
