"""Starts processes of a run on its other hosts, where nothing like `srun` does: an agent on every host, a connection for each process.

    supervisor ─► `python -m rlx.launch.agents SPEC` (a local child) ══ TCP ══► Agent in another pod ─► the role's process group
                       ▲ output, exit code        signals, end of the connection ▼

The child stands for the role, as `srun` does: it prints the role's output and exits with its code. If the connection ends, the agent
kills the role; if the agent's host is gone, the child asks the run to give way (`RunPaths.preempt`) and exits with `LEFT`, because a
lost host is no failure of the role. Messages are lines of JSON. A client proves with an HMAC that it knows the run's token, which only
the owner of the volume can read; the token itself is never sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlx.launch.processes import TOKEN, bound, kill_all
from rlx.paths import RunPaths
from rlx.plan.environment import DEVICES, devices, inherited
from rlx.plan.record import ProcessSpec
from rlx.waiting import LEFT

PORT = 8470  # of the agent in every pod of the chart
PING = 5.0  # seconds between two signs of life in both directions
SILENCE = 60.0  # seconds without one after which the other side counts as gone
CONNECT = 5.0  # seconds for one try to connect


class Line:
    """One connection: sends and receives lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._rest, self._lock = connection, b"", threading.Lock()
        connection.settimeout(SILENCE)

    def send(self, **message: Any) -> None:
        """Raises OSError if the other side is gone."""
        with self._lock:
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """The next message. Raises OSError if the other side is gone or silent."""
        while b"\n" not in self._rest:
            new = self.connection.recv(65536)
            if not new:
                raise ConnectionResetError("the connection was closed")
            self._rest += new
        line, _, self._rest = self._rest.partition(b"\n")
        return dict(json.loads(line))

    @property
    def has_more(self) -> bool:
        """Whether a whole message was received already."""
        return b"\n" in self._rest


def proof(token: str, nonce: str) -> str:
    return hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()


# the agent


class Agent:
    """Serves one host until the run ends. `token`: the run's token; None until the first host has written it.

    `host`: the address to listen at; None: all, of IPv4 and IPv6.
    """

    def __init__(self, token: Callable[[], str | None], port: int, host: str | None = None) -> None:
        self.token = token
        self.ended: int | None = None  # the exit code with which the first host ended the run
        self.over = threading.Event()
        self._lines: set[Line] = set()
        agent = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):
                    agent._serve(Line(self.request))

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

            def server_bind(self) -> None:
                if self.address_family == socket.AF_INET6:
                    self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                super().server_bind()

        class Both(Server):
            address_family = socket.AF_INET6

        if host is not None:
            self._server = Server((host, port), Handler)
        else:
            try:
                self._server = Both(("::", port), Handler)
            except OSError:  # a host without IPv6
                self._server = Server(("0.0.0.0", port), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="agent", daemon=True).start()

    def give_notice(self) -> None:
        """Tell the run that this host will be taken away."""
        for line in list(self._lines):
            with contextlib.suppress(OSError):
                line.send(notice=True)

    @property
    def is_busy(self) -> bool:
        """Whether processes of the run are on this host."""
        return bool(self._lines)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, line: Line) -> None:
        nonce = secrets.token_hex(16)
        line.send(nonce=nonce)
        request, token = line.receive(), self.token()
        if token is None or not hmac.compare_digest(str(request.get("proof")), proof(token, nonce)):
            line.send(error="this agent belongs to another run")
            return
        if "end" in request:
            self.ended = int(request["end"])
            line.send(done=True)
            self.over.set()
        elif "start" not in request:
            line.send(done=True)
        else:
            self._run(line, request["start"])

    def _run(self, line: Line, start: dict[str, Any]) -> None:
        spec = ProcessSpec(role=start["name"], replica=0, node=0, gpus=tuple(start["gpus"]))
        try:
            environment = inherited(os.environ) | start["env"]
            environment |= {DEVICES: ",".join(devices(spec, os.environ.get(DEVICES)))}
            process = subprocess.Popen(
                bound(start["argv"], environment),  # this thread lives as long as the connection
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            line.send(error=str(error))
            return
        self._lines.add(line)
        try:
            line.send(pid=process.pid)
            self._relay(line, process)
        finally:
            self._lines.discard(line)
            kill_all([process.pid], None)
            process.wait()

    def _relay(self, line: Line, process: subprocess.Popen[bytes]) -> None:
        """Carry output and exit code one way and signals the other, until the process has exited. Raises OSError if the client is gone."""
        assert process.stdout is not None
        output, is_open = process.stdout.fileno(), True
        heard = sent = time.monotonic()
        while True:
            watched: list[Any] = [line.connection, *([output] if is_open else [])]
            ready, _, _ = select.select(watched, [], [], 0.2)
            now = time.monotonic()
            if output in ready:
                is_open = self._carry(line, output)
                sent = now
            while line.connection in ready or line.has_more:
                message, heard, ready = line.receive(), now, []
                if "signal" in message and process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, message["signal"])
            if (code := process.poll()) is not None:
                while is_open and select.select([output], [], [], 0)[0]:  # what it started may keep the pipe open
                    is_open = self._carry(line, output)
                line.send(exit=code)
                return
            if now - sent > PING:
                line.send(ping=True)
                sent = now
            if now - heard > SILENCE:
                raise ConnectionResetError("the client is silent")

    def _carry(self, line: Line, output: int) -> bool:
        """Send what is there of a process's output. Returns whether there may be more."""
        text = os.read(output, 65536)
        if text:
            line.send(out=text.decode("latin-1"))
        return bool(text)


# the client


def connect(address: tuple[str, int], token: str) -> tuple[Line, str]:
    """A connection to an agent, and the proof that it wants. Raises OSError if it does not answer."""
    line = Line(socket.create_connection(address, timeout=CONNECT))
    return line, proof(token, line.receive()["nonce"])


def ask(address: tuple[str, int], token: str, **request: Any) -> None:
    """Send a request that has no result: none for a sign of life, `end=CODE`. Raises OSError, also if the agent refuses."""
    line, answer = connect(address, token)
    with line.connection:
        line.send(proof=answer, **request)
        if "error" in (reply := line.receive()):
            raise ConnectionRefusedError(reply["error"])


def wait_for_agents(addresses: Sequence[tuple[str, int]], token: str, timeout: float, say: Callable[[str], None]) -> str | None:
    """Wait until all agents answer. Returns why not, naming the first that did not in `timeout` seconds; `None` if all did."""
    deadline, told, last = time.monotonic() + timeout, 0.0, ""
    left = list(addresses)
    while left:
        try:
            ask(left[0], token)
            left.pop(0)
            continue
        except (OSError, ValueError) as error:
            last = str(error)
        now = time.monotonic()
        if now > deadline:
            return f"{left[0][0]} did not answer in {timeout:g} s ({len(addresses) - len(left)} of {len(addresses)} hosts did): {last}"
        if now - told > 30:
            told = now
            say(f"waiting for {left[0][0]}; {len(addresses) - len(left)} of {len(addresses)} hosts are there ({last})")
        time.sleep(0.2)
    return None


def main(text: str) -> int:
    """Run one process on another host: `{"at": [host, port], "token": file, "run": directory, "start": {name, argv, env, gpus}}`."""
    order = json.loads(text)
    host, port = order["at"]
    wake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    start = order["start"]
    start["env"] |= {name: os.environ[name] for name in (TOKEN,) if name in os.environ}
    try:
        line, answer = connect((host, port), Path(order["token"]).read_text().strip())
        line.send(proof=answer, start=start)
        return _follow(line, wake, RunPaths(Path(order["run"])))
    except (OSError, ValueError) as error:
        print(f"{host} is gone: {error}; the run gives way and starts again from its newest checkpoint", flush=True)
        RunPaths(Path(order["run"])).ask_to_give_way()
        return LEFT


def _follow(line: Line, wake: int, paths: RunPaths) -> int:
    """Relay the process's output and our signals until it has exited; its exit code, 128 + the signal that killed it. Raises OSError."""
    heard = sent = time.monotonic()
    watched: list[Any] = [line.connection, wake]
    while True:
        ready = [line.connection] if line.has_more else select.select(watched, [], [], 1.0)[0]
        now = time.monotonic()
        if wake in ready:
            os.read(wake, 64)
            # Roles take SIGTERM for a notice where HOST is set (`rlx.process.sigterm_is_a_notice`), as SLURM uses it.
            line.send(signal=int(signal.SIGINT))
        if line.connection in ready:
            message, heard = line.receive(), now
            if "out" in message:
                os.write(1, message["out"].encode("latin-1"))
            elif "exit" in message:
                code = int(message["exit"])
                return code if code >= 0 else 128 - code
            elif "error" in message:
                print(message["error"], flush=True)
                return 1
            elif "notice" in message:
                print("this host will be taken away", flush=True)
                paths.ask_to_give_way()
        if now - sent > PING:
            line.send(ping=True)
            sent = now
        if now - heard > SILENCE:
            raise ConnectionResetError(f"silent for {SILENCE:g} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
