"""Displays a command that plays and trains nothing (`rlx eval`): a bar of rollouts with the time left, then the table of scores."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.cli.display import Display, clock, count, tell
from rlx.plan.explain import table
from rlx.terminal import shown

SLOW = 10.0  # seconds between two plain lines while nothing is finished


class PlayDisplay(Display):
    """The progress of any such command, from `progress.json`. A command adds its `results`."""

    def __init__(self, run_dir: Path | str, cfg: Any, argv: Sequence[str] = ()) -> None:
        super().__init__(run_dir, cfg, argv)
        self._stale = self._progress_time()  # of an earlier attempt
        self._shown: tuple[str, int] = ("", 0)

    def results(self) -> list[str]:
        """The lines of the closing summary that show what came out."""
        return []

    def _progress_time(self) -> float:
        try:
            return self.paths.progress.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _progress(self) -> Mapping[str, Any] | None:
        """The role's last report in this attempt; None before the first."""
        if self._progress_time() == self._stale:
            return None
        try:
            return json.loads(self.paths.progress.read_text())
        except (OSError, ValueError):
            return None

    def _head(self) -> list[Any]:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self._progress()
        if now is None:
            return []
        head = Table.grid(padding=(0, 2))
        total, done = max(now["total"], 1), now["done"]
        head.add_row(
            Text(shown(f"{now['what']}  {done}/{now['total']} rollouts")), ProgressBar(total=total, completed=done, width=30), eta_of(now)
        )
        return [head, Text(shown(self._details(now)), style="dim")]

    def _details(self, now: Mapping[str, Any]) -> str:
        parts = [f"{self._finished()} of {self.cfg.total_steps} done"] if self.cfg.total_steps > 1 else []
        seconds = max(now["seconds"], 1e-9)
        if now["done"] > now["before"]:
            parts += [f"{(now['done'] - now['before']) / seconds:.1f} rollouts/s"]
            parts += [f"{count(now['tokens'] / seconds)} tok/s"] if now["tokens"] else []
        parts.append(f"{now['in_flight']} in flight" + (f", the oldest for {clock(now['oldest'])}" if now["oldest"] >= SLOW else ""))
        parts += [f"{now['failed']} failed"] if now["failed"] else []
        return "   ".join(parts)

    def _finished(self) -> int:
        return len(self.history.records[self.cfg.counted])

    def _lines(self, final: bool = False) -> None:
        now = self._progress()
        if now is None:
            self._new_phases()
            return
        if now["done"] < now["total"] and 1 < self.cfg.total_steps <= self._finished():
            return  # the last evaluation has ended since it wrote this
        shown = (now["what"], now["done"])
        changed = shown != self._shown
        since = time.time() - self._printed_at
        if (changed and (final or now["done"] == now["total"] or since >= 1.0)) or (not final and since >= SLOW):
            self._shown, self._printed_at = shown, time.time()
            text = f"{now['what']}: {now['done']}/{now['total']} rollouts   {self._details(now)}   {eta_of(now)}".rstrip()
            tell(f"[{clock(time.time() - self.started)}] {text}")

    def summary(self, exit_code: int) -> str:
        status, root = self.run.status, self.paths.root
        state = "ended" if status is None else status.state
        lines = ["", f"{root.name}: {state}, {clock(time.time() - self.started)}", *self.results(), f"  run       {root}"]
        if exit_code != 0:
            lines += [f"  look at   {self.paths.latest_logs}/", "  go on     the same command with resume=latest and the run's run.dir="]
        return "\n".join(lines)


class EvalDisplay(PlayDisplay):
    """`rlx eval`: the table of scores."""

    def results(self) -> list[str]:
        return eval_lines(self.paths.root)


def eval_lines(root: Path) -> list[str]:
    """The table in an evaluation's `summary.json`, and the names of its files; empty if there is none yet."""
    try:
        rows = json.loads((root / "summary.json").read_text())["rows"]
    except (OSError, ValueError, KeyError):
        return []
    lines = [f"  {line}" for line in table(*eval_table(rows))]
    files = [name for name in ("summary.json", "summary.csv", "scores.png") if (root / name).is_file()]
    return [*lines, f"  table     {', '.join(str(root / name) for name in files)}", f"  rollouts  {root / 'eval'}/"]


def eval_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and cells: version, environment, scores with their 95 % intervals, rewards by function, shares of errors and truncations."""
    scores = list(dict.fromkeys(name for row in rows for name in row if "@" in name and not name.endswith(("_low", "_high"))))
    rewards = [name for name in dict.fromkeys(name for row in rows for name in row) if name.startswith("reward/")]
    rewards = rewards if len(rewards) > len({row["env"] for row in rows}) else []  # one function each: its mean is the score
    attested = any("attested" in row for row in rows)
    head = ["step", "env", "examples", *scores, *(name.removeprefix("reward/") for name in rewards), "tokens", "errors", "truncated"]
    head += ["attested"] if attested else []
    cells = []
    for row in rows:
        line = ["base" if row["step"] == 0 else str(row["step"]), row["env"], f"{row['examples']:.0f}"]
        for name in scores:
            low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
            interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
            line.append(f"{row[name]:.3f}{interval}" if name in row else "-")
        line += [f"{row[name]:.3f}" if name in row else "-" for name in rewards]
        tokens = f"{row['completion_mean']:.1f}" if "completion_mean" in row else "-"
        line += [tokens, f"{row['error_frac']:.1%}", f"{row['truncated_frac']:.1%}"]
        line += [f"{row['attested']:.1%}" if "attested" in row else "-"] if attested else []
        cells.append(line)
    return head, cells


def eta_of(now: Mapping[str, Any]) -> str:
    """`ETA 1:23`, from this attempt's own pace; empty before the first rollout is finished."""
    played = now["done"] - now["before"]
    if not played or now["done"] >= now["total"]:
        return ""
    return f"ETA {clock((now['total'] - now['done']) * now['seconds'] / played)}"
