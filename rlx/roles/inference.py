"""The inference role: starts vLLM's own server of the policy, publishes its address, and watches it.

    wait for the initial model → start vLLM → wait until it answers → publish the endpoint → watch until told to stop

The command line is `rlx.inference.arguments.command`; the log shows it, and it may be started by hand. vLLM exits with code 0 when its
engine dies, so every exit that was not asked for is a failure.
"""

from __future__ import annotations

import argparse
import http.client
import logging
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from rlx.config.load import load_play
from rlx.config.schema import PlayRoot
from rlx.heartbeat import SERVING, WAITING_FOR_MODEL, Heartbeat, wait_for_model
from rlx.inference import arguments, wire
from rlx.inference.endpoints import Endpoint, endpoint_file, free_port, publish_endpoint, url_of
from rlx.inference.middleware import SECRET
from rlx.paths import RunPaths
from rlx.process import SUPERVISOR, die_with_parent, end_at_once
from rlx.process_tree import kill_all
from rlx.stack_dump import answer
from rlx.weights.hub import fetch

log = logging.getLogger("rlx.inference")
ALIVE = 1.0  # seconds between two looks at a server that serves
START_POLL_SECONDS = 0.2  # seconds between two looks at a server that starts
METRICS_SECONDS = 5.0  # seconds between two looks at its metrics
TIMEOUT = 5.0  # seconds for one of its answers
TAKEN = 3  # times that another free port is tried: another process may take it before vLLM binds it
CHECK = (sys.executable, "-m", "rlx.kernels.toolchain")  # whether Triton can compile here, before minutes of loading


def main() -> int:
    """Serve. Returns the exit code: 1 if the server failed or the port is taken, 143 or 130 after a signal to stop."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--replica", type=int, default=0)
    options = parser.parse_args()
    paths, config, replica = RunPaths(options.run_dir), load_play(options.run_dir), options.replica
    heartbeat = Heartbeat(paths, f"inference_{replica}")
    answer(paths, heartbeat.name)
    endpoint_file(paths, replica).unlink(missing_ok=True)  # of an earlier server
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    if config.hardware.device == "cuda" and not can_compile(config.inference.startup_timeout, heartbeat):
        return 1  # it has said why
    heartbeat.beat(WAITING_FOR_MODEL)
    name = wait_for_model(paths, config.inference.startup_timeout, lambda: heartbeat.beat(WAITING_FOR_MODEL), untrained=True)
    model = fetch(name, heartbeat)
    for left in reversed(range(TAKEN)):
        server = EngineProcess(config, replica, str(model), paths, heartbeat)
        try:
            code = server.run()
        finally:
            server.stop()
        if server.fixed or not (left and server.port_was_taken):
            return code
    return 1


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def can_compile(timeout: float, heartbeat: Heartbeat) -> bool:
    """Whether Triton compiles a kernel here. Prints why not if it takes more than `timeout` seconds; otherwise the check does."""
    with heartbeat.during("compiling a kernel with Triton", limit=timeout):
        try:
            return subprocess.run(CHECK, timeout=timeout, check=False).returncode == 0
        except subprocess.TimeoutExpired:
            print(f"Triton did not compile a small kernel in {timeout:g} s (inference.startup_timeout)", file=sys.stderr)
            return False


class EngineProcess:
    """One start of vLLM, in a process group of its own."""

    def __init__(self, config: PlayRoot, replica: int, model: str, paths: RunPaths, heartbeat: Heartbeat) -> None:
        inference = config.inference
        host = inference.host or ("0.0.0.0" if config.hardware.nodes > 1 else "127.0.0.1")
        self.fixed = inference.port + replica if inference.port else 0
        self.config, self.model, self.heartbeat = config, model, heartbeat
        self.file, port = endpoint_file(paths, replica), self.fixed or free_port(host)
        self.endpoint = Endpoint(url_of(host, port), inference.api_key or secrets.token_urlsafe(24))
        command = arguments.command(config, model, host, port, replica)
        own = arguments.environment(config, os.environ)
        env = {**os.environ, **own, SECRET: self.endpoint.api_key}
        env.setdefault(SUPERVISOR, str(os.getpid()))  # the first process of a container is no sign of an orphan
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # it doubles vLLM's start
        # vLLM leaves its sockets where they are, and the path of one may have 107 characters: a job's TMPDIR may be too long.
        self.sockets = tempfile.TemporaryDirectory(prefix="rlx_", dir="/tmp" if os.access("/tmp", os.W_OK) else None)
        env.setdefault("VLLM_RPC_BASE_PATH", self.sockets.name)
        shown = [*(f"{name}={shlex.quote(value)}" for name, value in own.items()), f"{SECRET}=<secret>", shlex.join(command)]
        log.info("starting %s", " ".join(shown))
        # A group of its own, in this process's session: both `stop` and the supervisor find all of it.
        self.process = subprocess.Popen(command, env=env, process_group=0, preexec_fn=die_with_parent)
        self.serves = self.refuses = False

    @property
    def port_was_taken(self) -> bool:
        """Whether it ended before it served, and another process has its port."""
        address = urlsplit(self.endpoint.url)
        return not self.serves and free_port(address.hostname or "", address.port or 0) != address.port

    def run(self) -> int:
        """Wait until it serves, publish its address, and watch it. Prints why it ended and returns 1."""
        timeout, began = self.config.inference.startup_timeout, time.monotonic()
        while not self._get(wire.HEALTH):
            if self._ended("before it served"):
                return 1
            if time.monotonic() - began > timeout:
                print(f"vLLM did not serve {self.model} after {timeout:g} s (inference.startup_timeout)", file=sys.stderr)
                return 1
            self.heartbeat.beat(f"loading {self.model}")
            time.sleep(START_POLL_SECONDS)
        self.serves = True
        log.info("serving at %s after %.1f s", publish_endpoint(self.file, self.endpoint), time.monotonic() - began)
        return self._watch()

    def _watch(self) -> int:
        """Send heartbeats while the server works. An engine that hangs makes no tokens for requests that run.

        When its engine dies, vLLM stops listening, and waits for calls that the engine will never answer.
        """
        patience = self.config.inference.hung_timeout
        looked = moved = time.monotonic()
        while not self._ended("while it served"):
            now = time.monotonic()
            if now - looked >= METRICS_SECONDS:
                if self._get(wire.HEALTH) is None and self.refuses:
                    print("vLLM's engine has died; its own message is above", file=sys.stderr, flush=True)
                    return 1
                looked, text = now, self._get(wire.METRICS)
                found = wire.metrics_of(text) if text else None
                if found is not None:
                    progress = int(found["generation_tokens_total"] + found["prompt_tokens_total"])
                    idle = not found["num_requests_running"] or self._get(wire.IS_PAUSED) == b'{"is_paused":true}'
                    if idle or progress != self.heartbeat.progress:
                        moved, self.heartbeat.progress = now, progress
                if now - moved > patience:
                    print(f"the engine hangs: no token for {now - moved:.0f} s (inference.hung_timeout={patience:g})", file=sys.stderr)
                    return 1
            self.heartbeat.beat(SERVING)
            time.sleep(ALIVE)
        return 1

    def _ended(self, when: str) -> bool:
        code = self.process.poll()
        if code is not None:
            print(f"vLLM ended {when}, with exit code {code}; its own message is above", file=sys.stderr, flush=True)
            if self.fixed and self.port_was_taken:
                print(f"port {self.fixed} is taken.\n  fix: set inference.port to a free port, or to 0", file=sys.stderr, flush=True)
        return code is not None

    def _get(self, path: str) -> bytes | None:
        """The body of an answer, `b" "` for an empty one; None without an answer of status 200."""
        address = urlsplit(self.endpoint.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT)
        try:
            connection.request("GET", path, headers=self.endpoint.headers)
            found = connection.getresponse()
            self.refuses = found.status == 503
            return (found.read() or b" ") if found.status == 200 else None
        except (OSError, http.client.HTTPException) as error:
            self.refuses = isinstance(error, ConnectionRefusedError)
            return None
        finally:
            connection.close()

    def stop(self) -> None:
        """End the server with its engine and workers, and take its address away."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # the first signal is being obeyed
        self.file.unlink(missing_ok=True)
        kill_all([self.process.pid], None)  # nothing in it must be saved
        self.process.wait()
        self.sockets.cleanup()


if __name__ == "__main__":
    end_at_once(main)
