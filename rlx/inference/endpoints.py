"""The addresses of a run's servers: one small file per server, written by the process that bound the port."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlx.config.schema import EvaluatedRun, PlayRoot, TrainingRoot
from rlx.heartbeat import FETCHING, WAITING_FOR_MODEL, AtWork
from rlx.paths import RunPaths, listed, write_text
from rlx.polling import wait_for
from rlx.process import host_name

log = logging.getLogger(__name__)

OURS = range(12000, 32000)  # ports that the kernel gives to no outgoing connection by default


def free_port(host: str, port: int = 0) -> int:
    """A port of this host that nobody listens on, preferably `port`. Raises OSError if the host's name is wrong.

    vLLM binds it seconds later, so it lies below the range from which the kernel gives ports to outgoing connections.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    candidates = [*filter(None, [port]), *random.SystemRandom().sample(OURS, 50), 0]
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
            try:
                probe.bind((host, candidates.pop(0)))
            except OSError:
                if not candidates:
                    raise
            else:
                return int(probe.getsockname()[1])


def url_of(host: str, port: int) -> str:
    """The address of a server on this host. If it listens on all addresses, it has the host's name."""
    if host in ("0.0.0.0", "::"):
        host = host_name()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server. After a restart the server writes its new address to `file`; None: the address never changes."""

    url: str  # `http://host:port`
    api_key: str
    file: Path | None = None

    @property
    def key(self) -> str:
        """An identifier that survives a restart: the file, or the address if there is no file."""
        return str(self.file or self.url)

    @property
    def name(self) -> str:
        """The server's name in messages."""
        return f"inference server {self.url}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"}

    def refreshed(self) -> Endpoint:
        """The endpoint that the file holds now; this endpoint if there is no file, or if it cannot be read."""
        return (self.file is not None and read_endpoint(self.file)) or self

    @property
    def superseded(self) -> bool:
        """Whether a new server is starting or has started, perhaps at the same address with a key of its own."""
        return self.file is not None and (self.refreshed() != self or not self.file.exists())


def endpoint_file(paths: RunPaths, replica: int) -> Path:
    return paths.endpoints / f"inference_{replica}.json"


def publish_endpoint(file: Path, endpoint: Endpoint) -> str:
    """Write a server's address to `file`, readable only by the user. Returns the URL."""
    record = {"url": endpoint.url, "api_key": endpoint.api_key, "pid": os.getpid(), "host": host_name()}
    write_text(file, json.dumps(record), mode=0o600)
    return endpoint.url


def read_endpoint(file: Path) -> Endpoint | None:
    """The endpoint in a file; None if there is no file, and with a warning if it cannot be read."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return Endpoint(record["url"], record["api_key"], file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s does not describe an inference server: %s", file, error)
        return None


def read_endpoints(paths: RunPaths, count: int, timeout: float = 0.0, tick: Callable[[], None] | None = None) -> list[Endpoint]:
    """The endpoints of replicas 0 … count - 1. Waits up to `timeout` seconds for missing ones.

    The time does not count while a server reports that its model is still being made or fetched.
    Raises WaitTimeout, which names the first missing server.
    """

    def wait(replica: int) -> Endpoint:
        file, without_model = endpoint_file(paths, replica), AtWork(paths, f"inference_{replica}", (WAITING_FOR_MODEL, FETCHING))
        what = f"inference server {replica} ({file})"
        return wait_for(lambda: read_endpoint(file) if listed(file) else None, what, timeout, tick=tick, excused=without_model)

    return [wait(replica) for replica in range(count)]


def present_servers(config: PlayRoot, paths: RunPaths) -> list[Endpoint]:
    """The servers that the run has now: those of the configuration, and one for each file `endpoints/inference_*.json`.

    Creating such a file (`{"url": …, "api_key": …}`) adds a server to a running run, and deleting it removes the server.
    A file that cannot be read is skipped with a warning.
    """
    found = [Endpoint(url, config.inference.api_key or "") for url in config.inference.base_url]
    return found + [endpoint for file in sorted(paths.endpoints.glob("inference_*.json")) if (endpoint := read_endpoint(file))]


def find_servers(config: PlayRoot, paths: RunPaths, tick: Callable[[], None]) -> list[Endpoint]:
    """The servers named in the configuration. If it names none, waits for the servers that the run starts and returns those."""
    if config.inference.base_url:
        return [Endpoint(url, config.inference.api_key or "") for url in config.inference.base_url]
    return read_endpoints(paths, config.hardware.inference_replicas, config.inference.startup_timeout, tick)


def wait_for_neighbours(cfg: TrainingRoot, paths: RunPaths, beat: Callable[[str], None], tick: Callable[[], None]) -> None:
    """For a trainer: wait until every server that shares its GPU has published its endpoint.

    While an engine starts, it measures the GPU's free memory, so the trainer must not take any. `beat` reports the phase, `tick` is called
    while waiting. Raises WaitTimeout after `inference.startup_timeout`.
    """
    if (
        isinstance(cfg, EvaluatedRun)
        and cfg.generates_rollouts
        and cfg.started_servers
        and cfg.hardware.device == "cuda"
        and cfg.hardware.colocate
    ):
        beat("waiting for the inference servers, which measure the GPU's memory before the trainer takes any")
        read_endpoints(paths, cfg.hardware.inference_replicas, cfg.inference.startup_timeout, tick)
