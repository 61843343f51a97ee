"""What the displays of all commands have in common: a live panel on a terminal, plain lines elsewhere, and a closing summary.

Reads only the run directory (status, heartbeats, metrics), so it can watch any run.
"""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlx.config.secret import hide_lines
from rlx.heartbeat import Ages, in_phase, read_heartbeats
from rlx.launch.stall import STACKS
from rlx.paths import listed
from rlx.runs.history import History
from rlx.runs.run import Run
from rlx.runs.status import Restart, last_lines
from rlx.terminal import raw, shown

BLOCKS = "▁▂▃▄▅▆▇█"
# Suggested commands omit these: they belong to one run. The API key is omitted because the output may be saved in a public place.
OF_ONE_RUN = ("seed", "run.name", "run.dir", "resume", "clean", "inference.api_key")
LINE_INTERVAL = 1.0  # seconds between two plain lines, so that fast runs do not flood a log
SLOW_LINES = 10.0  # seconds between two plain lines about one phase that moves on


def sparkline(values: list[float], width: int = 30) -> str:
    """A curve as one line of block characters. If there are more than `width` values, each character is the mean of several."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(7, int((v - low) / span * 8))] for v in values)


def clock(seconds: float) -> str:
    """`0:07`, `12:34` or `1:02:03`."""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


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
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class Display(ABC):
    """Displays one run. Call `update` a few times a second and `close` once."""

    note = ""  # what is to be said of the whole run now: why its job waits
    tail: Sequence[str] = ()  # names of the processes whose last log lines the panel shows

    def __init__(self, run_dir: Path | str, cfg: Any, argv: Sequence[str] = ()) -> None:
        """`argv`: the command's arguments, for the suggested commands at the end."""
        self.run, self.cfg, self.argv = Run(Path(run_dir)), cfg, hide_lines(argv, cfg)
        self.paths = self.run.paths
        self.history = History(self.paths)
        self.started = time.time()
        self._earlier = {name: beat["time"] for name, beat in read_heartbeats(self.paths).items()}  # of an attempt that has ended, or old
        self._ages = Ages()
        self._stall, self._looked = "", 0.0  # the newest account of a stall; when it was last looked for
        self._restarts: list[Restart] = []
        self._ends: dict[str, str] = {}  # last log lines of the processes in `tail`
        self._told = ""  # the last note that was printed
        self._phases: dict[str, tuple[str, float]] = {}  # last printed phase of a process, and when
        self._printed_step, self._printed_at = 0, 0.0
        self._attempt: str | None = None  # target of the link logs/latest
        self._live: Any = None
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=raw(sys.stdout)), auto_refresh=False, transient=True)
            self._live.start()
        else:
            tell(f"run {self.paths.root}")

    @abstractmethod
    def _head(self) -> list[Any]:
        """What the panel shows above the processes: rich's renderables; empty until there is progress."""

    @abstractmethod
    def _lines(self, final: bool = False) -> None:
        """Print plain lines about what is new. `final`: the run has ended."""

    @abstractmethod
    def summary(self, exit_code: int) -> str:
        """The closing text of a run that ended with `exit_code`."""

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

    def _look(self) -> None:
        """Read new data. A new attempt (after a requeue) resets the display, because the old attempt's phases no longer apply."""
        self.history.read()
        link = self.paths.latest_logs
        attempt = os.readlink(link) if link.is_symlink() else None
        if attempt != self._attempt:
            self._attempt, self._phases, self._printed_step, self._stall, self._restarts = attempt, {}, 0, "", []
        if time.monotonic() - self._looked >= LINE_INTERVAL:
            self._looked = time.monotonic()
            self._look_for_stalls()
            self._look_for_restarts()
            self._ends = {name: line for name in self.tail for line in last_lines(self.paths.latest_logs / f"{name}.log", 1)}
        if self.note and self.note != self._told and self._live is None:
            tell(self.note)
            self._told = self.note

    def _look_for_stalls(self) -> None:
        """Read the newest account of a stall, and print what is new in it."""
        files = sorted(self.paths.latest_logs.glob("stall_*.txt"), key=lambda file: (len(file.name), file.name))
        text = files[-1].read_text().partition(STACKS)[0].strip() if files else ""
        if text != self._stall:
            new = text.removeprefix(self._stall).strip()
            self._stall = text
            if self._live is None:
                tell(f"{new}\n(stacks: {files[-1]})" if new == text else new)

    def _look_for_restarts(self) -> None:
        """Print which processes died and were started again since the last look."""
        status = self.run.status
        restarts = [] if status is None else status.restarts
        for one in restarts[len(self._restarts) :] if self._live is None else ():
            tell(f"{one.name}: {one.reason}; it starts again\n(its log: {self.paths.root / one.log})")
        self._restarts = restarts

    def _restarted(self) -> str:
        """Which processes died and were started again, how often, and how the last of them died."""
        counts = Counter(one.name for one in self._restarts)
        last = self._restarts[-1]
        return ", ".join(f"{name} {times} ×" for name, times in sorted(counts.items())) + f"; the last: {last.reason}, {last.log}"

    def _panel(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        now = Table.grid(padding=(0, 2))
        beats = self._beats()
        ages = self._ages.look(beats, time.monotonic())
        for name, beat in beats.items():
            now.add_row(Text(shown(name), style="cyan"), Text(shown(beat["phase"])), Text(clock(in_phase(beat, ages[name])), style="dim"))
        rows = [*([Text(shown(self.note), style="yellow")] if self.note else []), *self._head(), now]
        if self._stall:
            rows.append(Text(shown(self._stall), style="yellow" if "\nprogress again" not in self._stall else "dim"))
        if self._restarts:
            rows.append(Text(shown("started again: " + self._restarted()), style="yellow"))
        if self._ends:
            ends = Table.grid(padding=(0, 2))
            ends.add_column(style="cyan", no_wrap=True)
            ends.add_column(style="dim", no_wrap=True, overflow="ellipsis")
            for name, line in self._ends.items():
                ends.add_row(Text(shown(f"{name}.log")), Text(shown(line)))
            rows += [Text(""), ends]
        title = Text(shown(f"{self.paths.root.name}  {clock(time.time() - self.started)}"))
        return Panel(Group(*rows), title=title, title_align="left", border_style="blue")

    def _beats(self) -> dict[str, dict]:
        """Heartbeats of unfinished processes. Skips files that are as they were before this console: an earlier attempt wrote them."""
        beats = {name: beat for name, beat in read_heartbeats(self.paths).items() if beat["time"] != self._earlier.get(name)}
        if listed(self.paths.initial_model):
            beats.pop("prepare", None)
        return {name: beat for name, beat in beats.items() if beat["phase"] != "done"}

    def _new_phases(self) -> None:
        """Print a line for every process whose kind of phase is new: `warm start 12/250` and `warm start 13/250` are one.

        A phase of the same kind that has moved on is printed again every `SLOW_LINES` seconds.
        """
        now = time.monotonic()
        for name, beat in self._beats().items():
            phase, (last, at) = beat["phase"], self._phases.get(name, ("", 0.0))
            if last.split(" ")[0] != phase.split(" ")[0] or (phase != last and now - at >= SLOW_LINES):
                self._phases[name] = (phase, now)
                tell(f"[{clock(time.time() - self.started)}] {name}: {beat['phase']}")
