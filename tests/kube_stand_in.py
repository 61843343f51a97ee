"""A stand-in for a Kubernetes API server: it records what the real client sends, refuses what the real one would, and plays a Job's life.

Objects are checked against the client's own models, which are generated from Kubernetes' OpenAPI description: an unknown field, a wrong
type or a missing required field is a 422, as with the server's strict validation.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

from kubernetes import client

MODELS = {"jobs": "V1Job", "services": "V1Service", "configmaps": "V1ConfigMap", "persistentvolumeclaims": "V1PersistentVolumeClaim"}
PLACE = re.compile(r"/(?:api/v1|apis/batch/v1)/namespaces/(?P<space>[^/]+)/(?P<kind>[a-z]+)(?:/(?P<name>[^/]+))?(?P<log>/log)?$")


def problems(value: Any, kind: str, where: str = "") -> list[str]:
    """What is wrong with an object of one of the client's models."""
    if (many := re.fullmatch(r"List\[(.*)\]", kind)) is not None:
        return [line for n, each in enumerate(value) for line in problems(each, many[1], f"{where}[{n}]")]
    if (named := re.fullmatch(r"Dict\[str, (.*)\]", kind)) is not None:
        return [line for key, each in value.items() for line in problems(each, named[1], f"{where}.{key}")]
    simple: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float), "datetime": (str,)}
    if kind in simple:
        fine = isinstance(value, simple[kind]) and (kind == "bool" or not isinstance(value, bool))
        return [] if fine else [f"{where}: {value!r} is no {kind}"]
    if kind == "object":
        return []
    model = getattr(client, kind)
    names = {json_name: name for name, json_name in model.attribute_map.items()}
    found = [f'{where}: unknown field "{name}"' for name in value if name not in names]
    for name, each in value.items():
        if name in names:
            found += problems(each, model.openapi_types[names[name]], f"{where}.{name}")
    required = [model.attribute_map[name] for name, one in model.model_fields.items() if one.is_required()]
    return found + [f"{where}: {name} is missing" for name in required if name not in value]


class Cluster:
    """The server, with the objects that it has. `refuse`: (method, kind) → status and message of its answer."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.calls: list[tuple[str, str, Any]] = []
        self.refuse: dict[tuple[str, str], tuple[int, str]] = {}
        self.stages: list[Callable[[Cluster], None]] = []  # called one by one, each time the Job is read
        self.pods: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.log = ""
        self.busy: list[int] = []  # statuses of the next answers to questions about the Job: 503, 429
        self.drops = 0  # how many readers of the log lose their connection after its first line
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer("GET")

            def do_POST(self) -> None:
                self._answer("POST")

            def do_DELETE(self) -> None:
                self._answer("DELETE")

            def _answer(self, method: str) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = cluster.answer(method, self.path, json.loads(text) if text else None)
                body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
                is_log = isinstance(answer, str)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if is_log and cluster.drops and body:
                    cluster.drops -= 1
                    body, self.close_connection = body.splitlines(keepends=True)[0], True
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        url = urlparse(path)
        place = PLACE.match(url.path)
        if place is None:
            return status_of(404, f"no such path {url.path}")
        kind, name = place["kind"], place["name"]
        asked = {key: unquote(values[0]) for key, values in parse_qs(url.query).items()}
        self.calls.append((method, f"{kind}/{name or ''}", body if method != "GET" else asked))
        if (refused := self.refuse.get((method, kind))) is not None:
            return status_of(*refused)
        if kind == "pods":
            return 200, self._stamped(asked) if place["log"] else {"kind": "PodList", "items": self.pods}
        if kind == "events":
            return 200, {"kind": "EventList", "items": self.events}
        if method == "POST":
            return self._create(kind, body)
        if name is None:
            return 200, {"kind": "JobList", "items": [each for (of, _), each in self.objects.items() if of == kind]}
        if (kind, name) not in self.objects:
            return status_of(404, f'{kind}.batch "{name}" not found')
        if method == "DELETE":
            del self.objects[kind, name]
            return 200, {"kind": "Status", "status": "Success"}
        if self.busy:
            return status_of(self.busy.pop(0), "the server is starting")
        if self.stages:
            self.stages.pop(0)(self)
        return 200, self.objects[kind, name]

    def _stamped(self, asked: dict[str, str]) -> str:
        lines = self.log.splitlines(keepends=True)
        stamp = (lambda n: f"2026-01-01T00:00:{n:02d}.5Z ") if asked.get("timestamps") == "true" else lambda n: ""
        return "".join(stamp(n) + line for n, line in enumerate(lines))

    def _create(self, kind: str, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["metadata"]["name"]
        if (kind, name) in self.objects:
            return status_of(409, f'{kind} "{name}" already exists')
        if wrong := problems(body, MODELS[kind]):
            return status_of(422, "; ".join(wrong))
        made = {**body, "metadata": {**body["metadata"], "uid": f"uid-of-{name}", "creationTimestamp": "2026-01-01T00:00:00Z"}}
        self.objects[kind, name] = {**made, "status": {}} if kind == "jobs" else made
        return 201, self.objects[kind, name]


def status_of(code: int, message: str) -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "status": "Failure", "code": code, "message": message}


def pod(index: int, phase: str, **status: Any) -> dict[str, Any]:
    """A pod of the Job `mine`."""
    return {
        "metadata": {
            "name": f"mine-{index}-abcde",
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"containers": [{"name": "rlx"}], "nodeName": f"node{index}" if phase != "Pending" else None},
        "status": {"phase": phase, **status},
    }


def container(**state: Any) -> list[dict[str, Any]]:
    """A pod's container in one state: `waiting={"reason": "ImagePullBackOff"}`."""
    one = {"name": "rlx", "image": "i", "imageID": "", "ready": False, "restartCount": 0, "state": state}
    return [one]
