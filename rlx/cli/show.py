"""`rlx show RUN`: print rollouts as text: prompt, completion, rewards."""

from __future__ import annotations

SUMMARY = "what the policy wrote: rollouts of a run as text"
HOW_MANY = 3


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
    from rlx.cli.view import arguments
    from rlx.runs.rollouts import TRAIN, Rollouts
    from rlx.runs.selection import one_of_each
    from rlx.view.format_rollout import plain
    from rlx.view.selection import choose

    given = arguments("show", argv, HOW_MANY)
    rollouts = Rollouts(given.run)
    if not given.filter and given.step is None:  # only the newest step
        sources = [source for source in rollouts.sources if source.set == TRAIN] or rollouts.sources
        newest = max(source.step for source in sources)
        rollouts.sources = [source for source in sources if source.step == newest]
    rows, _ = choose(rollouts, given.step, given.filter, given.sort)
    chosen = (rows if given.sort else one_of_each(rows))[: given.count]
    print("\n\n".join(plain(row.record()) for row in chosen) or "no rollout meets these conditions")
    print(*(f"not shown: {problem}\n" for problem in rollouts.problems), sep="", end="")
    return 0
