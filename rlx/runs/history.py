"""The growing metrics of a run, by source and step, and summaries of them. Reads only `metrics.jsonl` and `start.json`."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from rlx.checkpoints.folders import read_start
from rlx.metrics import read_metrics
from rlx.paths import RunPaths

AVERAGE = re.compile(r"eval/[^/]+/avg@\d+")
LAST_STEPS = 5  # the reward of one batch is noisy
SPEEDS = {
    "perf/inference_tokens_per_second": ("orchestrator", ("time/step",)),
    "perf/tokens_per_second": ("trainer", ("time/forward_backward", "time/optimizer")),
}
"""Rates by name, with their source and the seconds of a step that they count."""


class History:
    """The metrics of a run read so far. When the run returns to a checkpoint, the removed records disappear here too."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.counted = "trainer"  # the source whose records are the finished steps
        self._forget()

    def _forget(self) -> None:
        self.records: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)  # source -> step -> record
        self._offset = 0  # bytes read
        self._inode: int | None = None
        self.first = 0  # the first step of this attempt

    def read(self) -> None:
        """Read the records appended since the last call, or the whole file if it was replaced."""
        try:
            stat = self.paths.metrics.stat()
        except FileNotFoundError:
            self._forget()
            stat = None
        if stat is not None and (stat.st_size < self._offset or self._inode not in (None, stat.st_ino)):
            self._forget()
        self._inode = stat.st_ino if stat is not None else None
        start = read_start(self.paths)
        self.first = start.step if start is not None else 0
        for record, offset in read_metrics(self.paths.metrics, self._offset):
            self.records[record["source"]][record["step"]] = record
            self._offset = offset

    @property
    def steps(self) -> int:
        """Finished steps, in all attempts."""
        return max(self.records[self.counted], default=-1) + 1

    @property
    def begun(self) -> bool:
        """Whether this attempt has written a record. Until then, the newest values are those of an earlier attempt."""
        return any(step >= self.first for source in (self.counted, "orchestrator") for step in self.records[source])

    def series(self, name: str, source: str, first: int = 0) -> list[float]:
        """All values of one metric from step `first` on, ordered by step."""
        return [r[name] for step, r in sorted(self.records[source].items()) if name in r and step >= first]

    def last(self, name: str, source: str, over: int = 1) -> float | None:
        """Mean of this attempt's last `over` values; `None` if there are none."""
        values = self.series(name, source, self.first)[-over:]
        return sum(values) / len(values) if values else None

    def trained(self, name: str, source: str) -> float | None:
        """The value of the step that the trainer finished last: the orchestrator is ahead of it. Before the first one, the newest value."""
        value = self.records[source].get(self.steps - 1, {}).get(name) if self.steps > self.first else None
        return self.last(name, source) if value is None else value

    def speed(self, name: str, over: int | None = None, first: int | None = None) -> float | None:
        """One of `SPEEDS` over this attempt's last `over` steps, or over all from step `first` on: what was done by the seconds it took.

        It is not the mean of the steps' speeds, in which a step of 0.1 s would count as much as one of 10 s. `None` if there are no steps.
        """
        source, times = SPEEDS[name]
        steps = [r for step, r in sorted(self.records[source].items()) if step >= (self.first if first is None else first)]
        known = [(r[name], sum(r[time] for time in times)) for r in steps if all(each in r for each in (name, *times))]
        known = known[-over:] if over is not None else known
        seconds = sum(each for _, each in known)
        return sum(rate * each for rate, each in known) / seconds if seconds else None

    def steps_per_second(self, over: int = 10) -> float | None:
        """Finished steps per second over the last `over` of this attempt; `None` if it cannot be computed yet."""
        times = self.series("time", self.counted, self.first)[-over - 1 :]
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None

    def scores(self, first: int = 0) -> dict[str, dict[int, float]]:
        """`avg@n` of every evaluated environment, by its name and the step, from step `first` on: `{"math avg@4": {0: 0.1, 20: 0.4}}`."""
        found: dict[str, dict[int, float]] = defaultdict(dict)
        for step, record in sorted(self.records["eval"].items()):
            for name, value in record.items():
                if step >= first and AVERAGE.fullmatch(name):
                    found[name.removeprefix("eval/").replace("/", " ")][step] = value
        return found

    @property
    def final_reward(self) -> float | None:
        """Mean of `reward/mean` over the last five steps; `None` if there is no step."""
        last = self.series("reward/mean", "orchestrator")[-LAST_STEPS:]
        return sum(last) / len(last) if last else None


def final_reward(paths: RunPaths) -> float | None:
    """The final reward of a run (`History.final_reward`)."""
    history = History(paths)
    history.read()
    return history.final_reward
