"""What a command shows of its run: a live panel on a terminal, plain lines elsewhere, and a closing summary.

Reads only the run directory (status, heartbeats, metrics), so it can watch any run. A subclass says how far its command is (`progress`),
what came out (`results`) and what to do next (`suggestions`).
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlx.checkpoints.folders import steps as checkpoints
from rlx.config.roots import root_of
from rlx.heartbeat import Ages, in_phase, read_heartbeats
from rlx.invocation import program
from rlx.launch.stall import STACKS
from rlx.paths import listed
from rlx.runs.history import History
from rlx.runs.run import Run
from rlx.runs.status import Restart, last_lines
from rlx.terminal import clock, raw, shown

BLOCKS = "▁▂▃▄▅▆▇█"
LINE_INTERVAL = 1.0  # seconds between two plain lines, so that fast runs do not flood a log
SLOW_LINES = 10.0  # seconds between two plain lines while nothing is finished
STOPPED = ("interrupted", "preempted")  # states of a run that was stopped from outside


def sparkline(values: Sequence[float], width: int = 30) -> str:
    """A curve as one line of block characters. If there are more than `width` values, each character is the mean of several."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    return "".join(BLOCKS[min(7, int((v - low) / ((high - low) or 1.0) * 8))] for v in values)


def count(value: float) -> str:
    """`950`, `9.1k` or `2.3M`."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def tell(text: str) -> None:
    """Print a line. A reader that has closed the pipe (`| head`) ends the output, not the run."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@dataclass(frozen=True)
class Progress:
    """How far a command is."""

    what: str  # `step`, or the name of an evaluation
    done: int
    total: int
    details: str  # speeds and scores, in one line
    more: str = ""  # further lines, for a terminal
    left: float | None = None  # seconds


class Display(ABC):
    """Displays one run. Call `update` a few times a second and `close` once."""

    note = ""  # what is to be said of the whole run now: why its job waits
    tail: Sequence[str] = ()  # names of the processes whose last log lines the panel shows

    def __init__(self, run_dir: Path | str, cfg: Any) -> None:
        self.run, self.cfg = Run(Path(run_dir)), cfg
        self.paths = self.run.paths
        self.history = History(self.paths)
        self.started = time.time()
        self._earlier = {name: beat["time"] for name, beat in read_heartbeats(self.paths).items()}  # of an attempt that has ended, or old
        self._ages = Ages()
        self._looked = 0.0
        self._ends: dict[str, str] = {}  # last log lines of the processes in `tail`
        self._attempt: str | None = None  # target of the link logs/latest
        self._begin()
        terminal = Console(file=raw(sys.stdout))
        self._live = Live(console=terminal, auto_refresh=False, transient=True) if sys.stdout.isatty() else None
        if self._live is not None:
            self._live.start()
        self._say(f"run {self.paths.root}")

    def _begin(self) -> None:
        """Forget what was printed of another attempt."""
        self._printed: dict[str, tuple[str, str, float]] = {}  # of each process, and of all (""): what was printed last, its kind, when
        self._news: list[str] = []  # what is unusual now

    @abstractmethod
    def progress(self) -> Progress | None:
        """None until this attempt has begun."""

    @abstractmethod
    def results(self) -> list[tuple[str, str]]:
        """Rows of the closing summary."""

    def suggestions(self) -> list[str]:
        """Commands to go on with, after a run that was completed."""
        return []

    def update(self) -> None:
        """Read new data and display it."""
        self._look()
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
        else:
            self._lines()

    def close(self, exit_code: int) -> None:
        """Display the closing summary."""
        self._look()
        if self._live is not None:
            self._live.stop()
        else:
            self._lines(final=True)
        tell(self.summary(exit_code))

    def summary(self, exit_code: int) -> str:
        """The closing text of a run that ended with `exit_code`."""
        status, root, newest = self.run.status, self.paths.root, ""
        state = "ended" if status is None else status.state
        rows = self.results()
        rows += [("restarted", self._restarted())] if self._restarts() else []
        rows.append(("run", str(root)))
        if state in STOPPED:
            steps = checkpoints(self.paths)
            newest = f"; the newest checkpoint is step {steps[-1]}" if steps else ""
            again = f"--config-dir {shlex.quote(str(root))} --config-name config resume=latest"
            rows.append(("go on", f"{program(root_of(self.cfg).command)} {again}"))
        rows += [("next", line) for line in self.suggestions()] if exit_code == 0 else [("look at", f"{self.paths.latest_logs}/")]
        labels = [label if label != before else "" for (before, _), (label, _) in pairwise([("", ""), *rows])]
        lines = [f"  {label:<9} {text}" for label, (_, text) in zip(labels, rows, strict=True)]
        return "\n".join(["", f"{root.name}: {state}{self._reached()}{newest}, {clock(time.time() - self.started)}", *lines])

    def _reached(self) -> str:
        """How far the run came, in the first line of the summary."""
        return ""

    def _look(self) -> None:
        """Read new data. A new attempt (after a requeue) resets the display, because the old attempt's phases no longer apply."""
        self.history.read()
        link = self.paths.latest_logs
        attempt = os.readlink(link) if link.is_symlink() else None
        if attempt != self._attempt:
            self._attempt = attempt
            self._begin()
        if time.monotonic() - self._looked >= LINE_INTERVAL:
            self._looked = time.monotonic()
            root = self.paths.root
            again = [f"{one.name}: {one.reason}; it starts again (its log: {root / one.log})" for one in self._restarts()]
            news = [self.note, *self._stall(), *again]
            for number, line in enumerate(news):
                if news[: number + 1].count(line) > self._news.count(line):
                    self._say(line)
            self._news = news
            self._ends = {name: line for name in self.tail for line in last_lines(self.paths.latest_logs / f"{name}.log", 1)}

    def _stall(self) -> list[str]:
        """The newest account of a stall."""
        files = sorted(self.paths.latest_logs.glob("stall_*.txt"), key=lambda file: (len(file.name), file.name))
        text = files[-1].read_text().partition(STACKS)[0].strip() if files else ""
        return [*text.splitlines(), f"(stacks: {files[-1]})"] if text else []

    def _restarts(self) -> list[Restart]:
        """Processes that died and were started again."""
        status = self.run.status
        return [] if status is None else status.restarts

    def _say(self, text: str) -> None:
        """Print a plain line; a terminal has the panel instead."""
        if text and self._live is None:
            tell(text)

    def _restarted(self) -> str:
        """Which processes died and were started again, how often, and how the last of them died."""
        restarts = self._restarts()
        counts, last = Counter(one.name for one in restarts), restarts[-1]
        return ", ".join(f"{name} {times} ×" for name, times in sorted(counts.items())) + f"; the last: {last.reason}, {last.log}"

    def _panel(self) -> Any:
        def grid(*rows: Sequence[Any]) -> Table:
            found = Table.grid(padding=(0, 2))
            for row in rows:
                found.add_row(*(Text(shown(cell), overflow="ellipsis", no_wrap=True) if isinstance(cell, str) else cell for cell in row))
            return found

        beats, parts = self._beats(), list[Any]()
        ages = self._ages.look(beats, time.monotonic())
        if (now := self.progress()) is not None:
            bar = ProgressBar(total=max(now.total, 1), completed=now.done, width=30)
            parts.append(grid([f"{now.what} {now.done}/{now.total}", bar, _eta(now)]))
            parts += [Text(shown(now.details)), Text(shown(now.more), style="dim")]
        parts.append(grid(*([name, beat["phase"], clock(in_phase(beat, ages[name]))] for name, beat in beats.items())))
        again = f"started again: {self._restarted()}" if self._restarts() else ""
        parts += [Text(shown(text), style="yellow") for text in (self.note, *self._stall(), again) if text]
        parts += [grid(*([f"{name}.log", line] for name, line in self._ends.items()))] if self._ends else []
        return Panel(Group(*parts), title=Text(shown(f"{self.paths.root.name}  {clock(time.time() - self.started)}")), title_align="left")

    def _beats(self) -> dict[str, dict]:
        """Heartbeats of unfinished processes. Skips files that are as they were before this display: an earlier attempt wrote them."""
        beats = {name: beat for name, beat in read_heartbeats(self.paths).items() if beat["time"] != self._earlier.get(name)}
        if listed(self.paths.initial_model):
            beats.pop("prepare", None)
        return {name: beat for name, beat in beats.items() if beat["phase"] != "done"}

    def _lines(self, final: bool = False) -> None:
        """Print a plain line for what is new: a step, or before the first one what each process does. `final`: the run has ended."""
        now = self.progress()
        if now is None:
            for name, beat in self._beats().items():
                self._line(name, f"{name}: {beat['phase']}", beat["phase"].split(" ")[0], 0.0)
            return
        pause = 0.0 if final or now.done == now.total else LINE_INTERVAL
        self._line("", "   ".join(filter(None, [f"{now.what} {now.done}/{now.total}", now.details, _eta(now)])), str(now.done), pause)

    def _line(self, name: str, line: str, kind: str, pause: float) -> None:
        """Print a line if it is new and the last one was `pause` seconds ago; of the same kind (`warm start 12/250`), `SLOW_LINES`."""
        before, last, then = self._printed.get(name, ("", "", 0.0))
        if line != before and time.time() - then >= (SLOW_LINES if kind == last else pause):
            self._printed[name] = line, kind, time.time()
            tell(f"[{clock(time.time() - self.started)}] {line}")


def _eta(now: Progress) -> str:
    return f"ETA {clock(now.left)}" if now.left is not None and now.done < now.total else ""
