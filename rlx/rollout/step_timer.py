"""The orchestrator's wall-clock metrics. They need only the collector's counters."""

from __future__ import annotations

import time

from rlx.rollout.collector import Collector


class StepClock:
    """Measures each step from the end of the step before."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.waited = 0.0
        self._mark()
        self._began_waiting = time.monotonic()

    def _mark(self) -> None:
        self._time, self._cpu = time.monotonic(), time.process_time()
        self._finished, self._tokens = self.collector.tally.finished, self.collector.tally.tokens
        self._for_weights = self.collector.waited_for_weights

    def collected(self) -> None:
        """A batch of rollouts is complete."""
        self.waited = time.monotonic() - self._began_waiting - (self.collector.waited_for_weights - self._for_weights)

    def step(self) -> dict[str, float]:
        """End the step, begin the next one and return the metrics of the one that ended."""
        seconds, cpu = time.monotonic() - self._time, time.process_time() - self._cpu
        finished, tokens = self.collector.tally.finished - self._finished, self.collector.tally.tokens - self._tokens
        values = {
            "time/step": seconds,
            "time/wait_rollouts": max(0.0, self.waited),
            "time/wait_weights": self.collector.waited_for_weights - self._for_weights,
            "perf/rollouts_per_second": finished / seconds,
            "perf/inference_tokens_per_second": tokens / seconds,
            "perf/in_flight": self.collector.in_flight,
            "perf/max_concurrent": self.collector.max_concurrent,
            "perf/cpu_ms_per_rollout": 1000 * cpu / max(finished, 1),
        }
        self._mark()
        self._began_waiting = self._time
        return values
