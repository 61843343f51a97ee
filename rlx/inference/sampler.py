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
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rlx.inference import wire
from rlx.inference.client import Client
from rlx.inference.endpoints import Endpoint
from rlx.inference.wire import (
    UNLABELLED,
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

Restore = Callable[[Endpoint], Awaitable[None]]
"""Loads the run's version into the server at an endpoint. Raises InferenceError if that fails."""


class Servers(msgspec.Struct, frozen=True):
    """The servers of a run at the moment, for a sampler in another process."""

    endpoints: list[Endpoint]
    lost: list[str]  # keys of those whose requests in flight are to go elsewhere at once
    version: int  # that all of them have
    adapter: str | None  # its name if it is an adapter
    context: int
    run: str | None
    request_timeout: float
    restart_timeout: float


class _Server:
    """One server, and this sampler's requests on it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.load = 0  # requests in flight
        self.avoided_until = 0.0  # monotonic time
        self.requests: set[asyncio.Task[tuple[int, bytes]]] = set()

    async def send(self, client: Client, body: bytes) -> tuple[int, bytes]:
        task = asyncio.ensure_future(client.send(self.endpoint, "POST", wire.GENERATE, body))
        self.requests.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            raise ServerUnreachable(f"{self.endpoint.name} was left") from None  # by `drop`
        finally:
            task.cancel()
            self.requests.discard(task)

    def drop(self) -> None:
        """End its requests; each goes to another server."""
        for task in self.requests:
            task.cancel()


class Sampler:
    """Samples on the servers of one run. An async context manager. Belongs to one event loop.

    `version`: a version that all servers have; the owner sets it. No token of an older version is ever returned.
    `listeners` are told of every change. `on_outage`: called with whether no server takes requests, when that changes.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        request_timeout: float,
        restart_timeout: float = RESTART,
        restore: Restore | None = None,
        run: str | None = None,
        adapter: Callable[[int], str | None] = lambda version: None,
        context: Callable[[], int] = lambda: 0,
    ) -> None:
        """`request_timeout`: seconds for one request, retries included, but not the time in which no server could take it.

        `restart_timeout`: seconds for which servers may be unreachable before a request fails. `restore`: called for a server with an older
        version. `run`: the token in the labels of the run's versions (`wire.label_of`); None: any label counts, as servers of others are
        not updated. `adapter`: the name of the adapter that a version is; None: the version is the base model. `context`: tokens that a
        server takes; 0: not known.
        """
        if not endpoints:
            raise ValueError("no inference server.\n  fix: set inference.base_url, or hardware.inference_replicas to at least 1")
        self.listeners: list[Callable[[Servers], None]] = []
        self.on_outage: Callable[[bool], None] = lambda begins: None
        self._version = 0
        self._servers = [_Server(endpoint) for endpoint in endpoints]
        self._affinity: OrderedDict[int, _Server] = OrderedDict()
        self._request_timeout, self._restart_timeout = request_timeout, restart_timeout
        self._restore, self._run, self._adapter, self._context = restore, run, adapter, context
        self.waiting = 0  # requests that wait for their answers
        self._ended_outages = 0.0  # seconds
        self._outage_since: float | None = None  # monotonic time since which no server takes requests
        self._client = Client()

    async def __aenter__(self) -> Sampler:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.__aexit__()

    def use(self, endpoints: Sequence[Endpoint], lost: Collection[str] = ()) -> None:
        """Use these servers from now on; at least one.

        Requests in flight on a server that is not among them end there, unless its key is in `lost`: then they go elsewhere at once.
        """
        named = {endpoint.key: endpoint for endpoint in endpoints}
        for server in self._servers:
            if server.endpoint.key in lost:
                server.drop()
        there = {server.endpoint.key: server for server in self._servers}
        self._servers = []
        for key, endpoint in named.items():
            server = there.get(key) or _Server(endpoint)
            server.endpoint = endpoint  # a server that restarted has a new address
            self._servers.append(server)
        self.tell(lost)

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        self.tell()

    def servers(self, lost: Collection[str] = ()) -> Servers:
        """What it knows of the servers. `lost`: see `use`."""
        return Servers(
            endpoints=[server.endpoint for server in self._servers],
            lost=list(lost),
            version=self.version,
            adapter=self._adapter(self.version),
            context=self._context(),
            run=self._run,
            request_timeout=self._request_timeout,
            restart_timeout=self._restart_timeout,
        )

    def tell(self, lost: Collection[str] = ()) -> None:
        """Tell the listeners what it knows."""
        if self.listeners:
            servers = self.servers(lost)
            for listener in self.listeners:
                listener(servers)

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
        prompt = np.asarray(prompt_ids, wire.INT)
        try:
            parameters = msgspec.convert(sampling, Sampling)
        except msgspec.ValidationError as error:
            raise RequestRefused(f"sampling parameters {dict(sampling)}: {error}") from error
        if 0 < (context := self._context()) <= len(prompt):
            raise ContextTooLong(f"the prompt has {len(prompt)} tokens, the servers' context {context}: no room for a new token")
        self.waiting += 1
        try:
            return await self._generate(prompt, parameters, request_id, affinity)
        finally:
            self.waiting -= 1
            if not self.waiting:  # whether a server takes requests is not known when there are none
                self._end_outage()

    async def _generate(self, prompt: Any, parameters: Sampling, request_id: str, affinity: int) -> Turn:
        """See `generate`: one request, until it is answered or fails for good."""
        troubled_since: float | None = None
        server: _Server | None = None
        try:
            async with asyncio.timeout(self._request_timeout) as limit:
                while True:
                    server = self._choose(affinity, server)
                    server.load += 1
                    began = time.monotonic()
                    try:
                        turn = await self._sample(server, prompt, parameters, request_id)
                        self._end_outage()
                        return turn
                    except (RequestRefused, TakenServer):
                        raise
                    except InferenceError as error:
                        trouble = error
                    finally:
                        server.load -= 1
                    now = time.monotonic()
                    server.avoided_until = now + AVOIDED
                    took_it = not isinstance(trouble, ServerUnreachable) or trouble.connected
                    if troubled_since is None or (took_it and now - began > 4 * PAUSE):  # the server worked on it meanwhile
                        troubled_since = now
                    others = any(other.avoided_until <= now for other in self._servers)
                    unreachable = isinstance(trouble, ServerUnreachable | StaleServer)
                    if unreachable and not others:
                        self._begin_outage(trouble)
                        limit.reschedule(None)
                        restored = isinstance(trouble, StaleServer) and await self._restored(server, trouble)
                        limit.reschedule(asyncio.get_running_loop().time() + self._request_timeout)
                        if restored:
                            continue
                    if now - troubled_since > (self._restart_timeout if unreachable else min(FAILING, self._restart_timeout)):
                        raise trouble
                    if not others:
                        await asyncio.sleep(PAUSE)
        except TimeoutError:
            name = server.endpoint.name if server is not None else "the inference servers"
            raise ServerUnreachable(
                f"{name} did not finish request {request_id} in {self._request_timeout:g} s (inference.request_timeout)"
            ) from None

    async def _sample(self, server: _Server, prompt: Any, sampling: Sampling, request_id: str) -> Turn:
        """One attempt. Raises InferenceError."""
        version, endpoint = self.version, server.endpoint
        adapter = self._adapter(version)
        try:
            status, body = await server.send(self._client, wire.generate_body(prompt, sampling, request_id, adapter))
        except ServerUnreachable:
            server.endpoint = endpoint.refreshed()
            raise
        if status == 404 and adapter is not None:
            raise StaleServer(f"{endpoint.name} does not have the adapter {adapter}")
        if status != 200:
            raise error_of(endpoint.name, status, body)

        def version_of(label: str) -> int:
            return version if adapter is not None else self._version_of(endpoint, label, version)

        return wire.turn_of(endpoint.name, body, prompt, sampling.scored_at, version_of)

    def _version_of(self, endpoint: Endpoint, label: str, at_least: int) -> int:
        """The version that a label of this run names. Raises StaleServer for an older one, TakenServer for another run's."""
        found = parse_label(label)
        if self._run is None:
            return found[0] if found else at_least
        if found is not None and found[1] != self._run:
            raise TakenServer(
                f"{endpoint.name} sampled with version {found[0]} of another run ({found[1]}; this one is {self._run}): two runs update "
                "one server.\n  fix: give each run servers of its own, or run them in turn"
            )
        if label == UNLABELLED or found is None or found[0] < at_least:
            raise StaleServer(f"{endpoint.name} sampled with version {label}, and the run has version {at_least}")
        return found[0]

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
            self.on_outage(True)
            log.warning("no inference server takes requests; they wait for up to %g s: %s", self._restart_timeout, why)

    def _end_outage(self) -> None:
        if self._outage_since is not None:
            log.info("no request waits for an inference server any more, after %.1f s", time.monotonic() - self._outage_since)
            self._ended_outages, self._outage_since = self.away, None
            self.on_outage(False)

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


class Follower(Sampler):
    """A sampler in another process, kept at what the run's own knows. Servers that lack the run's version are restored from there."""

    def __init__(self, servers: Servers) -> None:
        self._there = servers
        super().__init__(
            servers.endpoints,
            servers.request_timeout,
            servers.restart_timeout,
            run=servers.run,
            adapter=lambda version: self._there.adapter,
            context=lambda: self._there.context,
        )
        self.version = servers.version

    def take(self, servers: Servers) -> None:
        """The servers are these now."""
        self._there = servers
        self.use(servers.endpoints, servers.lost)
        self.version = servers.version
