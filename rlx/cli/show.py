"""`rlx show RUN`: print rollouts as text: prompt, completion, rewards."""

from __future__ import annotations

from pathlib import Path

SUMMARY = "what the policy wrote: rollouts of a run as text"
HOW_MANY = 3
OPTIONS = ("step", "filter", "sort", "count")


def help_text() -> str:
    return f"""\
rlx show: {SUMMARY}.

usage: rlx show RUN [step=N] [filter='CONDITIONS'] [sort=COLUMN] [count=M]

RUN is a run directory, the folder of an evaluation, or one file of rollouts.

  rlx show outputs/mine                                   {HOW_MANY} rollouts of the newest step, of different examples
  rlx show outputs/mine step=12 count=10                  ten rollouts of step 12
  rlx show outputs/mine filter='reward<0.5 env=math'      of all steps, {HOW_MANY} that meet the conditions
  rlx show outputs/mine sort=-tokens count=1              the longest of the newest step

rlx view --help explains conditions and columns. rlx view RUN shows the same in a browser for the terminal."""


def run(argv: list[str]) -> int:
    from rlx.runs.rollouts import TRAIN, Rollouts
    from rlx.runs.selection import one_of_each
    from rlx.view.chosen import choose, damaged, parse, say
    from rlx.view.lines import plain

    options = parse("show", argv, OPTIONS)
    if options is None:
        return 2
    rollouts = Rollouts(Path(argv[0]))
    if "filter" not in options and "step" not in options:  # only the newest step
        sources = [source for source in rollouts.sources if source.set == TRAIN] or rollouts.sources
        newest = max(source.step for source in sources)
        rollouts.sources = [source for source in sources if source.step == newest]
    table, rows = choose(rollouts, options)
    if "sort" not in options:
        rows = one_of_each(table, rows)
    shown = [plain(table.record(int(row))) for row in rows[: int(options.get("count", HOW_MANY))]]
    say(["\n\n".join(shown) if shown else "no rollout meets these conditions", *damaged(rollouts)])
    return 0
