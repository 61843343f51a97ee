"""Brings a version of the weights to several servers at once (`rlx.inference.fleet` decides which, and `replica` how one gets it).

A server that fails or does not answer delays the others only until one of them has the version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from rlx.concurrent import all_of
from rlx.inference.client import Client
from rlx.inference.replica import Replica
from rlx.inference.sampler import FAILING, PAUSE
from rlx.inference.wire import (
    InferenceError,
    RequestRefused,
    ServerUnreachable,
    TakenServer,
    UpdateRefused,
    WeightsDiffer,
    WeightsGone,
    label_of,
)
from rlx.types import WeightVersion
from rlx.weights.subscribe import request_transfer

log = logging.getLogger(__name__)

GONE = 2.0  # seconds without an answer after which an update goes on without a server, if others have the version
SLOWER = 4.0  # factor: a server that takes so much longer than the first one is left out of an update

Missing = dict[Replica, InferenceError]  # servers that did not get a version, and why


async def load_all(
    servers: Sequence[Replica], load: Callable[[Replica], Awaitable[None]], weights: WeightVersion, timeout: float, hung: float
) -> Missing:
    """Load a version into all servers. Returns the servers without it; at least one has it.

    `timeout`: seconds for the update. Time in which no server answers does not count. `hung`: seconds that a server has at least.
    Raises UpdateRefused, WeightsDiffer and TakenServer of any server; if no server has the version, the error of one, or ServerUnreachable.
    """
    loading = {asyncio.ensure_future(load(server)): server for server in servers}
    waiting, missing = set(loading), Missing()
    began = last = time.monotonic()
    first: float | None = None  # seconds of the first server that has it
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=PAUSE, return_when=asyncio.FIRST_COMPLETED)
            now = time.monotonic()
            if first is None and not done and all(loading[task].silent_since is not None for task in waiting):
                began += now - last
            last = now
            for task in done:
                try:
                    task.result()
                    first = now - began if first is None else first
                except (UpdateRefused, WeightsDiffer, TakenServer):
                    raise
                except InferenceError as error:
                    missing[loading[task]] = error
            for task in waiting.copy():
                server = loading[task]
                needless = first is not None and (server.gone(now, GONE) or now - began > max(hung, SLOWER * first))
                if needless or now - began > timeout:
                    waiting.discard(task)
                    missing[server] = ServerUnreachable(
                        f"{server.endpoint.name} did not load version {weights.version} in {now - began:.3g} s "
                        f"(weight_broadcast.timeout={timeout:g})"
                    )
    finally:
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
    if len(missing) == len(servers):
        raise combined(missing)
    return missing


async def insist(
    server: Replica, load: Callable[[], Awaitable[None]], look: Callable[[], Awaitable[object]], restart_timeout: float
) -> None:
    """Load a version into a server. Try again for `restart_timeout` seconds without an answer, and for FAILING while it fails.

    `look`: asks for the server's state, because it may have restarted meanwhile.
    """
    failing_since: float | None = None
    retries = False
    while True:
        try:
            async with server.lock:
                if retries:
                    await look()
                return await load()
        except (RequestRefused, WeightsDiffer):
            raise
        except InferenceError as error:
            if not retries:
                log.warning("an attempt to load a version failed; it is made again: %s", error)
            now, retries = time.monotonic(), True
            if server.silent_since is not None:
                since, limit, failing_since = server.silent_since, restart_timeout, None
            else:
                since = failing_since = failing_since or now
                limit = min(FAILING, restart_timeout)
            if now - since > limit:
                raise
        await asyncio.sleep(PAUSE)


async def transfer(
    servers: Sequence[Replica], client: Client, weights: WeightVersion, run: str, timeout: float, hung: float, restart_timeout: float
) -> Missing:
    """Let the trainer send a version from its memory to all servers, which are paused meanwhile. Returns those without it.

    `hung`: seconds for a server to pause; without any that does, it tries again for `restart_timeout` seconds.
    Raises WeightsGone if no server got the version: the trainer has another one by now, or the transfer broke. They stay paused.
    """
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server.lock)
        missing, began = await _pause_all(servers, client, hung), time.monotonic()
        while len(missing) == len(servers):
            if time.monotonic() - began > restart_timeout:
                raise combined(missing)
            await asyncio.sleep(PAUSE)
            missing = await _pause_all(servers, client, hung)
        receiving = [server for server in servers if server not in missing]
        for server in receiving:
            server.loading = True
        urls = [(server.endpoint.url, server.endpoint.api_key) for server in receiving]
        failed = await request_transfer(weights.where, weights.version, urls, timeout)
        for server in servers:
            if server.endpoint.url in failed:
                missing[server] = WeightsGone(f"{server.endpoint.name}: {failed[server.endpoint.url]}")
        if len(missing) == len(servers):
            raise WeightsGone("; ".join(map(str, missing.values())))
        label = label_of(weights.version, run)
        await all_of(server.label(client, label) for server in servers if server not in missing)
    return missing


async def _pause_all(servers: Sequence[Replica], client: Client, hung: float) -> Missing:
    """Pause all servers. Returns those that do not answer."""
    missing = Missing()

    async def pause(server: Replica) -> None:
        try:
            await client.in_time(server.pause(client), server.endpoint, hung, "pause")
        except ServerUnreachable as error:
            missing[server] = error

    await all_of(pause(server) for server in servers)
    return missing


def combined(missing: Missing) -> InferenceError:
    """One error for several."""
    first, *others = missing.values()
    return ServerUnreachable("; ".join(map(str, missing.values()))) if others else first
