"""Says what every process of a run does when nothing moves, without ending it.

    heartbeats, metrics → nothing has changed for launcher.stall_timeout seconds, once for each stall:
    ask every process (`rlx.stack_dump`), every server → `Seen` records → `account` (pure: records → lines) → logs/attempt_N/stall_K.txt

The console shows the lines, because it reads that file. The questions go through files, so processes may run on other hosts.
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

from rlx.heartbeat import FETCHING, SERVING, SILENT, in_phase
from rlx.paths import RunPaths, listed, write_text
from rlx.process_tree import start_time, state_of
from rlx.stack_dump import BLOCKED, boot

WRITES = 0.5  # seconds that faulthandler has to write
ANSWER = 8.0  # seconds that the processes have to answer
HTTP = 3.0  # seconds that a server has to answer
WAITS = ("waiting", "done", SERVING)  # beginnings of the phases of processes that only wait for others
STACKS = "\nstacks\n"  # between the lines and the stacks in a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of one process during a stall."""

    name: str
    phase: str = ""  # empty: it sends no heartbeats of its own (an environment's worker)
    in_phase: float = 0.0  # seconds
    trouble: str = ""  # why it cannot go on: "stopped by a signal (process 12)", "does not answer"
    where: str = ""  # the innermost line of our or the user's code in its main thread
    lines: tuple[str, ...] = ()  # what it says itself
    stack: str = ""

    @property
    def is_stuck(self) -> bool:
        return bool(self.trouble) or any(line.startswith(BLOCKED) for line in self.lines)


def account(timeout: float, processes: Sequence[Seen]) -> str:
    """The lines about a stall: in the first one who is to be looked at, then one paragraph for each process, these first. Pure."""
    stuck = [each for each in processes if each.is_stuck]
    suspects = stuck or [each for each in processes if each.phase and not each.phase.startswith(WAITS)]
    named = f": see {', '.join(each.name for each in suspects)}" if suspects else ""
    parts = [f"no progress for {timeout:g} s (launcher.stall_timeout){named}"]
    for each in [*suspects, *(each for each in processes if each not in suspects)]:
        said = [f"{each.phase}, for {each.in_phase:.0f} s" if each.phase else "no heartbeat"]
        said += [each.trouble] if each.trouble else []
        said += [f"at {each.where}"] if each.where and not each.lines else []
        parts.append("\n".join([f"{each.name}: {'; '.join(said)}", *(f"  {line}" for line in each.lines)]))
    return "\n".join(parts)


class StallDoctor:
    """Notices that nothing moves: the phase, step and progress of every process, and the number of metric records.

    Writes an account of each stall. The examination runs in a thread; `look` never waits.
    """

    def __init__(self, paths: RunPaths, attempt: int, timeout: float | None, say: Callable[[str], None]) -> None:
        self.paths, self.attempt, self.timeout, self.say = paths, attempt, timeout, say
        self.number = 0  # of the newest stall
        self.since = time.monotonic()  # the last change
        self.stalled = False
        self._marks: object = None

    def look(self, beats: Mapping[str, Mapping[str, Any]], ages: Mapping[str, float], offset: int, alive: Sequence[str]) -> None:
        """Look at the heartbeats of the processes `alive`. `ages`: seconds since each beat. `offset`: bytes read of the metrics."""
        now = time.monotonic()
        beats = {name: beat for name, beat in beats.items() if name in alive}
        marks = (offset, {name: _mark(beat) for name, beat in beats.items()})
        if marks != self._marks:
            if self.stalled:
                self.say(f"progress again, after {now - self.since:.0f} s")
            self._marks, self.since, self.stalled = marks, now, False
        elif self.timeout is not None and not self.stalled and now - self.since >= self.timeout:
            self.stalled = True
            self.number += 1
            threading.Thread(target=self._examine, args=(beats, dict(ages), alive), name="stall", daemon=True).start()

    def _examine(self, beats: Mapping[str, Mapping[str, Any]], ages: Mapping[str, float], alive: Sequence[str]) -> None:
        processes = examine(self.paths, f"{self.attempt}{self.number:03d}", beats, ages, alive)
        text = account(self.timeout or 0.0, processes)
        stacks = "\n".join(f"== {each.name}\n{each.stack}" for each in processes if each.stack)
        self.say(text)
        with contextlib.suppress(OSError):  # a full disk; the roles report it
            write_text(self.paths.stall_of(self.attempt, self.number), f"{text}\n{STACKS}\n{stacks}\n")


def _mark(beat: Mapping[str, Any]) -> object:
    """What changes in a heartbeat as long as its process gets on. A download counts as moving while its process lives."""
    return beat["time"] if beat["phase"].startswith(FETCHING) else (beat["phase"], beat.get("step"), beat.get("progress"))


def examine(
    paths: RunPaths, question: str, beats: Mapping[str, Mapping[str, Any]], ages: Mapping[str, float], alive: Sequence[str]
) -> list[Seen]:
    """Ask all processes and servers of a run what they do. Takes up to `ANSWER` seconds and a little more."""
    known = {file.stem: _read(file) for file in sorted(paths.stalls.glob("*.process"))}
    names = [*beats, *(name for name, facts in known.items() if name not in beats and (name in alive or _is_worker(name, facts)))]
    with contextlib.suppress(OSError):
        write_text(paths.stalls / "ask", question)
    serves = {name: answers(paths, name) for name in names if name.startswith("inference_")}
    here = {name: facts for name, facts in known.items() if name in names and _is_here(facts)}
    asked = {name: paths.stalls / f"{question}_{name}.json" for name in names}

    def is_stopped(name: str) -> bool:
        return name in here and state_of(here[name]["pid"]) == "T"

    deadline = time.monotonic() + ANSWER
    while time.monotonic() < deadline and not all(listed(file) or is_stopped(name) for name, file in asked.items()):
        time.sleep(0.1)
    seen = []
    for name in names:
        beat, said, silent, trouble, stack = beats.get(name), _read(asked[name]), ages.get(name, 0.0), "", ""
        if is_stopped(name):
            trouble = f"stopped by a signal (process {here[name]['pid']} on {here[name]['host']})"
        elif not said and name in here:
            stack = _by_signal(here[name]["pid"], here[name]["stacks"])
        if serves.get(name) is False:
            trouble = trouble or "does not answer GET /health"
        if silent > SILENT:
            trouble = trouble or f"silent for {silent:.0f} s"
        if not said:
            trouble = trouble or "does not answer"
        seen.append(
            Seen(
                name=name,
                phase=beat["phase"] if beat else "",
                in_phase=in_phase(beat, silent) if beat else 0.0,
                trouble=trouble,
                where=said.get("where", ""),
                lines=tuple(said.get("lines", ())),
                stack=said.get("stack", stack),
            )
        )
    return seen


def _by_signal(pid: int, stacks: int) -> str:
    """The stacks that a process writes on SIGUSR1 to one of its files, even if native code holds its interpreter."""
    file = Path(f"/proc/{pid}/fd/{stacks}")
    with contextlib.suppress(OSError):  # it has ended
        if file.is_file():  # a role that somebody started in a terminal writes there
            before = file.stat().st_size
            os.kill(pid, signal.SIGUSR1)
            time.sleep(WRITES)
            return file.read_bytes()[before:].decode(errors="replace")
    return ""


def answers(paths: RunPaths, name: str) -> bool | None:
    """Whether a server answers GET /health; None if it has not published its address."""
    endpoint = _read(paths.endpoints / f"{name}.json")
    if "url" not in endpoint or "api_key" not in endpoint:
        return None
    request = urllib.request.Request(f"{endpoint['url']}/health", headers={"Authorization": f"Bearer {endpoint['api_key']}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=HTTP) as response:
            return bool(response.status == 200)
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _read(file: Path) -> dict[str, Any]:
    """The object in a file; empty if it is not there."""
    return dict(json.loads(_text(file) or "{}"))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_worker(name: str, facts: Mapping[str, Any]) -> bool:
    """Whether a process that the plan does not list is alive: an environment's worker."""
    return name.startswith("env_") and (facts["boot"] != boot() or _is_here(facts))


def _is_here(facts: Mapping[str, Any]) -> bool:
    """Whether the process runs on this machine, and its number has not been given to another one."""
    return facts["boot"] == boot() and facts["started"] == start_time(facts["pid"])
