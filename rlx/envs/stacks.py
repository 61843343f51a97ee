"""Where a process is stuck: the line of an environment's code, read from a dump of stacks that the process wrote (`faulthandler`).

Current thread 0x00007f… (most recent call first):
  File "/site-packages/sympy/core/power.py", line 1167 in _eval_expand
  File "/site-packages/rlx_math/__init__.py", line 40 in correct          ← the environment's: "/…/rlx_math/__init__.py:40 in correct"
  File "/site-packages/verifiers/rubrics/rubric.py", line 96 in _call
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlx.stacks import awaits, own_line

_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_RLX = f"{Path(__file__).resolve().parent.parent}/"


def threads(dump: str) -> dict[int, list[str]]:
    """The frames of every thread by its identity, the innermost first; those of the thread that wrote the dump also at 0."""
    found: dict[int, list[str]] = {}
    frames: list[str] = []
    for line in dump.splitlines():
        if match := _THREAD.match(line):
            frames = found[int(match[2], 16)] = []
            if match[1].startswith("Current"):  # the main thread: the system gives it the signals of the process
                found[0] = frames
        elif match := _FRAME.match(line):
            frames.append(f"{match[1]}:{match[2]} in {match[3]}")
    return found


def environments_line(frames: Sequence[str], sources: str) -> str:
    """The innermost line of the environment's code; without one, the innermost outside of Python, packages and rlx.

    `sources`: folder or file of the environment's code; empty if it is not known. Empty if there are no frames.
    """
    others = [frame for frame in frames if not frame.startswith(_RLX)]
    return own_line(others, Path(sources) if sources else None)


def waits_at(task: asyncio.Task[Any], sources: Path | None) -> str:
    """`; at FILE:LINE in FUNCTION`, where a rollout's task waits in the environment's code; empty if it waits elsewhere."""
    where = own_line(awaits(task), sources)
    return f"; at {where}" if sources is not None and where.startswith((f"{sources}:", f"{sources}/")) else ""
