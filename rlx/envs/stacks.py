"""Which function of an environment is running: read from a dump of stacks that a stuck process wrote (`faulthandler`).

Current thread 0x00007f… (most recent call first):
  File "/site-packages/sympy/core/power.py", line 1167 in _eval_expand
  File "/site-packages/rlx_math/__init__.py", line 40 in correct          ← the environment's
  File "/site-packages/verifiers/rubrics/rubric.py", line 96 in _call
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_NOT_THE_ENVIRONMENT = (f"{Path(__file__).resolve().parent.parent}/", "/verifiers/", "<frozen ", "<string>")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def threads(dump: str) -> dict[int, list[Frame]]:
    """The frames of every thread by its identity, the innermost first; those of the thread that wrote the dump also at 0."""
    found: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in dump.splitlines():
        if match := _THREAD.match(line):
            frames = found[int(match[2], 16)] = []
            if match[1].startswith("Current"):  # the main thread: the system gives it the signals of the process
                found[0] = frames
        elif match := _FRAME.match(line):
            frames.append(Frame(match[1], match[2], match[3]))
    return found


def culprit(frames: Sequence[Frame], sources: str) -> str:
    """The innermost function of the environment, and the one in which it is stuck if that is another. Empty without frames.

    `sources`: folder or file of the environment's own code. If no frame lies there, the innermost one outside the standard library, verifiers and rlx
    counts as the environment's.
    """
    if not frames:
        return ""
    others = [frame for frame in frames if not _of_the_machinery(frame.file)]
    own = next((frame for frame in frames if sources and (frame.file == sources or frame.file.startswith(f"{sources}/"))), None)
    own = own or (others[0] if others else frames[0])
    deepest = others[0] if others else own
    return str(own) if deepest == own else f"{own}, which is at {deepest}"


def _of_the_machinery(file: str) -> bool:
    """Whether a file belongs to Python, verifiers or rlx."""
    if any(part in file for part in _NOT_THE_ENVIRONMENT):
        return True
    return "site-packages" not in file and (file.startswith(sysconfig.get_path("stdlib") + "/") or "/lib/python3." in file)
