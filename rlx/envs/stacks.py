"""Where a process is stuck, and for whom: read from a dump of stacks that the process wrote (`faulthandler`).

Current thread 0x00007f… (most recent call first):
  File "/site-packages/sympy/core/power.py", line 1167 in _eval_expand
  File "/site-packages/rlx_math/__init__.py", line 40 in correct          ← the environment's: "/…/rlx_math/__init__.py:40 in correct"
  File "/site-packages/verifiers/rubrics/rubric.py", line 96 in _call
  File "<request 17>", line 3 in _awaited                                 ← whose code it is (`rlx.envs.worker.named`)
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from rlx.stacks import awaits, own_line

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
_REQUEST = re.compile(r'^  File "<request (\d+)>"', re.MULTILINE)
_RLX = f"{Path(__file__).resolve().parent.parent}/"


def read_dump(dump: str, sources: str) -> tuple[set[int], str]:
    """The requests that a process computes for, and the innermost line of the environment's code, or of other code, in their threads.

    `sources`: folder or file of the environment's code; empty if it is not known. Without a request, the line is the main thread's.
    """
    stacks = _THREAD.split(dump)  # the main thread's comes last
    found = [stack for stack in stacks if _REQUEST.search(stack)] or stacks[-1:]
    frames = [f"{file}:{line} in {name}" for file, line, name in _FRAME.findall(found[0]) if not file.startswith((_RLX, "<request"))]
    return set(map(int, _REQUEST.findall(dump))), own_line(frames, Path(sources) if sources else None)


def waits_at(task: asyncio.Task[Any], sources: Path | None) -> str:
    """`; at FILE:LINE in FUNCTION`, where a rollout's task waits in the environment's code; empty if it waits elsewhere."""
    where = own_line(awaits(task), sources)
    return f"; at {where}" if sources is not None and where.startswith((f"{sources}:", f"{sources}/")) else ""
