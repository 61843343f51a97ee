"""Forwards `metrics.jsonl`, distributions and sample rollouts to Weights & Biases and TensorBoard.

It reads the records of all roles, so one process tracks the whole run (`tracks`). `tracking.json` in the run directory stores how far each
service has been forwarded; the next attempt continues there, in the same W&B run. Both services block, so do not call it in an event
loop. It is thread-safe.
"""

from __future__ import annotations

import contextlib
import errno
import html
import importlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from rlx.config.roots import root_of
from rlx.config.schema import CommandConfig, Config, EvaluatedRun, TensorboardConfig, TrainingRoot, WandbConfig
from rlx.config.secret import hidden
from rlx.metrics import read_metrics
from rlx.paths import RunPaths, write_text

log = logging.getLogger(__name__)

COLUMNS = ("step", "env", "example_id", "group", "member", "prompt", "completion", "answer", "reward", "advantage", "stop", "num_tokens")
DISTRIBUTIONS = {  # field of a rollout record -> histogram over all rollouts that the step trained on
    "reward": "distribution/reward",
    "advantage": "distribution/advantage",
    "num_tokens": "distribution/completion_length",
}
BINS = 30
INTERVAL = 1.0  # seconds between two looks for new records


class MissingPackage(ValueError):
    """A service's package is not installed. The message says how to install it."""


class Sink(Protocol):
    """One service. Every `interval` steps it gets the distributions of the step's rollouts and `samples` single rollouts (0: none)."""

    name: str  # of the service, in `tracking.json`
    samples: int
    interval: int

    def scalars(self, step: int, values: Mapping[str, float], seconds: float) -> None: ...

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None: ...

    def distributions(self, step: int, values: Mapping[str, np.ndarray]) -> None: ...

    def close(self) -> None: ...


class Progress:
    """`tracking.json`: how far each service has been forwarded. `rlx.runs.rewind` corrects it when it removes records."""

    def __init__(self, paths: RunPaths) -> None:
        self.path = paths.tracking
        self._services: dict[str, dict[str, Any]] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def offset(self, service: str) -> int:
        """Bytes of `metrics.jsonl` that have been forwarded to a service."""
        return self._services.get(service, {}).get("forwarded", 0)

    def identity(self, service: str) -> str:
        """The run's id at a service: created once and kept for all attempts."""
        known = self._services.setdefault(service, {})
        if "id" not in known:
            known["id"] = secrets.token_hex(8)
            self._write()
        return known["id"]

    def forwarded(self, service: str, offset: int) -> None:
        if offset != self.offset(service):
            self._services.setdefault(service, {})["forwarded"] = offset
            self._write()

    def rewound(self, service: str) -> int | None:
        """The first step that a service gets once more, because the run went back to a checkpoint since the last call; None: it did not."""
        step = self._services.get(service, {}).pop("rewound", None)
        if step is not None:
            self._write()
        return step

    def _write(self) -> None:
        write_text(self.path, json.dumps(self._services) + "\n")


class Tracker:
    """All services of a run. None of them ever ends it: one that fails is left alone until the next attempt, and the files go on."""

    def __init__(self, paths: RunPaths, sinks: Sequence[Sink]) -> None:
        self.paths = paths
        self.sinks = list(sinks)
        self._progress = Progress(paths)
        self._alone = threading.Lock()  # a thread whose task was cancelled may still be forwarding when another starts

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

        self._each(send)

    def forward(self) -> None:
        """Forward the new records of `metrics.jsonl`, including those that an earlier attempt could not forward."""

        def send(sink: Sink) -> None:
            offset = self._progress.offset(sink.name)
            for record, after in read_metrics(self.paths.metrics, offset):
                step, source, seconds = record.pop("step"), record.pop("source"), record.pop("time")
                # Roles share stage names (time/step), so the source is added as a prefix.
                values = {f"{source}/{name}" if name.startswith(("time/", "perf/")) else name: value for name, value in record.items()}
                sink.scalars(step, values, seconds)
                offset = after
            self._progress.forwarded(sink.name, offset)  # only after forwarding: a crash may repeat records but not lose them

        self._each(send)

    def close(self) -> None:
        """Forward the remaining records and flush; returns when the services have them."""
        self.forward()
        self._each(lambda sink: sink.close())

    def _each(self, work: Callable[[Sink], None]) -> None:
        with self._alone:
            for sink in list(self.sinks):
                try:
                    work(sink)
                except Exception as error:
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
    wandb, tensorboard = config.logger.wandb, config.logger.tensorboard
    makers: dict[str, Callable[[], Sink] | None] = {
        "wandb": None if wandb is None else lambda: Wandb(wandb, config, paths),
        "tensorboard": None if tensorboard is None else lambda: Tensorboard(tensorboard, paths),
    }
    sinks = []
    for name, make in makers.items():
        try:
            sinks += [] if make is None else [make()]
        except MissingPackage:
            raise
        except Exception as error:
            log.warning("%s cannot be used, so the run's metrics are in its files only: %s: %s", name, type(error).__name__, error)
    return Tracker(paths, sinks) if sinks else None


def tracks(config: TrainingRoot, role: str) -> bool:
    """Whether `role` is the one that forwards the metrics of all roles: the last of the run to end that writes metrics."""
    plays = isinstance(config, EvaluatedRun) and config.plays
    if config.measured == "inference":
        return role == "load_generator"
    return role == ("orchestrator" if isinstance(config, Config) and config.plays else "evaluator" if plays else "trainer")


@contextlib.contextmanager
def tracked(config: CommandConfig, paths: RunPaths, role: str) -> Iterator[None]:
    """Forward the metrics from a thread while the block runs, and what is left at its end, if `role` is the one that does.

    Raises ValueError if a package is missing.
    """
    tracker = open_tracker(config, paths) if isinstance(config, TrainingRoot) and tracks(config, role) else None
    if tracker is None:
        yield
        return
    ended = threading.Event()

    def forward_on() -> None:
        while not ended.wait(INTERVAL):
            tracker.forward()

    thread = threading.Thread(target=forward_on, name="tracker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        tracker.close()


class Wandb:
    """Weights & Biases. Its files are in the run directory's `wandb/`; `wandb sync` uploads an offline run.

    All attempts of a run are one W&B run, through the id stored in the run directory. A fork has its own directory and id.
    """

    name = "wandb"

    def __init__(self, options: WandbConfig, config: TrainingRoot, paths: RunPaths) -> None:
        wandb = _import("wandb", "wandb")
        self.samples, self.interval = options.samples, options.interval
        self._table, self._histogram, self._teardown = wandb.Table, wandb.Histogram, wandb.teardown
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            mode=options.mode,
            group=options.group,
            tags=list(options.tags),
            job_type=root_of(config).command,
            name=config.run.name or paths.root.name,
            id=Progress(paths).identity(self.name),
            resume="allow",
            dir=str(paths.root),
            config=asdict(hidden(config)),
            # W&B's process may start slowly from a network file system.
            settings=wandb.Settings(console="off", silent=True, x_service_wait=300.0),
        )
        # W&B's own step may only grow, but roles report a step at different times. So each metric uses `step` as its axis.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        self._run.log({"step": step, **values})

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        rows = [[step, *(_cell(record.get(column)) for column in COLUMNS[1:])] for record in records]
        self._run.log({"step": step, "rollouts": self._table(columns=list(COLUMNS), data=rows)})

    def distributions(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        histograms = {name: self._histogram(np_histogram=np.histogram(each, bins=BINS)) for name, each in values.items()}
        self._run.log({"step": step, **histograms})

    def close(self) -> None:
        self._run.finish()
        self._teardown()  # waits for W&B's own process, which writes an offline run's file; `finish` does not


class Tensorboard:
    """TensorBoard event files in the run directory's `tensorboard/`, written without TensorFlow or torch."""

    name = "tensorboard"

    def __init__(self, options: TensorboardConfig, paths: RunPaths) -> None:
        writer = _import("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._events = _import("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = _import("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._tensors = _import("tensorboard.compat.proto.tensor_pb2", "tensorboard")
        self._dtypes = _import("tensorboard.compat.proto.types_pb2", "tensorboard")
        self.samples, self.interval = options.samples, options.interval
        self._writer = writer.EventFileWriter(str(paths.root / "tensorboard"))
        if (step := Progress(paths).rewound(self.name)) is not None:  # TensorBoard then forgets what it has from this step on
            session = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, session_log=session))

    def scalars(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        self._add(step, [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()], seconds)

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        for number, record in enumerate(records):
            # Escape the model's text, which Markdown would otherwise read as markup.
            text = "\n".join(f"**{column}**\n<pre>{html.escape(_cell(record.get(column)))}</pre>" for column in COLUMNS[1:])
            tensor = self._tensors.TensorProto(dtype=self._dtypes.DT_STRING, string_val=[text.encode()])
            tensor.tensor_shape.dim.add(size=1)
            plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
            metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
            self._add(step, [self._summaries.Summary.Value(tag=f"rollouts/{number}", metadata=metadata, tensor=tensor)], time.time())

    def distributions(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        histograms = []
        for name, each in values.items():
            counts, edges = np.histogram(each, bins=BINS)
            histogram = self._summaries.HistogramProto(
                min=each.min(),
                max=each.max(),
                num=len(each),
                sum=each.sum(),
                sum_squares=(each**2).sum(),
                bucket_limit=edges[1:].tolist(),
                bucket=counts.tolist(),
            )
            histograms.append(self._summaries.Summary.Value(tag=name, histo=histogram))
        self._add(step, histograms, time.time())

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, values: list, seconds: float) -> None:
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=seconds, step=step, summary=summary))


def _import(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"logger={extra} needs a package that is not installed ({error}); install it with: pip install 'rlx[{extra}]'"
        ) from error


def _cell(value: Any) -> str:
    """A field as text: messages as a short transcript, everything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "role" in item for item in value):
        return "\n".join(f"{message['role']}: {_message(message)}" for message in value)
    return json.dumps(value, ensure_ascii=False, default=repr)


def _message(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    return " ".join([message.get("reasoning_content") or "", text, *calls]).strip()
