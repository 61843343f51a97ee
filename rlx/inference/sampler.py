"""Samples on any number of servers: token ids in, token ids with log-probabilities and versions out. All retries of requests are here.

A request goes to the least loaded server. Requests of equal `affinity` go to one server, which has the KV cache of the earlier turns.

    what happens                                       what the sampler does
    no answer, cut answer, 503                         another server at once; without one it waits up to `restart_timeout` (an outage)
    500, no whole completion                           another server at once; again for up to FAILING seconds: other requests may go on
    a version older than the run's (a restart)         the fleet loads the run's version; the tokens are not used
    another run's version                              raises TakenServer
    400, 401, 403, 404, 422                            raises RequestRefused; ContextTooLong if the prompt fills the context

Weight updates are `rlx.inference.fleet`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from rlx.inference import wire
from rlx.inference.client import Client
from rlx.inference.endpoints import Endpoint
from rlx.inference.wire import (
    ContextTooLong,
    InferenceError,
    RequestRefused,
    Sampling,
    ServerUnreachable,
    StaleServer,
    TakenServer,
    error_of,
    parse_label,
)
from rlx.trace import Turn

log = logging.getLogger(__name__)

PAUSE = 0.25  # seconds between two attempts to reach a server
AVOIDED = 1.0  # seconds for which other servers are preferred to one that failed
RESTART = 60.0  # seconds for which servers may be unreachable before requests fail, if the owner does not say
FAILING = 60.0  # seconds for which servers may fail a request (500) before it fails
REMEMBERED = 16384  # affinities; the least recently used is dropped


class Servers(msgspec.Struct, frozen=True):
    """What samplers know of the servers of a run, also those in other processes."""

    endpoints: list[Endpoint]
    request_timeout: float  # seconds for one request, retries included, but not the time in which no server could take it
    restart_timeout: float  # seconds for which servers may be unreachable before a request fails
    run: str | None  # the token in the labels of the run's versions (`wire.label_of`); None: any label counts, nobody updates the servers
    version: int = 0  # that all of them have: no token of an older one is ever returned
    adapter: str | None = None  # its name if it is an adapter
    context: int = 0  # tokens that a server takes; 0: not known
    lost: list[str] = []  # keys of those whose requests in flight are to go elsewhere at once


@dataclass(eq=False)
class _Server:
    """One server, and this sampler's requests on it."""

    endpoint: Endpoint
    load: int = 0  # requests in flight
    avoided_until: float = 0.0  # monotonic time
    requests: set[asyncio.Task[tuple[int, bytes]]] = field(default_factory=set)


class Sampler:
    """Samples on the servers of one run. An async context manager. Belongs to one event loop.

    `listeners` are told of every change of what it knows of the servers.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        request_timeout: float,
        restart_timeout: float = RESTART,
        restore: Callable[[Endpoint], Awaitable[None]] | None = None,
        run: str | None = None,
    ) -> None:
        """`restore` loads the run's version into a server that has an older one. The others are those of `Servers`."""
        if not endpoints:
            raise ValueError("no inference server.\n  fix: set inference.base_url, or hardware.inference_replicas to at least 1")
        self.listeners: list[Callable[[Servers], None]] = []
        self._servers: list[_Server] = []
        self._affinity: OrderedDict[int, _Server] = OrderedDict()
        self._restore = restore
        self.waiting = 0  # requests that wait for their answers
        self._ended_outages = 0.0  # seconds
        self._outage_since: float | None = None  # monotonic time since which no server takes requests
        self._client = Client()
        self.take(Servers(list(endpoints), request_timeout, restart_timeout, run))

    async def __aenter__(self) -> Sampler:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.__aexit__()

    def take(self, servers: Servers) -> None:
        """Know this of the servers from now on.

        Requests in flight on a server that is not among them end there, unless it is lost: then they go elsewhere at once.
        """
        self._known, there = servers, {server.endpoint.key: server for server in self._servers}
        for task in [task for key in servers.lost if key in there for task in there[key].requests]:
            task.cancel()
        self._servers = [there.get(endpoint.key) or _Server(endpoint) for endpoint in servers.endpoints]
        for server, endpoint in zip(self._servers, servers.endpoints, strict=True):
            server.endpoint = endpoint  # a server that restarted has a new address
        for listener in self.listeners:
            listener(servers)

    def change(self, *, lost: Sequence[str] = (), **known: Any) -> None:
        """Know something else of the servers: fields of `Servers`."""
        self.take(msgspec.structs.replace(self._known, lost=list(lost), **known))

    def servers(self) -> Servers:
        """What it knows of the servers."""
        return self._known

    @property
    def version(self) -> int:
        """A version that all servers have."""
        return self._known.version

    @version.setter
    def version(self, version: int) -> None:
        if version != self.version:
            self.change(version=version)

    @property
    def away(self) -> float:
        """Seconds so far in which no server took requests."""
        return self._ended_outages + (0.0 if self._outage_since is None else time.monotonic() - self._outage_since)

    async def generate(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], request_id: str, affinity: int = 0) -> Turn:
        """Sample one completion of `prompt_ids` [P] from the newest policy. If that changes meanwhile, later tokens are of the new one.

        `sampling`: the fields of `wire.Sampling`. The same seed and policy give the same tokens.
        Cancelling the call aborts the request on the server.
        Raises ContextTooLong, RequestRefused, ServerUnreachable, StaleServer or TakenServer.
        """
        prompt, context = np.asarray(prompt_ids, wire.INT), self._known.context
        try:
            parameters = msgspec.convert(sampling, Sampling)
        except msgspec.ValidationError as error:
            raise RequestRefused(f"sampling parameters {dict(sampling)}: {error}") from error
        if 0 < context <= len(prompt):
            raise ContextTooLong(f"the prompt has {len(prompt)} tokens, the servers' context {context}: no room for a new token")
        self.waiting += 1
        try:
            return await self._until_answered(prompt, parameters, request_id, affinity)
        finally:
            self.waiting -= 1
            if not self.waiting:  # whether a server takes requests is not known when there are none
                self._end_outage()

    async def _until_answered(self, prompt: Any, parameters: Sampling, request_id: str, affinity: int) -> Turn:
        """See `generate`: one request, until it is answered or fails for good."""
        known, troubled_since = self._known, 0.0
        failed: _Server | None = None
        try:
            async with asyncio.timeout(known.request_timeout) as limit:
                while True:
                    server, began = self._choose(affinity, failed), time.monotonic()
                    try:
                        turn = await self._sample(server, prompt, parameters, request_id)
                        self._end_outage()
                        return turn
                    except (RequestRefused, TakenServer):
                        raise
                    except InferenceError as error:
                        trouble, failed, now = error, server, time.monotonic()
                    server.avoided_until = now + AVOIDED
                    worked_on_it = getattr(trouble, "connected", True) and now - began > 4 * PAUSE
                    troubled_since = now if worked_on_it or not troubled_since else troubled_since
                    others = any(other.avoided_until <= now for other in self._servers)
                    unreachable = isinstance(trouble, ServerUnreachable | StaleServer)
                    if unreachable and not others:
                        self._begin_outage(trouble)
                        limit.reschedule(None)
                        restored = isinstance(trouble, StaleServer) and await self._restored(server, trouble)
                        limit.reschedule(asyncio.get_running_loop().time() + known.request_timeout)
                        if restored:
                            continue
                    if now - troubled_since > (known.restart_timeout if unreachable else min(FAILING, known.restart_timeout)):
                        raise trouble
                    if not others:
                        await asyncio.sleep(PAUSE)
        except TimeoutError:
            raise ServerUnreachable(
                f"{server.endpoint.name} did not finish request {request_id} in {known.request_timeout:g} s (inference.request_timeout)"
            ) from None

    async def _sample(self, server: _Server, prompt: Any, sampling: Sampling, request_id: str) -> Turn:
        """One attempt. Raises InferenceError."""
        known, endpoint = self._known, server.endpoint
        body = wire.generate_body(prompt, sampling, request_id, known.adapter)
        task = asyncio.ensure_future(self._client.send(endpoint, wire.GENERATE, body))
        server.requests.add(task)
        server.load += 1
        try:
            status, content = await task
        except ServerUnreachable:
            server.endpoint = endpoint.refreshed()
            raise
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            raise ServerUnreachable(f"{endpoint.name} was left") from None  # by `take`
        finally:
            task.cancel()
            server.requests.discard(task)
            server.load -= 1
        if status == 404 and known.adapter is not None:
            raise StaleServer(f"{endpoint.name} does not have the adapter {known.adapter}")
        if status != 200:
            raise error_of(endpoint.name, status, content)

        def version_of(label: str) -> int:
            """The version that a label of this run names. Raises StaleServer for an older one, TakenServer for another run's."""
            version, run = parse_label(label) or (-1, known.run)
            if known.adapter is not None or (known.run is None and version < 0):
                return known.version
            if known.run is not None and run != known.run:
                raise TakenServer(
                    f"{endpoint.name} sampled with version {version} of another run ({run}; this one is {known.run}): two runs update "
                    "one server.\n  fix: give each run servers of its own, or run them in turn"
                )
            if known.run is not None and version < known.version:
                raise StaleServer(f"{endpoint.name} sampled with version {label}, and the run has version {known.version}")
            return version

        return wire.turn_of(endpoint.name, content, prompt, sampling.scored_at, version_of)

    async def _restored(self, server: _Server, trouble: StaleServer) -> bool:
        """Let the fleet load the run's version into a server. If that fails, the reason is added to `trouble`. Raises TakenServer."""
        if self._restore is None:
            return False
        try:
            await self._restore(server.endpoint)
        except TakenServer:
            raise
        except InferenceError as error:
            trouble.args = (f"{trouble}. It was not restored: {error}",)
            return False
        server.avoided_until = 0.0
        return True

    def _begin_outage(self, why: InferenceError) -> None:
        if self._outage_since is None:
            self._outage_since = time.monotonic()
            log.warning("no inference server takes requests; they wait for up to %g s: %s", self._known.restart_timeout, why)

    def _end_outage(self) -> None:
        if self._outage_since is not None:
            log.info("no request waits for an inference server any more, after %.1f s", time.monotonic() - self._outage_since)
            self._ended_outages, self._outage_since = self.away, None

    def _choose(self, affinity: int, failed: _Server | None) -> _Server:
        """The server of this affinity if it is in use and answers; otherwise the least loaded one, preferably one that answers."""
        server, now = self._affinity.get(affinity), time.monotonic()
        if server is None or server is failed or server not in self._servers or server.avoided_until > now:
            # Of equal ones the same in every process, as members of a group may be in several. A hash, because indices have a pattern.
            first = zlib.crc32(str(affinity).encode()) % len(self._servers)
            turned = self._servers[first:] + self._servers[:first]
            server = min(turned, key=lambda one: (one.avoided_until > now, one is failed, one.load))
            self._affinity[affinity] = server
            if len(self._affinity) > REMEMBERED:
                self._affinity.popitem(last=False)
        self._affinity.move_to_end(affinity)
        return server
