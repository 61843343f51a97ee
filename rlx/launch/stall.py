"""Says what a run waits for when nothing moves, without ending it.

    heartbeats, metrics → `Stillness` (since when nothing has changed) → after launcher.stall_timeout seconds, once for each stall:
    ask every process (`rlx.stacks`), every server → `Seen` records → `account` (pure: records → sentences) → logs/attempt_N/stall_K.txt

The console shows the sentences, because it reads that file. The questions go through files, so processes may run on other hosts.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.descendants import start_time
from rlx.heartbeat import ABSENT, FETCHING, SILENT, in_phase
from rlx.paths import RunPaths, write_text
from rlx.stacks import boot

ANSWER = 8.0  # seconds that the processes have to answer
BY_SIGNAL = 1.0  # seconds that faulthandler has to write its stacks
HTTP = 3.0  # seconds that a server has to answer
COLLECTIVE = ("torch/distributed", "rlx/parallel/")  # a frame in these files: the rank waits for the others
OURS = ("rlx/",)
STACKS = "\nstacks\n"  # between the sentences and the stacks in a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of one process during a stall."""

    name: str
    phase: str = ""  # empty: it sends no heartbeats of its own (an environment's worker)
    in_phase: float = 0.0  # seconds
    silent: float = 0.0  # seconds since its newest heartbeat
    stopped: str = ""  # "process 12 on host a" if a signal has stopped it
    answered: bool = True  # it answered the question
    serves: bool | None = None  # it answered GET /health; None: no server, or it has no address yet
    where: str = ""  # the innermost line of our or the user's code in its main thread
    frames: tuple[str, ...] = ()  # all lines of its main thread, the innermost first
    lines: tuple[str, ...] = ()  # what it says itself
    stack: str = ""

    @property
    def in_collective(self) -> bool:
        """Whether it waits for other trainer ranks."""
        if not self.name.startswith("trainer"):
            return False
        innermost = next((frame for frame in self.frames if any(part in frame for part in (*OURS, *COLLECTIVE))), "")
        return any(part in innermost for part in COLLECTIVE)

    @property
    def waits(self) -> bool:
        """Whether it only waits for other processes."""
        if self.name.startswith("env_"):  # a worker: it waits for answers of the policy, in rlx's own code
            return not any(" at " in line and "/rlx/" not in line for line in self.lines)
        return self.phase.startswith(("waiting", "done", "serving")) or self.in_collective


def account(timeout: float, processes: Sequence[Seen]) -> str:
    """The sentences about a stall: in the first line what is waited for, then one paragraph for each process. Pure."""
    wanted, why = _blamed(processes)
    head = f"no progress for {timeout:g} s (launcher.stall_timeout): " + (
        f"waiting for {' and '.join(each.name for each in wanted)}, {why}" if wanted else "every process waits for another one"
    )
    parts = []
    for each in [*wanted, *(each for each in processes if each not in wanted)]:
        kind = "a worker" if each.name.startswith("env_") else "no heartbeat yet"
        said = [f"{each.phase}, for {each.in_phase:.0f} s" if each.phase else kind]
        said += [f"stopped by a signal: {each.stopped}; continue it with kill -CONT"] if each.stopped else []
        said += [f"silent for {each.silent:.0f} s"] if each.phase and each.silent > SILENT else []
        said += ["does not answer GET /health"] if each.serves is False else []
        said += ["waits for the other ranks"] if each.in_collective else []
        said += [f"at {each.where}"] if each.where and not each.lines else []
        said += ["does not answer"] if not each.answered and not each.stopped else []
        parts.append("\n".join([f"{each.name}: {'; '.join(said)}", *(f"  {line}" for line in each.lines)]))
    return "\n".join([head, *parts])


def _blamed(processes: Sequence[Seen]) -> tuple[list[Seen], str]:
    """The processes that the others wait for, and why it is these. The first rule that finds any wins."""
    rules: list[tuple[Callable[[Seen], bool], tuple[str, str]]] = [
        (lambda each: bool(each.stopped), ("stopped by a signal", "stopped by signals")),
        (lambda each: each.serves is False, ("which does not answer requests", "which do not answer requests")),
        (lambda each: bool(each.phase) and each.silent > SILENT, ("which sends no heartbeats", "which send no heartbeats")),
        (lambda each: not each.answered, ("which does not answer", "which do not answer")),
        (lambda each: not each.waits, ("the only one that does not wait itself", "which do not wait themselves")),
    ]
    for rule, (of_one, of_many) in rules:
        found = [each for each in processes if rule(each)]
        if any(each.name.startswith("env_") for each in found):
            found = [each for each in found if each.name != "orchestrator"]  # it waits for its workers
        if found:
            return found, of_one if len(found) == 1 else of_many
    return [], ""


class Stillness:
    """Notices that nothing moves: the phase, step and progress of every process, and the number of metric records."""

    def __init__(self, timeout: float | None, now: float) -> None:
        self.timeout = timeout
        self.since = now  # monotonic seconds of the last change
        self.stalled = False
        self._marks: object = None

    def look(self, beats: Mapping[str, Mapping[str, Any]], offset: int, now: float) -> str | None:
        """`stalls` once when nothing has moved for `timeout` seconds, `moves` once when something does again, else None."""
        marks = (offset, {name: _mark(beat) for name, beat in beats.items()})
        if marks != self._marks:
            self._marks, self.since = marks, now
            if self.stalled:
                self.stalled = False
                return "moves"
        elif self.timeout is not None and not self.stalled and now - self.since >= self.timeout:
            self.stalled = True
            return "stalls"
        return None


def _mark(beat: Mapping[str, Any]) -> object:
    """What changes in a heartbeat as long as its process gets on. A download counts as moving while its process lives."""
    return beat["time"] if beat["phase"].startswith(FETCHING) else (beat["phase"], beat.get("step"), beat.get("progress"))


class StallDoctor:
    """Watches for stalls and writes their accounts. The examination runs in a thread; `look` never waits."""

    def __init__(self, paths: RunPaths, attempt: int, timeout: float | None, say: Callable[[str], None]) -> None:
        self.paths, self.attempt, self.say = paths, attempt, say
        self.still = Stillness(timeout, time.monotonic())
        self.number = 0  # of the newest stall
        self._thread: threading.Thread | None = None
        self._began = 0.0

    def look(self, beats: Mapping[str, Mapping[str, Any]], ages: Mapping[str, float], offset: int, alive: Sequence[str]) -> None:
        """Look at the heartbeats of the processes `alive`. `ages`: seconds since each beat. `offset`: bytes read of the metrics."""
        now, since = time.monotonic(), self.still.since
        beats = {name: beat for name, beat in beats.items() if name in alive}
        event = self.still.look(beats, offset, now)
        if event == "stalls":
            self.number += 1
            self._began = since
            self._thread = threading.Thread(target=self._examine, args=(dict(beats), dict(ages), alive), name="stall", daemon=True)
            self._thread.start()
        elif event == "moves":
            line = f"progress again, after {now - self._began:.0f} s"
            self.say(line)
            thread = self._thread
            threading.Thread(target=self._append, args=(thread, line), daemon=True).start()

    def _examine(self, beats: Mapping[str, Mapping[str, Any]], ages: Mapping[str, float], alive: Sequence[str]) -> None:
        processes = examine(self.paths, f"{self.attempt}{self.number:03d}", beats, ages, alive)
        text = account(self.still.timeout or 0.0, processes)
        stacks = "\n".join(f"== {each.name}\n{each.stack}" for each in processes if each.stack)
        self.say(text)
        with contextlib.suppress(OSError):  # a full disk; the roles report it
            write_text(self.paths.stall_of(self.attempt, self.number), f"{text}\n{STACKS}\n{stacks}\n")

    def _append(self, thread: threading.Thread | None, line: str) -> None:
        if thread is not None:
            thread.join()
        with contextlib.suppress(OSError):
            file = self.paths.stall_of(self.attempt, self.number)
            write_text(file, f"{file.read_text().replace(STACKS, f'{line}{chr(10)}{STACKS}', 1)}")


def examine(
    paths: RunPaths, question: str, beats: Mapping[str, Mapping[str, Any]], ages: Mapping[str, float], alive: Sequence[str]
) -> list[Seen]:
    """Ask all processes and servers of a run what they do. Takes up to `ANSWER` seconds and a little more."""
    folder = paths.stalls
    known = {file.stem: _read(file) or {} for file in sorted(folder.glob("*.process"))}
    names = [name for name in beats if name in known or name in alive]
    names += [name for name, facts in known.items() if name not in beats and (name in alive or _is_a_child(name, facts))]
    with contextlib.suppress(OSError):
        write_text(folder / "ask", question)
    here = {name: facts["pid"] for name, facts in known.items() if facts and _is_here(facts)}
    serves = {name: answers(paths, name) for name in names if name.startswith("inference_")}
    deadline = time.monotonic() + ANSWER
    found: dict[str, dict[str, Any]] = {}
    stopped: set[str] = set()
    while True:
        stopped = {name for name, pid in here.items() if _state(pid) == "T"}
        there: list[str] = []
        with contextlib.suppress(OSError):
            there = os.listdir(folder)  # no answer is looked up before it is there (`rlx.paths.listed`)
        answers_of = {name: folder / f"{question}_{name}.json" for name in names if name not in found}
        found |= {name: said for name, file in answers_of.items() if file.name in there and (said := _read(file))}
        if time.monotonic() > deadline or all(name in found or name in stopped for name in names):
            break
        slept = time.monotonic()
        time.sleep(0.1)
        gap = time.monotonic() - slept
        deadline += gap if gap > ABSENT else 0.0  # this process was stopped, and perhaps the others with it
    quiet = [name for name in names if name not in found and name in here and name not in stopped]
    files = {name: Path(known[name].get("stacks") or folder / f"{name}.stack") for name in quiet}
    sizes = {name: len(_text(file)) for name, file in files.items()}
    for name in quiet:
        with contextlib.suppress(ProcessLookupError):
            os.kill(here[name], signal.SIGUSR1)
    if quiet:
        time.sleep(BY_SIGNAL)
    dumps = {name: _text(files[name])[sizes[name] :] for name in quiet}
    seen = []
    for name in names:
        beat, said, facts = beats.get(name), found.get(name, {}), known.get(name, {})
        stack, frames = said.get("stack", ""), said.get("frames", [])
        if name in quiet:
            stack = dumps[name]
            frames = frames_of(stack)
        own = next((frame for frame in frames if "/site-packages/" not in frame and "/lib/python" not in frame), "")
        seen.append(
            Seen(
                name=name,
                phase=beat["phase"] if beat else "",
                in_phase=in_phase(beat, ages.get(name, 0.0)) if beat else 0.0,
                silent=ages.get(name, 0.0),
                stopped=f"process {facts['pid']} on {facts['host']}" if name in stopped else "",
                answered=name in found,
                serves=serves.get(name),
                where=said.get("where") or own,
                frames=tuple(frames),
                lines=tuple(said.get("lines", ())),
                stack=stack,
            )
        )
    return seen


def frames_of(stack: str) -> list[str]:
    """`file:line in function` of the thread that faulthandler calls current (the main thread takes signals), the innermost first."""
    found: list[str] = []
    current = False
    for line in stack.splitlines():
        if line.startswith(("Current thread", "Thread")):
            if current:
                break
            current = line.startswith("Current thread")
        elif current and line.startswith('  File "'):
            file, _, rest = line.removeprefix('  File "').partition('", line ')
            number, _, function = rest.partition(" in ")
            found.append(f"{file}:{number} in {function}")
    return found


def answers(paths: RunPaths, name: str) -> bool | None:
    """Whether a server answers GET /health; None if it has not published its address."""
    endpoint = _read(paths.endpoints / f"{name}.json")
    if not endpoint or "url" not in endpoint or "api_key" not in endpoint:
        return None
    request = urllib.request.Request(f"{endpoint['url']}/health", headers={"Authorization": f"Bearer {endpoint['api_key']}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=HTTP) as response:
            return bool(response.status == 200)
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _is_a_child(name: str, facts: Mapping[str, Any]) -> bool:
    """Whether a process that the plan does not list is alive: an environment's worker."""
    return name.startswith("env_") and bool(facts) and (facts["boot"] != boot() or _is_here(facts))


def _is_here(facts: Mapping[str, Any]) -> bool:
    """Whether the process runs on this machine, and its number has not been given to another one."""
    return facts["boot"] == boot() and facts["started"] == start_time(facts["pid"])


def _state(pid: int) -> str:
    """The kernel's letter for the state of a process: `T` is stopped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
