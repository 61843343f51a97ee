"""Compares a reply with an answer: as text, then as numbers, then by math-verify in a process of its own (`check.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import queue
import re
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from fractions import Fraction
from pathlib import Path

LONGEST = 400  # characters of an expression that math-verify gets; a longer reply is wrong
LATE = "late"
REMEMBERED = 4096  # comparisons kept; the rollouts of a group often give the same answer

_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(-?\d+)\}")
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)(/-?\d+)?")


def to_number(text: str) -> Fraction | None:
    """The number in a text; None if the text is not a plain number.

    The text may have thousands separators, a `$` or `%` sign, a LaTeX fraction or a closing full stop.
    """
    if len(text) > LONGEST:
        return None
    text = _FRACTION.sub(r" \1/\2", text.strip().rstrip(".").strip("$"))  # apart from a whole number before it
    text = re.sub(r"(?<=\d)(?:,|\\,|\{,\}| )(?=\d{3}(?!\d))", "", text).replace("\\", "")
    text = re.sub(r"\s*/\s*|(?<=^-)\s+|(?<=^\$)\s+|\s+(?=%$)", lambda found: found[0].strip(), text.strip())
    text = text.removeprefix("$").removesuffix("%")
    if len(text) > 64 or not _NUMBER.fullmatch(text):
        return None
    try:
        numerator, _, denominator = text.partition("/")
        return Fraction(numerator) / Fraction(denominator or 1)
    except ZeroDivisionError:
        return None


Said = bool | str | None
"""Whether two expressions are equal; None: it takes too long or too much memory; "late": it was not found out, for another reason."""

Waiting = dict[int, Future[Said]]
"""What a process was asked and has not answered, by the request's number."""

Requests = queue.SimpleQueue[bytes | None]
"""Lines for a process, and None at its end."""


class Checker:
    """Comparisons with a limit. The process starts with the first expression that is not a plain number, and ends with this one."""

    def __init__(self, timeout: float, workers: int) -> None:
        """`timeout`: seconds of CPU for one comparison. `workers`: most comparisons at once; more wait."""
        self.timeout, self.workers = timeout, workers
        self._known: OrderedDict[tuple[str, str], bool | None] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: Waiting = {}  # of the process in `_process`, like the next
        self._requests: Requests = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # of the process and what it is asked

    async def equal(self, reply: str, answer: str) -> bool | None:
        """Whether the two are equal; None if that was not found out within the limits of time and memory."""
        if reply == answer:
            return True
        mine, right = to_number(reply), to_number(answer)
        if mine is not None and right is not None and (mine == right or mine.denominator == right.denominator == 1):
            return mine == right
        if not reply or len(reply) > LONGEST:
            return False
        key = (reply, answer)
        if key not in self._known:
            said = await asyncio.wrap_future(self._ask(reply, answer))
            if isinstance(said, str):  # the process died, or a child got no time: once more
                said = await asyncio.wrap_future(self._ask(reply, answer))
            if isinstance(said, str):
                return None  # and not remembered: another rollout may have better luck
            self._known[key] = said
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return self._known[key]

    def _ask(self, reply: str, answer: str) -> Future[Said]:
        future: Future[Said] = Future()
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process, self._waiting, self._requests = self._start()
            process, number = self._process, next(self._numbers)
            self._waiting[number] = future
            self._requests.put(f"{number}\t{json.dumps([reply, answer])}\n".encode())
            if process.poll() is not None:  # its reader may have ended before it saw this request
                _answer(self._waiting, number, LATE)
        return future

    def _start(self) -> tuple[subprocess.Popen[bytes], Waiting, Requests]:
        command = [sys.executable, "-P", str(Path(__file__).with_name("check.py")), str(self.timeout), str(self.workers)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        waiting: Waiting = {}
        requests: Requests = queue.SimpleQueue()
        threading.Thread(target=_write, args=(process, requests), daemon=True, name="rlx-math-ask").start()
        threading.Thread(target=_read, args=(process, waiting, requests), daemon=True, name="rlx-math-check").start()
        weakref.finalize(self, process.kill)
        return process, waiting, requests


def _write(process: subprocess.Popen[bytes], requests: Requests) -> None:
    """Hand requests to the process. It reads none while all its comparisons run, and a pipe holds 64 KB, so this waits in a thread."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        while (line := requests.get()) is not None:
            process.stdin.write(line)
            process.stdin.flush()


def _read(process: subprocess.Popen[bytes], waiting: Waiting, requests: Requests) -> None:
    """Hand the process's answers on. What it has not answered when it ends is late."""
    assert process.stdout is not None
    for line in iter(process.stdout.readline, b""):
        number, said = line.split(b"\t")
        _answer(waiting, int(number), json.loads(said))
    process.wait()
    requests.put(None)
    for number in list(waiting):
        _answer(waiting, number, LATE)


def _answer(waiting: Waiting, number: int, same: Said) -> None:
    future = waiting.pop(number, None)
    if future is not None and future.set_running_or_notify_cancel():
        future.set_result(same)
