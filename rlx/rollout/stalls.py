"""What the orchestrator waits for, in words, for the account of a stall (`rlx.launch.stall`): groups, rollouts and lines of code."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.stack_dump import BLOCKED, main_thread, own_line, rollout_name, tasks_of
from rlx.types import Task

GROUPS = 5  # that are named, the oldest first
PLACES = 3  # lines of code that are named for each of them


def explainer(
    in_flight: Callable[[], Sequence[tuple[Task, int, float]]], envs: Mapping[str, Any], loop: asyncio.AbstractEventLoop
) -> Callable[[], list[str]]:
    """A function for `rlx.stack_dump.explain_with`. `in_flight`: task, members still playing and seconds of each group."""

    def explain() -> list[str]:
        tasks = tasks_of(loop, rollout_name(None))
        sources = {name: getattr(env, "sources", None) for name, env in envs.items()}
        return in_words(sorted(in_flight(), key=lambda group: -group[2]), tasks, sources, main_thread())

    return explain


def in_words(
    groups: Sequence[tuple[Task, int, float]],
    tasks: Mapping[str, Sequence[str]] | None,
    sources: Mapping[str, Path | None],
    main: Sequence[str],
) -> list[str]:
    """One line for each group, the oldest first. Pure.

    `tasks`: the frames at which the event loop's tasks of rollouts wait, by name; None: the loop does not answer. `main`: the lines of the
    main thread, the innermost first.
    """
    lines = []
    if tasks is None:
        own = [own_line(main, each) for each in sources.values() if each is not None and any(str(each) in line for line in main)]
        lines.append(f"{BLOCKED} at {own[0] if own else own_line(main)}")
    for task, left, seconds in groups[:GROUPS]:
        text = f"{task.env}, example {task.example_id}: {left} rollout{'s' * (left != 1)} for {seconds:.0f} s"
        mine = rollout_name(task)
        where = Counter(own_line(frames, sources.get(task.env)) for name, frames in (tasks or {}).items() if name.startswith(mine))
        text += "".join(f"; {count} at {line}" for line, count in where.most_common(PLACES))
        lines.append(text)
    if len(groups) > GROUPS:
        lines.append(f"and {len(groups) - GROUPS} younger groups")
    return lines or ["no rollout is in flight"]
