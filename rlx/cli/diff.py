"""`rlx diff A B`: what differs between two runs."""

from __future__ import annotations

import sys
from pathlib import Path

SUMMARY = "what differs between two runs: configuration, code, packages, data, metrics"


def help_text() -> str:
    return f"""\
rlx diff: {SUMMARY}.

usage: rlx diff RUN_A RUN_B        the directories of two runs

  rlx diff outputs/one outputs/two

It compares every configuration key except the run's name and directory; the commit and uncommitted changes; the versions
of Python and all packages; a digest of each environment's examples; and metrics.jsonl without wall-clock times, with the
values of the last step that both runs have.

exit codes, as of diff: 0 no difference; 1 a difference; 2 one of them is not a run"""


def run(argv: list[str]) -> int:
    from rlx.runs.compare import compare
    from rlx.runs.run import Run

    if len(argv) != 2:
        print(f"rlx diff takes two run directories, not {len(argv)}. See rlx diff --help.", file=sys.stderr)
        return 2
    a, b = (Run.open(Path(name)) for name in argv)
    sections = compare(a, b)
    print(f"{a.root} → {b.root}")
    for section in sections:
        print(f"\n{section.title}" + ("" if section.lines else f": {section.note or 'equal'}"))
        for line in section.lines:
            print(f"  {line}")
        if section.lines and section.note:
            print(f"  ({section.note})")
    return 1 if any(section.lines for section in sections) else 0
