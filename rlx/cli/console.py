"""Displays a run: a live summary on a terminal, plain lines elsewhere, and a closing summary.

Reads only the run directory (status, heartbeats, metrics), so it can watch any run.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlx.checkpoints.best import best_of
from rlx.config.schema import Config
from rlx.heartbeat import Ages, in_phase, read_heartbeats
from rlx.launch.stall import STACKS
from rlx.rollout.failures import in_words
from rlx.runs.history import History
from rlx.runs.run import Run
from rlx.runs.status import Restart

BLOCKS = "▁▂▃▄▅▆▇█"
STAGES = {  # source -> metric -> displayed name
    "trainer": {
        "time/wait_batch": "wait for batch",
        "time/forward_backward": "forward and backward",
        "time/optimizer": "optimizer",
        "time/broadcast": "gather weights",
    },
    "orchestrator": {
        "time/wait_rollouts": "wait for rollouts",
        "time/wait_weights": "wait for weights",
        "time/update_weights": "update servers",
    },
}
# Suggested commands omit these: they belong to one run. The API key is omitted because the output may be saved in a public place.
OF_ONE_RUN = ("seed", "run.name", "run.dir", "resume", "clean", "inference.api_key")
LINE_INTERVAL = 1.0  # seconds between two plain lines, so that fast runs do not flood a log


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


def started_as(executable: str, script: str) -> str:
    """The command that starts this program again from this directory: `python train.py`, `rlx train`, or with paths where needed."""
    if Path(script).suffix != ".py":  # installed as a command
        return f"{_short(script)} train"
    of_package = Path(script).name == "__main__.py"
    return f"{_short(executable)} {'-m rlx.cli train' if of_package else shlex.quote(script)}"


def _short(program: str) -> str:
    """The shortest name that finds a program from here."""
    name, here = Path(program).name, os.getcwd() + os.sep
    for short in (name, "python"):
        if (found := shutil.which(short)) and os.path.abspath(found) == os.path.abspath(program):
            return short
    return shlex.quote(program.removeprefix(here))


class Console:
    """Displays one run. Call `update` a few times a second and `close` once."""

    def __init__(self, run_dir: Path | str, cfg: Config, argv: Sequence[str] = ()) -> None:
        """`argv`: the command's arguments, for the suggested commands at the end."""
        self.run, self.cfg, self.argv = Run(Path(run_dir)), cfg, list(argv)
        self.paths = self.run.paths
        self.history = History(self.paths)
        self.started = time.time()
        self._earlier = {name: beat["time"] for name, beat in read_heartbeats(self.paths).items()}  # of an attempt that has ended, or old
        self._ages = Ages()
        self._stall, self._looked = "", 0.0  # the newest account of a stall; when it was last looked for
        self._restarts: list[Restart] = []
        self._phases: dict[str, str] = {}
        self._printed_step, self._printed_at = 0, 0.0
        self._attempt: str | None = None  # target of the link logs/latest
        self._live: Any = None
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(auto_refresh=False, transient=True)
            self._live.start()
        else:
            print(f"run {self.paths.root}", flush=True)

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
        print(self.summary(exit_code), flush=True)

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

    def _look_for_stalls(self) -> None:
        """Read the newest account of a stall, and print what is new in it."""
        files = sorted(self.paths.latest_logs.glob("stall_*.txt"), key=lambda file: (len(file.name), file.name))
        text = files[-1].read_text().partition(STACKS)[0].strip() if files else ""
        if text != self._stall:
            new = text.removeprefix(self._stall).strip()
            self._stall = text
            if self._live is None:
                print(f"{new}\n(stacks: {files[-1]})" if new == text else new, flush=True)

    def _look_for_restarts(self) -> None:
        """Print which processes died and were started again since the last look."""
        status = self.run.status
        restarts = [] if status is None else status.restarts
        for one in restarts[len(self._restarts) :] if self._live is None else ():
            print(f"{one.name}: {one.reason}; it starts again\n(its log: {self.paths.root / one.log})", flush=True)
        self._restarts = restarts

    # live, on a terminal

    def _panel(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        steps, total = self.history.steps, self.cfg.max_steps
        rows: list[Any] = []
        if self.history.begun:
            pace = self.history.steps_per_second()
            head = Table.grid(padding=(0, 2))
            eta = f"ETA {clock((total - steps) / pace)}" if pace else ""
            head.add_row(
                f"step [bold]{steps}[/]/{total}",
                ProgressBar(total=total, completed=steps, width=30),
                f"{pace:.2f} steps/s" if pace else "",
                eta,
            )
            rows += [head, Text.from_markup(self._numbers(markup=True)), Text(self._stages(), style="dim")]
        now = Table.grid(padding=(0, 2))
        beats = self._beats()
        ages = self._ages.look(beats, time.monotonic())
        for name, beat in beats.items():
            now.add_row(Text(name, style="cyan"), Text(beat["phase"]), Text(clock(in_phase(beat, ages[name])), style="dim"))
        rows.append(now)
        if self._stall:
            rows.append(Text(self._stall, style="yellow" if "\nprogress again" not in self._stall else "dim"))
        if self._restarts:
            rows.append(Text("started again: " + self._restarted(), style="yellow"))
        title = f"{self.paths.root.name}  {clock(time.time() - self.started)}"
        return Panel(Group(*rows), title=title, title_align="left", border_style="blue")

    def _beats(self) -> dict[str, dict]:
        """Heartbeats of unfinished processes. Skips files that are as they were before this console: an earlier attempt wrote them."""
        beats = {name: beat for name, beat in read_heartbeats(self.paths).items() if beat["time"] != self._earlier.get(name)}
        if self.paths.initial_model.exists():
            beats.pop("prepare", None)
        return {name: beat for name, beat in beats.items() if beat["phase"] != "done"}

    def _numbers(self, markup: bool = False) -> str:
        """Reward, lag and speed of the last steps."""
        h = self.history
        reward = h.last("reward/mean", "orchestrator")
        parts = []
        if reward is not None:
            text = f"reward {reward:.3f}"
            curve = sparkline(h.series("reward/mean", "orchestrator")) if markup else ""
            parts.append(f"[bold]{text}[/] [green]{curve}[/]" if markup else text)
        for name, values in h.scores(h.first).items():
            step = max(values)
            parts.append(f"eval {name} {values[step]:.3f} (step {step})")
        lag, lag_max = h.last("off_policy/lag_mean", "trainer"), h.last("off_policy/lag_max", "trainer")
        if lag is not None and lag_max is not None:
            parts.append(f"lag {lag:.1f} (max {lag_max:.0f})")
        sampled = h.last("perf/inference_tokens_per_second", "orchestrator", over=5)
        trained = h.last("perf/tokens_per_second", "trainer", over=5)
        if sampled is not None:
            parts.append(f"{count(sampled)} tok/s sampled")
        if trained is not None:
            parts.append(f"{count(trained)} tok/s trained")
        return "   ".join(parts)

    def _stages(self) -> str:
        """Mean seconds of each stage over the last steps; they show which role waits for the other."""
        parts = []
        for source, stages in STAGES.items():
            values = [(label, self.history.last(name, source, over=5)) for name, label in stages.items()]
            shown = " · ".join(f"{label} {value:.2f} s" for label, value in values if value is not None)
            if shown:
                parts.append(f"{source}: {shown}")
        return "\n".join(parts)

    # plain lines

    def _lines(self, final: bool = False) -> None:
        steps = self.history.steps
        if steps <= self.history.first:
            for name, beat in self._beats().items():
                kind = beat["phase"].split(" ")[0]  # `warm start 12/250` and `warm start 13/250` are one phase
                if self._phases.get(name) != kind:
                    self._phases[name] = kind
                    print(f"[{clock(time.time() - self.started)}] {name}: {beat['phase']}", flush=True)
            return
        now = time.time()
        if steps > self._printed_step and (final or steps == self.cfg.max_steps or now - self._printed_at >= LINE_INTERVAL):
            self._printed_step, self._printed_at = steps, now
            pace = self.history.steps_per_second()
            eta = f"   {pace:.2f} steps/s   ETA {clock((self.cfg.max_steps - steps) / pace)}" if pace else ""
            print(f"[{clock(now - self.started)}] step {steps}/{self.cfg.max_steps}   {self._numbers()}{eta}", flush=True)

    # the end

    def summary(self, exit_code: int) -> str:
        """The closing text of a run that ended with `exit_code`."""
        h, root = self.history, self.paths.root
        status = self.run.status
        state = "ended" if status is None else status.state
        lines = ["", f"{root.name}: {state} after {h.steps} of {self.cfg.max_steps} steps, {clock(time.time() - self.started)}"]
        rewards = h.series("reward/mean", "orchestrator")
        if rewards:
            first, last = rewards[:5], rewards[-5:]
            start, end = sum(first) / len(first), sum(last) / len(last)
            lines.append(f"  reward    {start:.3f} → {end:.3f}  {sparkline(rewards)}  (means of the first and last {len(last)} steps)")
        lines += self._evaluations()
        for source, stages in STAGES.items():
            total = sum(h.series("time/step", source))
            if not total:
                continue
            shares = [(label, sum(h.series(name, source)) / total) for name, label in stages.items()]
            shown = " · ".join(f"{label} {share:.0%}" for label, share in sorted(shares, key=lambda s: -s[1]) if share >= 0.005)
            lines.append(f"  time      {source} {clock(total)}: {shown}")
        sampled, trained = (
            h.last("perf/inference_tokens_per_second", "orchestrator", 10**9),
            h.last("perf/tokens_per_second", "trainer", 10**9),
        )
        pace = h.steps_per_second(over=10**9)
        if sampled is not None and trained is not None and pace is not None:
            lines.append(f"  speed     {pace:.2f} steps/s · {count(sampled)} tokens/s sampled · {count(trained)} tokens/s trained")
        drops = self._drops()
        lines.append(f"  dropped   {', '.join(f'{n:.0f} {cause}' for cause, n in drops.items()) or 'no rollout'}")
        if status is not None and status.restarts:
            self._restarts = status.restarts
            lines.append(f"  restarted {self._restarted()}")
        if self.paths.failures.exists():
            failures = in_words(json.loads(self.paths.failures.read_text()))
            lines += [f"{'  failed    ' if n == 0 else ' ' * 12}{line}" for n, line in enumerate(failures)]
        if self.paths.kernels.exists():
            kernels = json.loads(self.paths.kernels.read_text())
            lines.append(f"  kernels   log-probabilities by {kernels['logprob']} · Liger's layer kernels {kernels['layers']}")
            lines += [f"  warning   {kernels['warning']}"] if "warning" in kernels else []
        lines.append(f"  run       {root}")
        lines += self._next(exit_code)
        return "\n".join(lines)

    def _evaluations(self) -> list[str]:
        """The first and the last evaluation of each environment, and the checkpoint that `ckpt.keep_best` keeps."""
        lines = []
        for name, values in self.history.scores().items():
            first, last = min(values), max(values)
            metric = f"eval/{name.replace(' ', '/')}"
            record = self.history.records["eval"][last]
            ends = [record[end] for end in (f"{metric}_low", f"{metric}_high") if end in record]
            interval = f"  [{ends[0]:.3f}, {ends[1]:.3f}]" if len(ends) == 2 else ""
            start = f"{values[first]:.3f} → " if first != last else ""
            lines.append(f"  eval      {name}: {start}{values[last]:.3f} at step {last}{interval}")
        if self.cfg.ckpt.keep_best is not None and (best := best_of(self.paths, self.cfg.ckpt.keep_best)) is not None:
            value, step = best
            lines.append(f"  best      {self.cfg.ckpt.keep_best} {value:.3f}: {self.paths.checkpoint_of(step)}")
        return lines

    def _restarted(self) -> str:
        """Which processes died and were started again, how often, and how the last of them died."""
        counts = Counter(one.name for one in self._restarts)
        last = self._restarts[-1]
        return ", ".join(f"{name} {times} ×" for name, times in sorted(counts.items())) + f"; the last: {last.reason}, {last.log}"

    def _drops(self) -> dict[str, float]:
        records = self.history.records["orchestrator"]
        if not records:
            return {}
        last = records[max(records)]
        prefixes = ("rollouts/dropped_", "rollouts/failed_")
        return {name.split("/", 1)[1].replace("_", " "): value for name, value in last.items() if name.startswith(prefixes) and value}

    def _next(self, exit_code: int) -> list[str]:
        root = self.paths.root
        if exit_code != 0:
            return [f"  look at   {self.paths.latest_logs}/"]
        train, python = started_as(sys.executable, sys.argv[0]), _short(sys.executable)
        kept = [part for part in self.argv if part.lstrip("+").partition("=")[0] not in OF_ONE_RUN or _is_fork(part)]
        suggestions = [
            (f"{train} {shlex.join([*kept, f'seed={self.cfg.seed + 1}'])}", "another seed"),
            (f"bash {shlex.quote(str(root / 'reproduce.sh'))}", "the same run again"),
        ]
        if self.run.rollouts:  # a replay has none, nor a run with orchestrator.save_rollouts=false
            suggestions.append((f"{python} -m rlx.cli view {shlex.quote(str(root))}", "what the policy wrote, rollout by rollout"))
        return [f"{'  next      ' if n == 0 else ' ' * 12}{command}   # {what}" for n, (command, what) in enumerate(suggestions)]


def _is_fork(part: str) -> bool:
    """Whether `resume=` names another run's checkpoint, which the suggested run can also start from."""
    key, _, value = part.partition("=")
    return key == "resume" and value not in ("latest", "null", "") and not value.isdecimal()
