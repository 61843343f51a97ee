"""Forwards `metrics.jsonl`, distributions and sample rollouts to the services of `rlx.trackers`.

It reads the records of all roles, so one process tracks the whole run (`tracks`). `tracking.json` in the run directory stores how far each
service has been forwarded; the next attempt continues there, in the same run of the service. Services block, so a thread forwards.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rlx.config.schema import CommandConfig, Config, EvaluatedRun, TrainingRoot
from rlx.metrics import read_metrics
from rlx.paths import RunPaths
from rlx.trackers import ForwardProgress, MissingPackage, Mlflow, Prometheus, Sink, Tensorboard, Trackio, Wandb

log = logging.getLogger(__name__)

T = TypeVar("T")

DISTRIBUTIONS = {  # field of a rollout record -> histogram over all rollouts that the step trained on
    "reward": "distribution/reward",
    "advantage": "distribution/advantage",
    "num_tokens": "distribution/completion_length",
}
INTERVAL = 1.0  # seconds between two looks for new records
PATIENCE = 60.0  # seconds for one call of a service while the run goes on; the next step's files wait for it
PATIENCE_AT_ENDS = 240.0  # seconds for its start or its end, in which the role sends no heartbeat


def in_time(work: Callable[[], T], seconds: float) -> T:
    """Call it in a thread of its own. Raises its error, or TimeoutError and leaves it behind: some services wait for ever for a server."""
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=call, name="tracker's call", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer in {seconds:g} s")
    return answer.result()


class Tracker:
    """All services of a run. None of them ever ends it or holds it up: one that fails or does not answer is left alone until the next
    attempt, and the files go on."""

    def __init__(self, paths: RunPaths, sinks: Sequence[Sink]) -> None:
        self.paths = paths
        self.sinks = list(sinks)
        self._progress = ForwardProgress(paths)
        self._alone = threading.Lock()  # the rollouts of a step come from another thread than the records

    def wants_rollouts(self, step: int) -> bool:
        """Whether `rollouts` would forward anything for this step."""
        return any(step % sink.interval == 0 for sink in self.sinks)

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Forward the rollouts of a training step (records of `rlx.rollout.record`): all as distributions, some as samples."""

        def send(sink: Sink) -> None:
            if step % sink.interval == 0 and records:
                values = {name: np.array([r[field] for r in records], dtype=float) for field, name in DISTRIBUTIONS.items()}
                sink.distributions(step, values)
                if sink.samples:
                    sink.rollouts(step, records[: sink.samples])

        self._each(lambda sink: in_time(partial(send, sink), PATIENCE))

    def forward(self) -> None:
        """Forward the new records of `metrics.jsonl`, including those that an earlier attempt could not forward. Each has its own time."""

        def send(sink: Sink) -> None:
            offset = self._progress.offset(sink.name)
            for record, after in read_metrics(self.paths.metrics, offset):
                step, source, seconds = record.pop("step"), record.pop("source"), record.pop("time")
                # Roles share stage names (time/step), so the source is added as a prefix.
                values = {f"{source}/{name}" if name.startswith(("time/", "perf/")) else name: value for name, value in record.items()}
                in_time(partial(sink.scalars, step, values, seconds), PATIENCE)
                offset = after
            self._progress.forwarded(sink.name, offset)  # only after forwarding: a crash may repeat records but not lose them

        self._each(send)

    def close(self) -> None:
        """Forward the remaining records and flush; returns when the services have them."""
        self.forward()
        self._each(lambda sink: in_time(sink.close, PATIENCE_AT_ENDS))

    def _each(self, work: Callable[[Sink], None]) -> None:
        with self._alone:
            for sink in list(self.sinks):
                try:
                    work(sink)
                except (Exception, SystemExit) as error:
                    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                        continue  # writers of important files report a full disk; the next round forwards the same records
                    self.sinks.remove(sink)
                    log.warning(
                        "%s failed, and gets no more metrics in this attempt (%s: %s); they are in %s, and the next attempt forwards them",
                        sink.name,
                        type(error).__name__,
                        error,
                        self.paths.metrics,
                    )


def open_tracker(config: TrainingRoot, paths: RunPaths) -> Tracker | None:
    """The tracker for the services in `logger`; `None` if there are none. Raises MissingPackage if a package is missing."""
    makers: dict[str, Callable[..., Sink]] = {
        "wandb": Wandb,
        "tensorboard": Tensorboard,
        "mlflow": Mlflow,
        "trackio": Trackio,
        "prometheus": Prometheus,
    }
    sinks = []
    for name, make in makers.items():
        options = getattr(config.logger, name)
        try:
            sinks += [] if options is None else [in_time(partial(make, options, config, paths), PATIENCE_AT_ENDS)]
        except MissingPackage:
            raise
        except (Exception, SystemExit) as error:
            log.warning("%s cannot be used, so the run's metrics are in its files only: %s: %s", name, type(error).__name__, error)
    return Tracker(paths, sinks) if sinks else None


def tracks(config: TrainingRoot, role: str) -> bool:
    """Whether `role` is the one that forwards the metrics of all roles: the last of the run to end that writes metrics."""
    plays = isinstance(config, EvaluatedRun) and config.generates_rollouts
    if config.bench_target == "inference":
        return role == "load_generator"
    return role == ("orchestrator" if isinstance(config, Config) and config.generates_rollouts else "evaluator" if plays else "trainer")


@contextlib.contextmanager
def tracked(config: CommandConfig, paths: RunPaths, role: str) -> Iterator[Tracker | None]:
    """Forward the metrics from a thread while the block runs, and what is left at its end, if `role` is the one that does.

    Raises ValueError if a package is missing.
    """
    tracker = open_tracker(config, paths) if isinstance(config, TrainingRoot) and tracks(config, role) else None
    if tracker is None:
        yield None
        return
    ended = threading.Event()

    def forward_on() -> None:
        while not ended.wait(INTERVAL):
            tracker.forward()

    thread = threading.Thread(target=forward_on, name="tracker", daemon=True)
    thread.start()
    try:
        yield tracker
    finally:
        ended.set()
        thread.join()
        tracker.close()
