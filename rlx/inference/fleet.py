"""The servers of a run as a whole: tracks their policy version and updates all of them to the next one.

There is one fleet per run. It checks every server now and then. A server that restarted has version 0 and gets the run's version before
it samples for the run: requests name the version that they need, and a server refuses versions newer than its own.
Sampling is `rlx.inference.sampler`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from rlx.inference.endpoints import Endpoint
from rlx.inference.protocol import (
    PAUSE,
    RESTART,
    Failure,
    InferenceError,
    PolicyState,
    ServerUnreachable,
    StaleServer,
    UpdateRefused,
    error_of,
)
from rlx.types import WeightVersion

T = TypeVar("T")

log = logging.getLogger(__name__)

LOOK = 2.0  # seconds between two checks of the servers

_state = msgspec.json.Decoder(PolicyState)
_failure = msgspec.json.Decoder(Failure)


class _Server:
    """One replica."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.updating = asyncio.Lock()


class Fleet:
    """All servers of one run. An async context manager. Belongs to one event loop.

    `version`: the version of the latest complete update.
    """

    def __init__(self, endpoints: Sequence[Endpoint], restart_timeout: float = RESTART, drain_tokens: int = 0, look: float = LOOK) -> None:
        """`restart_timeout`: seconds for which a server may be unreachable during an update.

        `drain_tokens`: see `protocol.UpdateRequest`. `look`: seconds between two checks of the servers.
        """
        self.version = 0
        self._weights: WeightVersion | None = None  # the weights of `version`; None for version 0
        self._servers = [_Server(endpoint) for endpoint in endpoints]
        self._restart_timeout = restart_timeout
        self._drain_tokens = drain_tokens
        self._look = look
        self._session: aiohttp.ClientSession | None = None
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Fleet:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=300)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        self._watching = asyncio.ensure_future(self._watch())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._session is not None
        assert self._watching is not None
        self._watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watching
        await self._session.close()

    # -- versions

    async def update(self, weights: WeightVersion, timeout: float = 600.0) -> None:
        """Update all servers to a version, without losing a request. Returns when all servers have it.

        The version's files must stay until the next update, because a server that restarts loads them.
        Raises UpdateRefused if a server rejects the weights, ServerUnreachable or InferenceError if a server fails or does not finish in
        `timeout` seconds, and ValueError for a kind of weights that servers cannot load.
        """
        try:
            async with asyncio.timeout(timeout):
                await _all(self._tell(server, weights) for server in self._servers)
        except TimeoutError:
            raise ServerUnreachable(
                f"not all servers had version {weights.version} after {timeout:g} s (weight_broadcast.timeout)"
            ) from None
        self._weights, self.version = weights, weights.version

    async def restore(self, endpoint: Endpoint) -> None:
        """Update the server at `endpoint` to the run's version if it restarted. Raises StaleServer if that fails."""
        for server in self._servers:
            if server.endpoint.key == endpoint.key:
                server.endpoint = endpoint
                await self._restore(server)
                return
        raise StaleServer(f"{endpoint.name} is not one of this run's servers: {', '.join(s.endpoint.url for s in self._servers)}")

    async def versions(self) -> list[int]:
        """The policy version that each server has, in the order of the endpoints."""
        return [state.version for state in await self.states()]

    async def stats(self) -> dict[str, float]:
        """The servers' current metrics by name: the mean of the cache usage, the sums of the others."""
        states = await self.states()
        return {
            "perf/kv_cache_usage": sum(state.kv_cache_usage for state in states) / len(states),
            "perf/running": sum(state.running for state in states),
            "perf/waiting": sum(state.waiting for state in states),
            "perf/preemptions": sum(state.preemptions for state in states),
        }

    async def states(self) -> list[PolicyState]:
        """The state of each server, in the order of the endpoints."""
        return await _all(self._state(server) for server in self._servers)

    async def wait_ready(self, timeout: float, tick: Callable[[], None] | None = None) -> None:
        """Return when every server answers and has version 0. A server that still has a version of an earlier run is reset to 0.

        `tick` is called several times a second meanwhile. Raises ServerUnreachable, which names the server, or RequestRefused for a
        wrong key.
        """
        deadline = time.monotonic() + timeout
        for server in self._servers:
            while True:
                try:
                    state = await self._state(server)
                    break
                except ServerUnreachable as error:
                    if time.monotonic() > deadline:
                        raise ServerUnreachable(f"{server.endpoint.name} was not ready after {timeout:g} s: {error}") from error
                if tick is not None:
                    tick()
                await asyncio.sleep(PAUSE)
            if state.version > self.version:
                status, answer = await self._insist(server, "POST", "/reload_weights")
                if status != 200:
                    raise error_of(server.endpoint.name, status, answer)

    async def _watch(self) -> None:
        """Restore servers that restarted, whichever process samples on them. A failure is logged once and retried."""
        said: dict[str, str] = {}
        while True:
            await asyncio.sleep(self._look)
            if self._weights is None:
                continue
            for server in self._servers:
                key = server.endpoint.key
                try:
                    async with asyncio.timeout(self._restart_timeout):
                        if (await self._state(server)).version < self.version:
                            await self._restore(server)
                    said.pop(key, None)
                except (InferenceError, TimeoutError, msgspec.MsgspecError) as error:
                    text = str(error) or f"{server.endpoint.name} did not report its version in {self._restart_timeout:g} s"
                    if said.get(key) != text:
                        log.warning("%s", text)
                    said[key] = text

    async def _restore(self, server: _Server) -> None:
        async with server.updating:
            state = await self._state(server)
            if state.version >= self.version:
                return
            if self._weights is None:
                raise StaleServer(f"{server.endpoint.name} has an older version than {self.version}, and the fleet has no weights for it")
            log.info("%s has version %d; updating it to version %d", server.endpoint.name, state.version, self.version)
            try:
                await self._load(server, self._weights)
            except UpdateRefused as error:
                raise StaleServer(f"{server.endpoint.name} restarted and could not load version {self.version}: {error}") from error

    async def _tell(self, server: _Server, weights: WeightVersion) -> None:
        async with server.updating:
            await self._load(server, weights)

    async def _load(self, server: _Server, weights: WeightVersion) -> None:
        if weights.kind != "files":
            raise ValueError(f"version {weights.version} is of kind {weights.kind!r}; servers can load 'files'")
        request = {"weight_dir": weights.where, "version": weights.version, "drain_tokens": self._drain_tokens}
        status, answer = await self._insist(server, "POST", "/update_weights", json.dumps(request).encode())
        if status == 422:
            raise UpdateRefused(f"{server.endpoint.name}: {_failure.decode(answer).error}")
        if status != 200:
            raise error_of(server.endpoint.name, status, answer)

    async def _state(self, server: _Server) -> PolicyState:
        status, answer = await self._ask(server, "GET", "/policy")
        if status != 200:
            raise error_of(server.endpoint.name, status, answer)
        return _state.decode(answer)

    # -- asking

    async def _insist(self, server: _Server, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """`_ask` until the server answers, for at most `restart_timeout` seconds."""
        deadline = time.monotonic() + self._restart_timeout
        while True:
            try:
                return await self._ask(server, method, path, body)
            except ServerUnreachable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(PAUSE)

    async def _ask(self, server: _Server, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """One request; returns status and body. Raises ServerUnreachable if the answer is missing or cut, or if the engine is dead."""
        assert self._session is not None, "use the fleet as `async with Fleet(…) as fleet`"
        endpoint = server.endpoint
        try:
            async with self._session.request(method, endpoint.url + path, data=body, headers=endpoint.headers) as answer:
                content = await answer.read()
                if answer.status != 503:
                    return answer.status, content
                cause = f"{endpoint.name}: {_failure.decode(content).error}"
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            cause = f"{endpoint.name} does not answer: {error or type(error).__name__}"
        server.endpoint = endpoint.refreshed()
        raise ServerUnreachable(cause)


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all calls, run concurrently. The first error cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
