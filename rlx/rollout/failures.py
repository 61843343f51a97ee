"""Counts what failed in a run, by cause, for the closing lines: rollouts that could not be played, and rewards that raised.

`failures.json` of the run, written after every step since the run's last start:
`{"scored": {env: rollouts}, "raised": {env: rollouts}, "causes": [{"env": …, "what": "environment_error", "count": 38, "first": text}]}`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx.envs.base import RAISED, REWARD_ERROR
from rlx.envs.errors import kind_of_text
from rlx.paths import write_text
from rlx.types import Rollout

MOST = 200  # different causes that are counted by themselves; the rest are counted together by environment
OTHERS = "other causes"
SHOWN = 20  # causes in the file, the most frequent ones


@dataclass
class Failures:
    """The counts since the run's last start."""

    scored: Counter[str] = field(default_factory=Counter)  # rollouts that were played to their end, by environment
    raised: Counter[str] = field(default_factory=Counter)  # of these, the rollouts in which a reward function raised
    causes: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by environment, cause and kind of text
    first: dict[tuple[str, str, str], str] = field(default_factory=dict)  # the first text of each

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Count rollouts, scored or failed."""
        for rollout in rollouts:
            env = rollout.task.env
            raised = rollout.stop == RAISED or bool(rollout.metrics.get(REWARD_ERROR))
            if rollout.status == "ok" or raised:
                self.scored[env] += 1
                self.raised[env] += raised
            if rollout.status == "ok" and not raised:
                continue
            what, text = RAISED if raised else rollout.stop, rollout.error or ""
            cause = (env, what, kind_of_text(text))
            if cause not in self.causes and len(self.causes) >= MOST:
                cause, text = (env, what, OTHERS), OTHERS
            self.causes[cause] += 1
            self.first.setdefault(cause, text)

    def write(self, path: Path) -> None:
        """Write the counts, if anything failed."""
        if not self.causes:
            return
        causes = [
            {"env": cause[0], "what": cause[1], "count": count, "first": self.first[cause]}
            for cause, count in self.causes.most_common(SHOWN)
        ]
        write_text(path, json.dumps({"scored": self.scored, "raised": self.raised, "causes": causes}, indent=1) + "\n")


def in_words(found: Mapping[str, Any], most: int = 3) -> list[str]:
    """The content of `failures.json` for people: the share of rewards that raised, and the most frequent causes."""
    lines = [
        f"{env}: a reward function raised in {count / found['scored'][env]:.1%} of {found['scored'][env]:,} rollouts"
        for env, count in found["raised"].items()
        if count
    ]
    for cause in found["causes"][:most]:
        lines.append(f"{cause['count']:,} × {cause['env']}, {cause['what'].replace('_', ' ')}: {cause['first']}")
    if len(found["causes"]) > most:
        lines.append(f"and {len(found['causes']) - most} other causes")
    return lines
