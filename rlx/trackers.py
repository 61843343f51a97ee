"""The services that a run's metrics are forwarded to: Weights & Biases, TensorBoard, MLflow, Trackio, and a page for Prometheus.

Each is a `Sink` around the service's own library. `rlx.tracking` forwards to them.
"""

from __future__ import annotations

import hmac
import html
import importlib
import json
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from socketserver import ThreadingMixIn
from types import ModuleType
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import numpy as np

from rlx.config.roots import root_of
from rlx.config.schema import TrainingRoot
from rlx.config.schema_launch import MlflowConfig, PrometheusConfig, TensorboardConfig, TrackioConfig, WandbConfig
from rlx.config.secret import redacted
from rlx.paths import RunPaths, atomic, write_text

COLUMNS = ("step", "env", "example_id", "group", "member", "prompt", "completion", "answer", "reward", "advantage", "stop", "num_tokens")
BINS = 30
FIRST = re.compile(
    r"reward/mean|eval/.+/avg@\d+|loss/nll|val/loss|policy/entropy|optim/grad_norm|mismatch/kl|off_policy/lag_mean"
    r"|length/(completion_mean|truncated_frac)|trainer/(time/step|perf/tokens_per_second)"
)  # what one looks at first


class MissingPackage(ValueError):
    """A service's package is not installed. The message says how to install it."""


class Sink(Protocol):
    """One service. Every `interval` steps it gets the distributions of the step's rollouts and `samples` single rollouts (0: none).

    What a service cannot show, it leaves out by inheriting the method from here.
    """

    name: str  # of the service, in `tracking.json`
    samples: int
    interval: int

    def scalars(self, step: int, values: Mapping[str, float], seconds: float) -> None: ...

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None: ...

    def distributions(self, step: int, values: Mapping[str, np.ndarray]) -> None: ...

    def close(self) -> None: ...


class ForwardProgress:
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
            id=ForwardProgress(paths).identity(self.name),
            resume="allow",
            dir=str(paths.root),
            config=asdict(redacted(config)),
            # W&B's process may start slowly from a network file system.
            settings=wandb.Settings(console="off", silent=True, x_service_wait=200.0),
        )
        # W&B's own step may only grow, but roles report a step at different times. So each metric uses `step` as its axis.
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        # W&B shows names without "/" together, under "Charts", and its table of runs sorts and filters by no others.
        first = {re.sub(r"\W", "_", name): value for name, value in values.items() if FIRST.fullmatch(name)}
        self._run.log({"step": step, **values, **first})

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

    def __init__(self, options: TensorboardConfig, config: TrainingRoot, paths: RunPaths) -> None:
        writer = _import("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._events = _import("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = _import("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._tensors = _import("tensorboard.compat.proto.tensor_pb2", "tensorboard")
        self._dtypes = _import("tensorboard.compat.proto.types_pb2", "tensorboard")
        self.samples, self.interval = options.samples, options.interval
        self._writer = writer.EventFileWriter(str(paths.root / "tensorboard"))
        if (step := ForwardProgress(paths).rewound(self.name)) is not None:  # TensorBoard then forgets what it has from this step on
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


class Mlflow(Sink):
    """MLflow: metrics, the configuration and samples as files. All attempts are one MLflow run, found by a tag. It has no histograms."""

    name = "mlflow"

    def __init__(self, options: MlflowConfig, config: TrainingRoot, paths: RunPaths) -> None:
        mlflow = _import("mlflow", "mlflow")
        self.samples, self.interval = options.samples, options.interval
        self._metric = mlflow.entities.Metric
        if options.uri is not None:
            mlflow.set_tracking_uri(options.uri)
        self._client = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(options.experiment)
        experiment = self._client.create_experiment(options.experiment) if found is None else found.experiment_id
        own = ForwardProgress(paths).identity(self.name)
        runs = self._client.search_runs([experiment], f"tags.rlx_id = '{own}'")
        name, tags = config.run.name or paths.root.name, {"rlx_id": own, "command": root_of(config).command}
        self._run = (runs or [self._client.create_run(experiment, run_name=name, tags=tags)])[0].info.run_id
        self._client.update_run(self._run, "RUNNING")
        self._client.log_dict(self._run, asdict(redacted(config)), "config.json")

    def scalars(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        metrics = [self._metric(re.sub(r"[^\w./ -]", "_", name), value, int(1000 * seconds), step) for name, value in values.items()]
        for start in range(0, len(metrics), 1000):  # its limit for one call
            self._client.log_batch(self._run, metrics[start : start + 1000])

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        lines = [{column: record.get(column) for column in COLUMNS[1:]} for record in records]
        self._client.log_text(self._run, json.dumps(lines, indent=1, ensure_ascii=False, default=repr), f"rollouts/step_{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run, "FINISHED" if sys.exc_info()[0] is None else "FAILED")


class Trackio:
    """Trackio, which shows runs on this machine (`trackio show`) or in a Space of the Hugging Face hub. All attempts are one run."""

    name = "trackio"

    def __init__(self, options: TrackioConfig, config: TrainingRoot, paths: RunPaths) -> None:
        self._trackio = _import("trackio", "trackio")
        self.samples, self.interval = options.samples, options.interval
        self._run = self._trackio.init(
            project=options.project,
            name=f"{config.run.name or paths.root.name}-{ForwardProgress(paths).identity(self.name)[:6]}",
            space_id=options.space,
            config=asdict(redacted(config)),
            resume="allow",
            embed=False,
        )

    def scalars(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        self._run.log(dict(values), step=step)

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        rows = [[_cell(record.get(column)) for column in COLUMNS[1:]] for record in records]
        self._run.log({"rollouts": self._trackio.Table(columns=list(COLUMNS[1:]), data=rows)}, step=step)

    def distributions(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        self._run.log({name: self._trackio.Histogram(each.tolist(), num_bins=BINS) for name, each in values.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class Prometheus(Sink):
    """A page with the newest value of each metric. Its address and key are in `endpoints/metrics.json`; without the key it answers 401."""

    name = "prometheus"
    samples = 0
    interval = sys.maxsize

    def __init__(self, options: PrometheusConfig, config: TrainingRoot, paths: RunPaths) -> None:
        library = _import("prometheus_client", "prometheus")
        self._gauge, self._registry = library.Gauge, library.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._label, self._file = paths.root.name, paths.endpoints / "metrics.json"
        page, key = library.make_wsgi_app(self._registry), secrets.token_urlsafe(24)

        def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
            if hmac.compare_digest(environ.get("HTTP_AUTHORIZATION", "").encode(), f"Bearer {key}".encode()):
                return page(environ, start)
            start("401 Unauthorized", [("Content-Length", "0")])
            return [b""]

        self._server = make_server(options.host, options.port, answer, server_class=_Server, handler_class=_Silent)
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        with atomic(self._file, 0o600) as temporary:
            temporary.write_text(json.dumps({"url": f"http://{options.host}:{self._server.server_port}/metrics", "api_key": key}))

    def scalars(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        for name, value in {"step": step, **values}.items():
            name = re.sub(r"\W", "_", f"rlx_{name}")
            if name not in self._gauges:
                self._gauges[name] = self._gauge(name, "docs/metrics.md", ["run"], registry=self._registry)
            self._gauges[name].labels(self._label).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._file.unlink(missing_ok=True)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True  # a connection that says nothing holds up neither others nor the end of the run


class _Silent(WSGIRequestHandler):
    timeout = 10  # seconds

    def log_message(self, *args: Any) -> None:
        """Log nothing: a line for every scrape would fill the role's log."""


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
