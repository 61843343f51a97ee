"""Counts what failed in a run, by cause: for the closing lines, and to end a run in which too much fails (`ErrorRate`).

`failures.json` of the run, written after every step since the run's last start:
`{"causes": [{"env": …, "what": "environment_error", "count": 38, "first": text}]}`.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlx.envs.base import RAISED, REWARD_ERROR
from rlx.envs.errors import kind_of_text
from rlx.paths import write_text
from rlx.types import Rollout

MAX_CAUSES = 200  # different causes that are counted by themselves; the rest are counted together by environment
OTHERS = "other causes"
CAUSES_SHOWN = 20  # causes in the file, the most frequent ones
WINDOW = 64  # rollouts of an environment whose share of failures counts, at least; with many in flight it is longer
MIN_FAILURES = 16  # the same until one rollout of it has succeeded: if each takes an hour to fail, 64 are days
OUTCOMES_KEPT = 1 << 14  # ends of rollouts that are remembered for each environment


class RolloutsFailed(RuntimeError):
    """Too many rollouts of an environment failed. The message names the environment, the errors and how often they came."""


class ErrorRate:
    """Ends a run when more than `most` (`orchestrator.max_error_rate`) of an environment's latest rollouts have failed; 1: never.

    A rollout has failed if it has no reward after all retries. Failures often come before successes and whole groups at a time, so the
    rollouts in flight count as successes, and so does what lacks to WINDOW; as long as none has succeeded, to MIN_FAILURES. Where a reward
    function that raises scores 0 (`on_reward_error=zero`), a policy may earn that, so only WINDOW rollouts in a row that raised or failed
    end the run.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self._ended: defaultdict[str, deque[tuple[bool, str]]] = defaultdict(
            lambda: deque(maxlen=OUTCOMES_KEPT)
        )  # whether scored, and what went wrong

    def succeeded(self, env: str, count: int) -> None:
        """Count rollouts of an environment that earlier attempts have finished."""
        self._ended[env].extend([(True, "")] * min(count, OUTCOMES_KEPT))

    def add(self, env: str, rollouts: Iterable[Rollout], in_flight: Callable[[], int] = lambda: 0) -> None:
        """Count rollouts of an environment that have ended. `in_flight`: how many of them have not. Raises RolloutsFailed."""
        for rollout in rollouts:
            if rollout.status == "cancelled":  # another member of its group has failed
                continue
            scored, raised = rollout.status == "ok", bool(rollout.metrics.get(REWARD_ERROR))
            ended = self._ended[env]
            ended.append((scored, f"{RAISED if raised else rollout.stop}: {rollout.error}" if raised or not scored else ""))
            if ended[-1][1] and self.most < 1:
                others = in_flight()
                latest = list(ended)[-max(WINDOW + others, math.ceil(2 * others / (1 - self.most))) :]
                failed, wrong = [text for scored, text in latest if not scored], [text for _, text in latest if text]
                if len(wrong) == len(latest) >= WINDOW + others:
                    failed = wrong
                elif len(failed) <= self.most * (max(len(latest), WINDOW if len(failed) < len(latest) else MIN_FAILURES) + others):
                    continue
                kinds = Counter(map(kind_of_text, failed))
                often = [f"{count} × {next(t for t in failed if kind_of_text(t) == kind)}" for kind, count in kinds.most_common(3)]
                raise RolloutsFailed(
                    f"environment {env}: {len(failed)} of its latest {len(latest)} rollouts failed "
                    f"(orchestrator.max_error_rate={self.most:g}; resume=latest goes on): {'; '.join(often)}"
                )


class Failures:
    """The counts since the run's last start."""

    def __init__(self) -> None:
        self.causes: Counter[tuple[str, str, str]] = Counter()  # by environment, cause and kind of text
        self.first: dict[tuple[str, str, str], str] = {}  # the first text of each

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Count those that failed, or whose reward function raised."""
        for rollout in rollouts:
            raised = rollout.stop == RAISED or bool(rollout.metrics.get(REWARD_ERROR))
            if rollout.status == "ok" and not raised:
                continue
            env, what, text = rollout.task.env, RAISED if raised else rollout.stop, rollout.error or ""
            cause = (env, what, kind_of_text(text))
            if cause not in self.causes and len(self.causes) >= MAX_CAUSES:
                cause, text = (env, what, OTHERS), OTHERS
            self.causes[cause] += 1
            self.first.setdefault(cause, text)

    def write(self, path: Path) -> None:
        """Write the counts, if anything failed."""
        causes = [
            {"env": cause[0], "what": cause[1], "count": count, "first": self.first[cause]}
            for cause, count in self.causes.most_common(CAUSES_SHOWN)
        ]
        if causes:
            write_text(path, json.dumps({"causes": causes}, indent=1) + "\n")


def in_words(found: Mapping[str, Any], most: int = 3) -> list[str]:
    """The content of `failures.json` for people: the most frequent causes."""
    causes = found["causes"]
    lines = [f"{one['count']:,} × {one['env']}, {one['what'].replace('_', ' ')}: {one['first']}" for one in causes[:most]]
    return [*lines, f"and {len(causes) - most} other causes"] if len(causes) > most else lines
