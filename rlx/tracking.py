"""Forwarding `metrics.jsonl`, distributions and samples of rollouts to Weights & Biases and TensorBoard.

Reads what every role has written, so that one process tracks the whole run. `tracking.json` in the run directory keeps, for each
service, up to where the records have been forwarded: the next attempt goes on there, in the same W&B run.
Not for an event loop: both services block. Threads may call it at once.
"""

from __future__ import annotations

import html
import importlib
import json
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from rlx.config.schema import Config, TensorboardConfig, WandbConfig
from rlx.config.secret import hidden
from rlx.metrics import read_metrics
from rlx.paths import RunPaths, write_text

COLUMNS = ("step", "env", "example_id", "group", "member", "prompt", "completion", "answer", "reward", "advantage", "stop", "num_tokens")
DISTRIBUTIONS = {  # field of a record -> name of the histogram of all that were trained on in the step
    "reward": "distribution/reward",
    "advantage": "distribution/advantage",
    "num_tokens": "distribution/completion_length",
}
BINS = 30


class Sink(Protocol):
    """One service. Every `interval` steps it gets the distributions of the step's rollouts, and `samples` of them; 0 is none."""

    name: str  # of the service, in `tracking.json`
    samples: int
    interval: int

    def scalars(self, step: int, values: Mapping[str, float], seconds: float) -> None: ...

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None: ...

    def distributions(self, step: int, values: Mapping[str, np.ndarray]) -> None: ...

    def close(self) -> None: ...


class Progress:
    """`tracking.json`: what each service has been told. Records that a run takes back are forgotten here too (`rlx.runs.rewind`)."""

    def __init__(self, paths: RunPaths) -> None:
        self.path = paths.tracking
        self._services: dict[str, dict[str, Any]] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def offset(self, service: str) -> int:
        """Bytes of `metrics.jsonl` that it has been told."""
        return self._services.get(service, {}).get("forwarded", 0)

    def identity(self, service: str) -> str:
        """The run's id there: made once, kept for all attempts."""
        known = self._services.setdefault(service, {})
        if "id" not in known:
            known["id"] = secrets.token_hex(8)
            self._write()
        return known["id"]

    def forwarded(self, service: str, offset: int) -> None:
        if offset != self.offset(service):
            self._services.setdefault(service, {})["forwarded"] = offset
            self._write()

    def _write(self) -> None:
        write_text(self.path, json.dumps(self._services) + "\n")


class Tracker:
    """All services of a run."""

    def __init__(self, paths: RunPaths, sinks: Sequence[Sink]) -> None:
        self.paths = paths
        self.sinks = sinks
        self._progress = Progress(paths)
        self._alone = threading.Lock()  # one thread forwards while another, whose task was cancelled, still does

    def wants_rollouts(self, step: int) -> bool:
        """Whether `rollouts` would forward anything of this step."""
        return any(step % sink.interval == 0 for sink in self.sinks)

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Forward the rollouts trained on in a step, as `rlx.rollout.record` writes them: all as distributions, some as they are."""
        with self._alone:
            for sink in self.sinks:
                if step % sink.interval != 0 or not records:
                    continue
                values = {name: np.array([r[field] for r in records], dtype=float) for field, name in DISTRIBUTIONS.items()}
                sink.distributions(step, values)
                if sink.samples:
                    sink.rollouts(step, records[: sink.samples])

    def forward(self) -> None:
        """Forward what was written to `metrics.jsonl` since the last call, and what an attempt before this one could not."""
        with self._alone:
            for sink in self.sinks:
                offset = self._progress.offset(sink.name)
                for record, after in read_metrics(self.paths.metrics, offset):
                    step, source, seconds = record.pop("step"), record.pop("source"), record.pop("time")
                    # The stages of the roles share names (time/step), so their records are told apart by source.
                    values = {f"{source}/{name}" if name.startswith(("time/", "perf/")) else name: value for name, value in record.items()}
                    sink.scalars(step, values, seconds)
                    offset = after
                self._progress.forwarded(sink.name, offset)  # after they were: what is repeated is not lost

    def close(self) -> None:
        """Forward the rest and flush; returns when the services have it."""
        self.forward()
        with self._alone:
            for sink in self.sinks:
                sink.close()


def open_tracker(config: Config, paths: RunPaths) -> Tracker | None:
    """The services that `logger` asks for; None when it asks for none. Raises ValueError when a package is missing."""
    sinks: list[Sink] = []
    if config.logger.wandb is not None:
        sinks.append(Wandb(config.logger.wandb, config, paths))
    if config.logger.tensorboard is not None:
        sinks.append(Tensorboard(config.logger.tensorboard, paths))
    return Tracker(paths, sinks) if sinks else None


class Wandb:
    """Weights & Biases. Its files are in the run directory's `wandb/`; `wandb sync` uploads an offline run.

    All attempts of a run are one run there, by the id that is kept in the run directory; a fork has a directory, and an id, of its own.
    """

    name = "wandb"

    def __init__(self, options: WandbConfig, config: Config, paths: RunPaths) -> None:
        wandb = _import("wandb", "wandb")
        self.samples, self.interval = options.samples, options.interval
        self._table, self._histogram, self._teardown = wandb.Table, wandb.Histogram, wandb.teardown
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            mode=options.mode,
            name=config.run.name or paths.root.name,
            id=Progress(paths).identity(self.name),
            resume="allow",
            dir=str(paths.root),
            config=asdict(hidden(config)),
            settings=wandb.Settings(console="off", silent=True),
        )
        # Roles report a step at different times, and W&B's own step may only grow: every metric has `step` as its axis instead.
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
        self._teardown()  # an offline run's file is written by W&B's own process, which `finish` does not wait for


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

    def scalars(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        self._add(step, [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()], seconds)

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        for number, record in enumerate(records):
            # Markdown would read a model's text as markup, so it is escaped and shown as it was written.
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
        raise ValueError(
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
    return " ".join([text, *calls]).strip()
