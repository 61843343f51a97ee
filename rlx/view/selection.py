"""The rollouts that `rlx view` and `rlx show` choose, and their values as columns of a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.config.errors import ConfigError
from rlx.plan.explain import table
from rlx.runs.rollouts import RolloutRow, Rollouts
from rlx.runs.selection import newest_first, select, sort
from rlx.view.format_rollout import printable


def _or_hyphen(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def _versions(row: RolloutRow) -> str:
    ends = sorted({min(row.versions), max(row.versions)}) if row.versions else []
    return "-".join(map(str, ends)) or "-"


COLUMNS: dict[str, Callable[[RolloutRow], str]] = {
    "step": lambda row: _or_hyphen(row.step),
    "set": lambda row: row.set,
    "env": lambda row: row.env,
    "example": lambda row: str(row.example),
    "reward": lambda row: _or_hyphen(row.reward, ".3f"),
    "advantage": lambda row: _or_hyphen(row.advantage, "+.3f"),
    "tokens": lambda row: _or_hyphen(row.tokens),
    "turns": lambda row: _or_hyphen(row.turns),
    "version": _versions,
    "stop": lambda row: f"{row.stop} (cut)" if row.truncated else str(row.stop),
    "error": lambda row: row.status if row.error else str(row.rule),
}
"""The columns of a list, in their order. A hyphen stands for what was not recorded."""


def choose(rollouts: Rollouts, step: int | None, conditions: str, by: str) -> tuple[list[RolloutRow], int]:
    """The chosen rows in their order, and of how many. Raises ConfigError for a step that is not there, or a wrong condition or column."""
    if step is not None:
        steps = sorted({source.step for source in rollouts.sources})
        rollouts.sources = [source for source in rollouts.sources if source.step == step]
        if not rollouts.sources:
            raise ConfigError(
                f"{rollouts.root} has no rollouts of step {step}, only of steps {steps[0]} … {steps[-1]}.\n  fix: step={steps[-1]}"
            )
    every = rollouts.whole()
    rows = newest_first(select(every, conditions))
    return sort(rows, by.removeprefix("-"), descending=by.startswith("-")) if by else rows, len(every)


def summary(rows: Sequence[RolloutRow], total: int) -> str:
    """One line about the chosen rollouts: how many, their mean reward and length, how many failed."""
    parts = [f"{len(rows):,} rollouts" if len(rows) == total else f"{len(rows):,} of {total:,} rollouts"]
    for form, values in (("reward {:.3f}", [row.reward for row in rows]), ("{:.0f} tokens", [row.tokens for row in rows])):
        known = [value for value in values if value is not None]
        parts += [form.format(sum(known) / len(known))] if known else []
    return "   ".join([*parts, f"{sum(row.error for row in rows):,} failed"])


def cells(row: RolloutRow) -> list[str]:
    """One rollout's values, by `COLUMNS`."""
    return [printable(value(row)) for value in COLUMNS.values()]


def as_list(rows: Sequence[RolloutRow]) -> list[str]:
    """The rows as aligned lines."""
    return table(list(COLUMNS), map(cells, rows))
