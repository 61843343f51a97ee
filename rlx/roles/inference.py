"""The inference role: one vLLM server of the policy. If its engines are on several hosts, the others have the role `headless`.

    bind the port → import vLLM → wait for the initial model → start the engine → publish the endpoint → serve until told to stop

Importing vLLM takes longest, so it overlaps with making the initial model. The order of the lines below matters: vllm reads
environment variables when it is imported, and a port that is taken should be reported at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.config.chat_format import template_path
from rlx.config.load import load_play
from rlx.config.schema import PlayRoot
from rlx.heartbeat import SERVING, WAITING_FOR_MODEL, Heartbeat, wait_for_model
from rlx.inference.endpoints import bind, endpoint_file, publish_endpoint
from rlx.inference.server.arguments import engine_arguments, environment, runs_in_process
from rlx.inference.server.parts import Head, meeting_file, own_address, own_port
from rlx.parallel.rendezvous import TOKEN
from rlx.paths import RunPaths
from rlx.process import SUPERVISOR, die_with_parent, end_at_once, importing
from rlx.stacks import answer
from rlx.weights.hub import fetch

if TYPE_CHECKING:
    from rlx.inference.server.engine import PolicyEngine

log = logging.getLogger("rlx.inference")
ALIVE = 2.0  # seconds between two heartbeats while serving
LAST_WORDS = 5.0  # seconds that a part of the server has to say why it ends, after an engine here has failed
CHECK = (sys.executable, "-m", "rlx.kernels.toolchain")  # whether Triton can compile here, before minutes of loading
WARM_UP = 30  # steps of an engine in which kernels may still be compiled


def main() -> int:
    """Serve. Returns the exit code: 1 if the engine or the port failed or no version came after half of one, `waiting.UNFIT` for wrong
    weights, 143 or 130 after a signal to stop."""
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)  # vLLM's engine processes
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os._exit(128 + number))  # before the engine starts there is nothing to clean up
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--replica", type=int, default=0)
    options = parser.parse_args()
    paths, config, replica = RunPaths(options.run_dir), load_play(options.run_dir), options.replica
    heartbeat = Heartbeat(paths, f"inference_{replica}")
    answer(paths, heartbeat.name)

    try:
        sock = listen(config, replica)
        head = lead(config, replica, paths)
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    endpoint_file(paths, replica).unlink(missing_ok=True)  # of an earlier server

    heartbeat.beat("importing vLLM")
    os.environ |= environment(config, os.environ)
    os.environ.setdefault(SUPERVISOR, str(os.getpid()))  # for an engine's own process: the first one of a container is no sign of an orphan
    checking = subprocess.Popen(CHECK) if config.hardware.device == "cuda" else None  # takes as long as importing vLLM
    import uvloop

    with importing():
        import rlx.inference.server.app  # noqa: F401  (the heavy imports)

    if checking is not None and not compiled(checking, config.inference.startup_timeout, heartbeat):
        return 1  # it has said why
    heartbeat.beat(WAITING_FOR_MODEL)
    name = wait_for_model(paths, config.inference.startup_timeout, lambda: heartbeat.beat(WAITING_FOR_MODEL))
    model = fetch(name, heartbeat)
    return uvloop.run(serve(config, replica, model, sock, paths, heartbeat, head))


def compiled(checking: subprocess.Popen[bytes], timeout: float, heartbeat: Heartbeat) -> bool:
    """Whether the check of Triton succeeds. Prints why not if it takes more than `timeout` seconds; otherwise it says so itself."""
    with heartbeat.during("compiling a kernel with Triton", limit=timeout):
        try:
            return checking.wait(timeout) == 0
        except subprocess.TimeoutExpired:
            checking.kill()
            checking.wait()
            print(f"Triton did not compile a small kernel in {timeout:g} s (inference.startup_timeout)", file=sys.stderr)
            return False


def listen(config: PlayRoot, replica: int) -> socket.socket:
    """The server's socket. Raises OSError with a message for the user if the port is taken."""
    host = config.inference.host or ("0.0.0.0" if config.hardware.nodes > 1 else "127.0.0.1")
    port = config.inference.port and config.inference.port + replica
    try:
        return bind(host, port)
    except OSError as error:
        remedy = "free it, choose another inference.port, or inference.port=0 for any free one" if port else "check inference.host"
        raise OSError(f"inference server {replica} cannot listen on {host}:{port}: {error.strerror}; {remedy}") from error


def lead(config: PlayRoot, replica: int, paths: RunPaths) -> Head | None:
    """The head of the server's parts; None if the server has no others. Raises OSError with a message for the user."""
    hardware = config.hardware
    if hardware.parts_of_server == 1:
        return None
    address, port = own_address(hardware.nodes > 1, os.environ), own_port(os.environ)
    try:
        return Head(meeting_file(paths, replica), address, hardware.parts_of_server - 1, os.environ.get(TOKEN, ""), port)
    except OSError as error:
        raise OSError(f"inference server {replica} cannot be reached by its engines at {address}:{port}: {error.strerror}") from error


async def serve(
    config: PlayRoot, replica: int, model: Path, sock: socket.socket, paths: RunPaths, heartbeat: Heartbeat, head: Head | None = None
) -> int:
    """Start the engine, publish the endpoint and serve until a signal comes or the engine breaks. Returns the exit code."""
    from rlx.inference.server.app import PolicyApp, Server
    from rlx.inference.server.engine import PolicyEngine

    arguments = engine_arguments(config, str(model), replica, None if head is None else head.meeting)
    if head is not None:
        head.let_port_go()
    # May take longer than launcher.heartbeat_timeout. A server that restarts beside others has no other bound than this one.
    with heartbeat.during(f"loading {model}", limit=config.inference.startup_timeout):
        engine = await PolicyEngine.start(arguments, cpu=config.hardware.device == "cpu", in_process=runs_in_process(config))
    engine.secret = paths.offer_secret
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def stop(number: int) -> None:
        if not stopped.done():
            stopped.set_result(128 + number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    lost: asyncio.Future[str] | None = None
    if head is not None:
        lost = loop.create_future()
        head.lost = partial(told, loop, lost)

    api_key = config.inference.api_key or secrets.token_urlsafe(24)
    template = None if config.model.chat_template is None else str(template_path(config.model.chat_template))
    server = Server(PolicyApp(engine, api_key, arguments, template, config.model.chat_template_kwargs))
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    log.info("serving version 0 at %s", publish_endpoint(endpoint_file(paths, replica), sock, api_key))
    if head is not None:
        head.serving()
    try:
        patience = math.inf if runs_in_process(config) else config.inference.hung_timeout
        return await watch(engine, stopped, serving, lost, heartbeat, patience, config.inference.startup_timeout)
    finally:
        endpoint_file(paths, replica).unlink(missing_ok=True)
        if head is not None:
            head.close("it was told to stop" if stopped.done() else "it ended with an error; see its log")
        server.should_exit = server.force_exit = True
        await asyncio.wait([serving], timeout=1)
        engine.shutdown()


def told(loop: asyncio.AbstractEventLoop, lost: asyncio.Future[str], why: str) -> None:
    """Set a future from another thread, unless it is set."""

    def tell() -> None:
        if not lost.done():
            lost.set_result(why)

    loop.call_soon_threadsafe(tell)


async def watch(
    engine: PolicyEngine,
    stopped: asyncio.Future[int],
    serving: asyncio.Future[None],
    lost: asyncio.Future[str] | None,
    heartbeat: Heartbeat,
    patience: float,
    first_patience: float,
) -> int:
    """Send heartbeats until there is a reason to end. Print the reason and return the exit code.

    `patience`: seconds for one step of the engine. In this process a step may take minutes (a long prompt on a CPU); an engine that hangs
    here stops the heartbeats, unless it hangs in C code. `first_patience`: the same for the first `WARM_UP` steps, if that is more: what
    no warm-up of vLLM has used yet is compiled in them. `lost`: why another part of the server is gone; None if it has no others.
    """
    silent = 0.0  # seconds since the engine's last step; time in which this process was stopped itself does not count
    while True:
        silent = silent + ALIVE if engine.activity == heartbeat.progress and engine.waited_for else 0.0
        starting = engine.activity < WARM_UP and first_patience > patience
        if silent > (first_patience if starting else patience):
            limit = f"inference.startup_timeout={first_patience:g}" if starting else f"inference.hung_timeout={patience:g}"
            print(f"the engine hangs: no step for {silent:.0f} s ({limit}), and {engine.waited_for} requests wait", file=sys.stderr)
            return 1
        heartbeat.progress = engine.activity
        heartbeat.beat(SERVING, step=engine.version)
        ends: list[asyncio.Future[Any]] = [stopped, engine.broken, serving, *([lost] if lost is not None else [])]
        await asyncio.wait(ends, timeout=ALIVE, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return stopped.result()
        if engine.broken.done():
            await asyncio.sleep(0.1)  # the client of the failed update reads the answer first
            why, code = engine.broken.result()
            print(f"{why}\nThe model is only partly updated, so this server ends.", file=sys.stderr)
            return code
        if engine.llm.errored and lost is not None:  # the engines here may fail first, because one elsewhere is gone
            await asyncio.wait([lost], timeout=LAST_WORDS)
        if lost is not None and lost.done():
            print(lost.result(), file=sys.stderr)
            return 1
        if engine.llm.errored or serving.done():
            print("the engine died; its own message is above", file=sys.stderr)
            return 1


if __name__ == "__main__":
    end_at_once(main)
elif __name__ == "__mp_main__":  # an engine process that vLLM spawned because it could not fork
    from rlx.inference.server.rendezvous import leave_no_files

    die_with_parent()
    leave_no_files()
