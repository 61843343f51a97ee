"""Displays a command that plays and trains nothing (`rlx eval`, `rlx synthesize`): a bar of rollouts with the time left, then the table of
scores, or what was kept as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.cli.display import SLOW_LINES, Display, Progress, count
from rlx.invocation import program, short
from rlx.plan.explain import table
from rlx.rollout.failures import in_words
from rlx.rollout.sft_export import METADATA
from rlx.terminal import clock


class PlayDisplay(Display):
    """The progress of any such command, from `progress.json`, and its results."""

    def progress(self) -> Progress | None:
        now = self._read(self.paths.progress)
        if now is None:
            return None
        played, seconds = now["done"] - now["before"], max(now["seconds"], 1e-9)
        total = self.cfg.total_steps
        parts = [f"{len(self.history.records[self.cfg.progress_source])} of {total} done"] if total > 1 else []
        parts += [f"{played / seconds:.1f} rollouts/s", f"{count(now['tokens'] / seconds)} tok/s"] if played else []
        oldest = f", the oldest for {clock(now['oldest'])}" if now["oldest"] >= SLOW_LINES else ""
        parts += [f"{now['in_flight']} in flight{oldest}"]
        parts += [f"{now['failed']} failed"] if now["failed"] else []
        left = (now["total"] - now["done"]) * seconds / played if played else None  # at this attempt's own pace
        return Progress(f"{now['what']}: rollouts", now["done"], now["total"], "   ".join(parts), left=left)

    def _read(self, file: Path) -> Any:
        """The content of a file that this attempt has written; None before that."""
        try:
            return json.loads(file.read_text(encoding="utf-8")) if file.stat().st_mtime >= self.started - 1 else None
        except (OSError, ValueError):
            return None

    def results(self) -> list[tuple[str, str]]:
        rows, root = [], self.paths.root
        if (summary := self._read(root / "summary.json")) is not None:
            rows += [("scores", line) for line in table(*eval_table(summary["rows"]))]
            files = [name for name in ("summary.json", "summary.csv") if (root / name).is_file()]
            rows += [("table", ", ".join(str(root / name) for name in files)), ("rollouts", f"{root / 'eval'}/")]
        if (metadata := self._data()) is not None:
            rows += kept(metadata)
        if (failures := self._read(self.paths.failures)) is not None:
            rows += [("failures", line) for line in in_words(failures)]
        return rows

    def _data(self) -> Any:
        """What `rlx synthesize` says of its data."""
        return self._read(self.paths.synthesized.with_name(METADATA))

    def suggestions(self) -> list[str]:
        if self._data() is None:
            return []
        again = f"{program('synthesize')} --config-dir {short(self.paths.root)} --config-name config resume=latest"
        data = short(self.paths.synthesized)
        return [
            f"{program('sft')} data.name={data} model=… seq_len={self.cfg.seq_len}   # train on it",
            f"{again} play=false min_reward=…   # choose again; plays nothing",
        ]


def eval_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and cells: version, environment, scores with their 95 % intervals, rewards by function, shares of errors and truncations."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    scores = [name for name in names if "@" in name and not name.endswith(("_low", "_high"))]
    rewards = [name for name in names if name.startswith("reward/")]
    rewards = rewards if len(rewards) > len({row["env"] for row in rows}) else []  # one function each: its mean is the score
    shares = {"error_frac": "errors", "truncated_frac": "truncated"} | ({"attested": "attested"} if "attested" in names else {})

    def cell(row: Mapping[str, Any], name: str, form: str = ".3f") -> str:
        ends = [row.get(f"{name}_low"), row.get(f"{name}_high")]
        interval = f" [{ends[0]:.3f}, {ends[1]:.3f}]" if None not in ends else ""
        return f"{row[name]:{form}}{interval}" if name in row else "-"

    head = ["step", "env", "examples", *scores, *(name.removeprefix("reward/") for name in rewards), "tokens", *shares.values()]
    cells = [
        [
            *(str(row["step"] or "base"), row["env"], cell(row, "examples", ".0f")),
            *(cell(row, name) for name in (*scores, *rewards)),
            cell(row, "completion_mean", ".1f"),
            *(cell(row, name, ".1%") for name in shares),
        ]
        for row in rows
    ]
    return head, cells


def kept(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What `metadata.json` says about the rollouts and the file of data."""
    rollouts, examples, reward = metadata["rollouts"], metadata["examples"], metadata["reward"]
    means = {which: "" if reward[which] is None else f", mean reward {reward[which]:.3f}" for which in ("played", "kept")}
    rows = [(which, f"{rollouts[which]} rollouts of {examples[which]} examples{means[which]}") for which in means]
    rows.append(("dropped", ", ".join(f"{number} {cause}" for cause, number in rollouts["dropped"].items()) or "none"))
    rows += [("data", f"{short(Path(metadata['file']))}: {metadata['rows']} rows")] if metadata["file"] else []
    raw = f"{metadata['raw_text_rows']} rows are raw text: `rlx sft` trains them as a user's message and its answer, in the chat format"
    return [*rows, ("note", raw)] if metadata["raw_text_rows"] else rows
