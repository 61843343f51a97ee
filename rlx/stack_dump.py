"""Answers, in every process of a run, what the process does at this moment, when the supervisor asks because nothing moves.

    supervisor: writes `stalls/ask` (a number)   →   each process: a thread writes `stalls/NUMBER_NAME.json` with the stacks of its threads
                                                                   and what the role itself can say (which rollouts are in flight)
    no answer, same host: SIGUSR1                →   faulthandler writes the stacks to the role's log, even if Python is blocked

Everything goes through files, so a process may run on another host. Imports the standard library alone, besides paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rlx.paths import RunPaths, listed, write_text
from rlx.process import host_name
from rlx.process_tree import start_time

POLL_SECONDS = 2.0  # seconds between two looks for a question
ANSWER_SECONDS = 3.0  # seconds that an event loop has to answer
FOLDER = "RLX_STALLS"  # environment variable: the folder of questions, for processes that a role starts
BLOCKED = "its event loop is blocked"
NOT_SHOWN = ("heartbeat", "stacks")  # names of threads of our own

_explain: list[Callable[[], list[str]]] = []


def explain_with(function: Callable[[], list[str]]) -> None:
    """Let `function` add lines to this process's answers. It is called in a thread."""
    _explain[:] = [function]


def answer(paths: RunPaths, name: str) -> None:
    """Answer the supervisor's questions from now on, as the role `name`. Call it on the main thread, once."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ[FOLDER] = str(paths.stalls)
    answer_in_child(name)


def answer_in_child(name: str, stacks: int = 2) -> None:
    """Answer as the process `name` that a role started. Does nothing if the role does not answer either.

    `stacks`: the file descriptor to which faulthandler writes on SIGUSR1.
    """
    if FOLDER not in os.environ:
        return
    folder = Path(os.environ[FOLDER])
    facts = {"pid": os.getpid(), "started": start_time(os.getpid()), "host": host_name(), "boot": boot(), "stacks": stacks}
    with contextlib.suppress(OSError):  # on a full disk; other writers report it
        write_text(folder / f"{name}.process", json.dumps(facts))
        threading.Thread(target=_answer_on, args=(folder, name), name="stacks", daemon=True).start()


def boot() -> str:
    """Identifies the running kernel: equal in two processes only if both are on one machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def _answer_on(folder: Path, name: str) -> None:
    answered = question(folder)  # one that was asked before this process began
    pause = threading.Event()
    while not pause.wait(POLL_SECONDS):
        asked = question(folder)
        if asked is not None and asked != answered:
            answered = asked
            with contextlib.suppress(OSError):
                write_text(folder / f"{asked}_{name}.json", json.dumps(account()))


def question(folder: Path) -> str | None:
    """The number of the newest question; None if there is none."""
    try:
        return (listed(folder / "ask") and (folder / "ask").read_text().strip()) or None
    except OSError:
        return None


def account() -> dict[str, Any]:
    """What this process does now: `lines` of the role, `where` the main thread is, the `stack` of all threads."""
    lines: list[str] = []
    for function in _explain:
        try:
            lines += function()
        except Exception as error:
            lines.append(f"(what it waits for is not known: {type(error).__name__}: {error})")
    return {"lines": lines, "where": own_line(main_thread()), "stack": "".join(_stacks())}


def main_thread() -> list[str]:
    """`file:line in function` of the main thread's frames, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return [_place(each, line) for each, line in traceback.walk_stack(frame)] if frame is not None else []


def _place(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"


def _stacks() -> Iterator[str]:
    """The stacks of all threads that are not our own, the main thread first."""
    frames = sys._current_frames()
    for thread in sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread()):
        frame = frames.get(thread.ident or 0)
        if frame is not None and thread.name not in NOT_SHOWN:
            yield f"thread {thread.name}\n{''.join(traceback.format_stack(frame))}"


def own_line(frames: Sequence[str], sources: Path | None = None) -> str:
    """The innermost of `frames` that belongs to `sources`; else the innermost that is neither Python's nor an installed package's."""
    theirs = (each for each in frames if sources is not None and each.startswith((f"{sources}:", f"{sources}/")))
    own = (each for each in frames if "/site-packages/" not in each and not each.startswith((sys.base_prefix, "<")))
    return next(theirs, next(own, (list(frames) or [""])[0]))


# tasks of an event loop


def tasks_of(loop: asyncio.AbstractEventLoop, prefix: str = "") -> dict[str, list[str]] | None:
    """Where the tasks wait whose names begin with `prefix` (`awaits`), asked from another thread; None if the loop is blocked."""
    found: dict[str, list[str]] = {}
    done = threading.Event()

    def look() -> None:
        found.update({task.get_name(): awaits(task) for task in asyncio.all_tasks(loop) if task.get_name().startswith(prefix)})
        done.set()

    loop.call_soon_threadsafe(look)
    return found if done.wait(ANSWER_SECONDS) else None


def where_rollouts_wait(loop: asyncio.AbstractEventLoop, sources: Path | None, most: int = 5) -> list[str]:
    """The lines of code at which the rollouts of this process wait, with their numbers."""
    tasks = tasks_of(loop, rollout_name(None))
    if tasks is None:
        return [f"{BLOCKED} at {own_line(main_thread(), sources)}"]
    where = Counter(own_line(frames, sources) for frames in tasks.values())
    return [f"{count} rollout{'s' * (count != 1)} at {line}" for line, count in where.most_common(most)]


def awaits(task: asyncio.Task[Any]) -> list[str]:
    """Where a task waits, through all coroutines that it awaits: the innermost first."""
    found: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            found.insert(0, _place(frame, frame.f_lineno))
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None) or getattr(awaited, "ag_await", None)
    return found


def rollout_name(task: Any, member: int | None = None) -> str:
    """The name of the event loop's task that plays a rollout.

    Without `member` it is how the names of a group's rollouts begin; without `task`, a `rlx.types.Task`, those of all rollouts.
    """
    if task is None:
        return "rollout "
    return f"rollout {task.env} {task.index} {'' if member is None else member}"
