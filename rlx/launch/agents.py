"""Starts processes of a run on its other hosts, where nothing like `srun` does: an agent on every host, a connection for each process.

    supervisor ─► `python -m rlx.launch.agents SPEC` (a local child) ══ websocket ══► Agent in another pod ─► the role's process group
                       ▲ output, exit code              signals, end of the connection ▼

The child stands for the role, as `srun` does: it prints the role's output and exits with its code. If the connection ends, the agent
kills the role; if the agent's host is gone, the child asks the run to give way (`RunPaths.preempt`) and exits with `LEFT`, because a
lost host is no failure of the role. A client proves with an HMAC that it knows the run's token, which only the owner of the volume can
read; the token itself is never sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import signal
import sys
import threading
import time
from asyncio import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import ClientError, ClientSession, ClientTimeout, ClientWebSocketResponse, WSMsgType, web

from rlx.paths import RunPaths
from rlx.plan.environment import DEVICES, devices, inherited
from rlx.plan.process_spec import ProcessSpec
from rlx.polling import LEFT
from rlx.process import TODAY, die_with_parent
from rlx.process_tree import TOKEN, kill_all

T = TypeVar("T")

PORT = 8470  # of the agent in every pod of the chart
BEAT = 40.0  # seconds between two signs of life in both directions; the other side is gone without an answer for half as long
CONNECT = 5.0  # seconds for one try to connect
LAST_OUTPUT = 1.0  # seconds for what a process has printed; what it started may keep the pipe open
GONE = (OSError, ClientError)  # what a connection raises when the other side is gone


def proof(token: str, nonce: str) -> str:
    return hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()


class Agent:
    """Serves one host until the run ends, in a thread. `token`: the run's token; None until the first host has written it.

    `host`: the address to listen at; None: all, of IPv4 and IPv6.
    """

    def __init__(self, token: Callable[[], str | None], port: int, host: str | None = None) -> None:
        self.token = token
        self._lines: set[web.WebSocketResponse] = set()  # of the processes on this host
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agent", daemon=True).start()
        self.port = self._now(self._listen(host, port))

    def _now(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _listen(self, host: str | None, port: int) -> int:
        app = web.Application()
        app.router.add_get("/", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        return int(self._runner.addresses[0][1])

    def give_notice(self) -> None:
        """Tell the run that this host will be taken away."""

        async def tell() -> None:
            for line in list(self._lines):
                with contextlib.suppress(*GONE):
                    await line.send_json({"notice": True})

        self._now(tell())

    @property
    def is_busy(self) -> bool:
        """Whether processes of the run are on this host."""
        return bool(self._lines)

    def close(self) -> None:
        self._now(self._runner.cleanup())

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        line = web.WebSocketResponse(heartbeat=BEAT)
        await line.prepare(request)
        nonce = secrets.token_hex(16)
        with contextlib.suppress(*GONE, ValueError):
            await line.send_json({"nonce": nonce})
            order, token = await _receive(line), self.token()
            if token is None or not hmac.compare_digest(str(order.get("proof")), proof(token, nonce)):
                await line.send_json({"error": "this agent belongs to another run"})
            elif "start" in order:
                await self._run(line, order["start"])
            else:
                await line.send_json({"there": True})
        return line

    async def _run(self, line: web.WebSocketResponse, start: dict[str, Any]) -> None:
        """Run a process until it exits or the connection ends; then nothing of it is left."""
        spec = ProcessSpec(role=start["name"], replica=0, node=0, gpus=tuple(start["gpus"]))
        try:
            environment = inherited(os.environ) | start["env"]
            environment |= {DEVICES: ",".join(devices(spec, os.environ.get(DEVICES)))}
            process = await asyncio.create_subprocess_exec(
                *start["argv"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            await line.send_json({"error": str(error)})
            return
        self._lines.add(line)
        tasks = [asyncio.create_task(_carry(process, line)), asyncio.create_task(_pass_signals(process, line))]
        try:
            await line.send_json({"pid": process.pid})
            while process.returncode is None and not tasks[1].done():
                await asyncio.sleep(0.1)
            if process.returncode is not None:
                await asyncio.wait(tasks[:1], timeout=LAST_OUTPUT)
                await line.send_json({"exit": process.returncode})
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.to_thread(kill_all, [process.pid], None)
            self._lines.discard(line)


async def _carry(process: subprocess.Process, line: web.WebSocketResponse) -> None:
    assert process.stdout is not None
    with contextlib.suppress(*GONE):
        while text := await process.stdout.read(65536):
            await line.send_bytes(text)


async def _pass_signals(process: subprocess.Process, line: web.WebSocketResponse) -> None:
    """Ends when the connection does."""
    async for message in line:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, json.loads(message.data)["signal"])


async def _receive(line: web.WebSocketResponse | ClientWebSocketResponse) -> dict[str, Any]:
    """The next message. Raises OSError if the other side is gone."""
    message = await line.receive()
    if message.type is not WSMsgType.TEXT:
        raise ConnectionResetError("the connection was closed")
    return dict(json.loads(message.data))


@contextlib.asynccontextmanager
async def connect(address: tuple[str, int], token: str, **request: Any) -> AsyncIterator[ClientWebSocketResponse]:
    """A connection to an agent that was sent a request: `start={name, argv, env, gpus}`, or none. Raises `GONE`."""
    host, port = address
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    async with (
        ClientSession(timeout=ClientTimeout(connect=CONNECT)) as session,
        session.ws_connect(url, heartbeat=BEAT, max_msg_size=0) as line,
    ):
        nonce = (await _receive(line))["nonce"]
        await line.send_json({"proof": proof(token, nonce), **request})
        yield line


def greet(address: tuple[str, int], token: str) -> None:
    """Ask an agent for a sign of life. Raises OSError, also if the agent refuses."""

    async def answer() -> dict[str, Any]:
        async with connect(address, token) as line:
            return await _receive(line)

    try:
        reply = asyncio.run(asyncio.wait_for(answer(), 2 * CONNECT))
    except ClientError as error:
        raise ConnectionError(str(error)) from error
    if "error" in reply:
        raise ConnectionRefusedError(reply["error"])


def wait_for_agents(addresses: Sequence[tuple[str, int]], token: str, timeout: float, say: Callable[[str], None]) -> str | None:
    """Wait until all agents answer. Returns why not, naming the first that did not in `timeout` seconds; `None` if all did."""
    deadline, told = time.monotonic() + timeout, 0.0
    left = list(addresses)
    while left:
        try:
            greet(left[0], token)
            left.pop(0)
            continue
        except (OSError, ValueError) as error:
            last = f"{left[0][0]} ({len(addresses) - len(left)} of {len(addresses)} hosts are there): {error}"
        now = time.monotonic()
        if now > deadline:
            return f"no answer in {timeout:g} s from {last}"
        if now - told > 30:
            told = now
            say(f"waiting for {last}")
        time.sleep(0.2)
    return None


async def run(order: dict[str, Any]) -> int:
    """Run one process on another host and return its exit code, 128 + the signal that killed it.

    `order`: `{"at": [host, port], "token": file, "run": directory, "start": {name, argv, env, gpus}}`.
    """
    host, port = order["at"]
    paths, start = RunPaths(Path(order["run"])), order["start"]
    start["env"] |= {name: os.environ[name] for name in (TOKEN, TODAY) if name in os.environ}  # what the supervisor gives its children
    try:
        async with connect((host, port), Path(order["token"]).read_text(encoding="utf-8").strip(), start=start) as line:
            # Roles take SIGTERM for a notice where HOST is set (`rlx.process.sigterm_is_a_notice`), as SLURM uses it.
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(
                    number, lambda: asyncio.ensure_future(line.send_json({"signal": int(signal.SIGINT)}))
                )
            async for message in line:
                if message.type is WSMsgType.BINARY:
                    sys.stdout.buffer.write(message.data)
                    sys.stdout.buffer.flush()
                    continue
                said = json.loads(message.data)
                if "exit" in said:
                    return said["exit"] if said["exit"] >= 0 else 128 - said["exit"]
                if "error" in said:
                    print(said["error"], flush=True)
                    return 1
                if "notice" in said:
                    print("this host will be taken away", flush=True)
                    paths.ask_to_give_way()
            raise ConnectionResetError("the connection ended")
    except GONE as error:
        print(f"{host} is gone: {error}; the run gives way and starts again from its newest checkpoint", flush=True)
        paths.ask_to_give_way()
        return LEFT


if __name__ == "__main__":
    die_with_parent()
    sys.exit(asyncio.run(run(json.loads(sys.argv[1]))))
