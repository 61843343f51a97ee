"""The options of `rlx view` and `rlx show`, and the rollouts that they choose, as a plain table."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlx.config.errors import ConfigError
from rlx.plan.explain import table as aligned
from rlx.runs.rollouts import Rollouts, Table
from rlx.runs.selection import newest_first, select, sort
from rlx.view.lines import printable

COLUMNS = ("step", "set", "env", "example", "reward", "advantage", "tokens", "turns", "version", "stop", "error")
"""The columns of a list, in their order."""


def parse(command: str, argv: Sequence[str], known: Sequence[str]) -> dict[str, str] | None:
    """The options after the path; `None` after a message about what is wrong with them."""
    options = dict(part.split("=", 1) for part in argv[1:] if "=" in part)
    wrong = [part for part in argv[1:] if part.partition("=")[0] not in known or "=" not in part]
    numbers = [f"{name}={options[name]}" for name in ("step", "count") if not options.get(name, "0").isdecimal()]
    # The first is the path, also that of a sweep's run, `loss=grpo,seed=1`.
    if argv and argv[0].partition("=")[0] not in known and not wrong and not numbers:
        return options
    if wrong:
        print(f"rlx {command}: {wrong[0]!r} is no option. Options: {', '.join(f'{name}=' for name in known)}.", file=sys.stderr)
    elif numbers:
        print(f"rlx {command}: {numbers[0]} is no number.", file=sys.stderr)
    print(f"usage: rlx {command} RUN {' '.join(f'[{name}=…]' for name in known)}. See rlx {command} --help.", file=sys.stderr)
    return None


def choose(rollouts: Rollouts, options: Mapping[str, str]) -> tuple[Table, NDArray[np.int64]]:
    """The table and the chosen rows in their order. Raises ConfigError for a step that is not there, or a wrong condition or column."""
    if "step" in options:
        step, steps = int(options["step"]), sorted({source.step for source in rollouts.sources})
        if step not in steps:
            raise ConfigError(
                f"{rollouts.root} has no rollouts of step {step}, only of steps {steps[0]} … {steps[-1]}.\n  fix: step={steps[-1]}"
            )
        rollouts.sources = [source for source in rollouts.sources if source.step == step]
    table = rollouts.whole()
    try:
        rows = newest_first(table, select(table, options.get("filter", "")))
        if by := options.get("sort", ""):
            rows = sort(table, rows, by.removeprefix("-"), descending=by.startswith("-"))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return table, rows


def damaged(rollouts: Rollouts) -> list[str]:
    """Lines about files that could not be read and are not in the table."""
    return [f"not shown: {problem}" for problem in rollouts.problems]


def cells(table: Table, row: int) -> list[str]:
    """One rollout's values, by `COLUMNS`. A hyphen stands for what was not recorded."""
    c = table.columns

    def whole(name: str) -> str:
        value = int(c[name][row])
        return "-" if value < 0 else str(value)

    def real(name: str, form: str) -> str:
        value = float(c[name][row])
        return "-" if math.isnan(value) else format(value, form)

    oldest, newest = whole("oldest"), whole("newest")
    return [
        whole("step"),
        table.text("set", row),
        table.text("env", row),
        str(c["example"][row]),
        real("reward", ".3f"),
        real("advantage", "+.3f"),
        whole("tokens"),
        whole("turns"),
        newest if oldest == newest else f"{oldest}-{newest}",
        table.text("stop", row) + (" (cut)" if c["truncated"][row] else ""),
        table.text("status", row) if table.failed[row] else table.text("left_out", row),
    ]


def summary(table: Table, rows: NDArray[np.int64]) -> str:
    """One line about the chosen rollouts: how many, their mean reward and length, how many failed."""
    if not len(rows):
        return f"0 of {len(table):,} rollouts"
    rewards, tokens = table.columns["reward"][rows], table.columns["tokens"][rows]
    rewards, tokens = rewards[~np.isnan(rewards)], tokens[tokens >= 0]
    parts = [f"{len(rows):,} of {len(table):,} rollouts" if len(rows) < len(table) else f"{len(rows):,} rollouts"]
    parts += [f"reward {rewards.mean(dtype=np.float64):.3f}"] if len(rewards) else []
    parts += [f"{tokens.mean():.0f} tokens"] if len(tokens) else []
    parts.append(f"{int(table.failed[rows].sum()):,} failed")
    return "   ".join(parts)


def as_list(table: Table, rows: Iterable[int]) -> list[str]:
    """The rows as aligned lines."""
    return aligned(COLUMNS, [[printable(text) for text in cells(table, int(row))] for row in rows])


def say(lines: Iterable[str]) -> None:
    """Print lines. A reader that closes the pipe early (`| head`) is no error."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter would complain when it flushes at its end
