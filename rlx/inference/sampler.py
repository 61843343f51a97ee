"""Samples on any number of servers: token ids in, token ids with log-probabilities and versions out.

A request goes to the least loaded server. Requests of equal `affinity` go to one server, which has the keys and values of the earlier
turns in its cache. If a server does not answer, the request goes to another one at once. If no server answers, the request waits and is
retried at the addresses that the endpoint files have by then. `use` adds and removes servers while requests are in flight.
There may be many samplers, also in processes that have only the endpoint files. Weight updates are `rlx.inference.fleet`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
import numpy as np

from rlx.inference.channel import Channel
from rlx.inference.endpoints import Endpoint
from rlx.inference.protocol import (
    CONNECT,
    FAILING,
    FLOAT,
    INT,
    PAUSE,
    RESTART,
    Answer,
    Completion,
    GenerateRequest,
    InferenceError,
    RequestRefused,
    Sampling,
    ServerUnreachable,
    StaleServer,
    error_of,
    pack_ids,
)
from rlx.types import Turn

log = logging.getLogger(__name__)

REMEMBERED = 16384  # affinities kept; the least recently used is dropped

Restore = Callable[[Endpoint], Awaitable[None]]
"""Updates the server at an endpoint to the run's version. Raises StaleServer if that fails."""


class _Server:
    """One replica, and this sampler's requests on it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.load = 0  # requests in flight
        self.away_until = 0.0  # it did not answer: until this monotonic time other servers are preferred
        self.removed = False  # it gets no new requests
        self.channel: Channel | None = None
        self.connecting = asyncio.Lock()

    @property
    def connected(self) -> bool:
        return self.channel is not None and not self.channel.ended

    async def disconnect(self) -> None:
        if self.channel is not None:
            await self.channel.close()


class Sampler:
    """Samples on the servers of one run. An async context manager. Belongs to one event loop.

    `version`: a version that all servers have; the owner sets it. No token of an older version is ever sampled.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        request_timeout: float,
        restart_timeout: float = RESTART,
        restore: Restore | None = None,
        run: str = "",
    ) -> None:
        """`request_timeout`: seconds for one request, retries included, but not the time in which no server could take it.

        `restart_timeout`: seconds for which servers may be unreachable, or have an older version, before a request fails.
        `restore`: called for a server with an older version, if the fleet is in this process. Without it a request waits until the
        fleet notices by itself. `run`: the run's directory, if it claims the servers (`protocol.Claim`).
        """
        if not endpoints:
            raise ValueError("no inference server: set inference.base_url, or hardware.inference_replicas to at least 1")
        self.version = 0
        self._servers = [_Server(endpoint) for endpoint in endpoints]
        self._affinity: OrderedDict[int, _Server] = OrderedDict()
        self._disconnecting: set[asyncio.Future[None]] = set()
        self._request_timeout = request_timeout
        self._restart_timeout = restart_timeout
        self._restore = restore
        self._run = run
        self._away = 0.0  # seconds of the outages that have ended
        self._away_since: float | None = None  # monotonic time since which no server takes requests
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Sampler:
        connector, timeout = aiohttp.TCPConnector(limit=0, keepalive_timeout=300), aiohttp.ClientTimeout(total=None, sock_connect=CONNECT)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._session is not None
        for server in self._servers:
            await server.disconnect()
        await asyncio.gather(*self._disconnecting)
        await self._session.close()

    def use(self, endpoints: Sequence[Endpoint], lost: Collection[str] = ()) -> None:
        """Use these servers from now on; at least one.

        Requests in flight on a server that is not among them end there, unless its key is in `lost`: then they go elsewhere at once.
        """
        wanted = {endpoint.key: endpoint for endpoint in endpoints}
        for server in self._servers:
            if server.endpoint.key not in wanted:
                server.removed = True
                if server.load == 0 or server.endpoint.key in lost:
                    self._disconnect(server)
        self._servers = [server for server in self._servers if not server.removed]
        known = {server.endpoint.key for server in self._servers}
        self._servers += [_Server(endpoint) for key, endpoint in wanted.items() if key not in known]

    def endpoints(self) -> list[Endpoint]:
        """The servers that it uses."""
        return [server.endpoint for server in self._servers]

    @property
    def away(self) -> float:
        """Seconds so far in which no server took requests."""
        return self._away + (0.0 if self._away_since is None else time.monotonic() - self._away_since)

    def _none_answers(self, since: float, why: InferenceError) -> None:
        if self._away_since is None:
            self._away_since = since
            log.warning("no inference server takes requests, which wait for up to %g s: %s", self._restart_timeout, why)

    def _one_answers(self) -> None:
        if self._away_since is not None:
            log.info("an inference server takes requests again, after %.1f s", time.monotonic() - self._away_since)
            self._away, self._away_since = self.away, None

    def _disconnect(self, server: _Server) -> None:
        closing = asyncio.ensure_future(server.disconnect())
        self._disconnecting.add(closing)
        closing.add_done_callback(self._disconnecting.discard)

    async def generate(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], request_id: str, affinity: int = 0) -> Turn:
        """Sample one completion of `prompt_ids` [P] from the newest policy. If that changes meanwhile, later tokens are of the new one.

        `sampling`: the fields of `protocol.Sampling`. The same seed and policy give the same tokens.
        Requests of equal `affinity` go to one server. Cancelling the call aborts the request on the server.
        Raises ContextTooLong, RequestRefused, ServerUnreachable or StaleServer.
        """
        prompt = pack_ids(prompt_ids)
        try:
            parameters = msgspec.convert(sampling, Sampling)
        except msgspec.ValidationError as error:
            raise RequestRefused(f"sampling parameters {dict(sampling)}: {error}") from error
        troubled_since: float | None = None  # time since which no server could take the request
        server: _Server | None = None
        try:
            async with asyncio.timeout(self._request_timeout) as limit:
                while True:
                    server = self._choose(affinity, server)
                    others = any(other is not server and other.away_until <= time.monotonic() for other in self._servers)
                    server.load += 1
                    version, began, connected = self.version, time.monotonic(), server.connected
                    try:
                        answer = await self._sample(server, GenerateRequest(request_id, prompt, parameters, version))
                        if answer.completion is not None:
                            self._one_answers()
                            return _turn(prompt, answer.completion)
                        trouble = await self._trouble(server, answer, version, others)
                        if trouble is None:
                            continue
                    except ServerUnreachable as error:
                        trouble = error
                    finally:
                        server.load -= 1
                        if server.removed and server.load == 0:
                            self._disconnect(server)
                    now = time.monotonic()
                    if troubled_since is None or (connected and now - began > 4 * PAUSE):  # the server worked on it meanwhile
                        troubled_since = now
                    fails = not isinstance(trouble, ServerUnreachable | StaleServer)  # it answers, but not this request
                    if now - troubled_since > (min(FAILING, self._restart_timeout) if fails else self._restart_timeout):
                        raise trouble
                    if not (fails or others):
                        self._none_answers(max(began, troubled_since), trouble)
                        limit.reschedule(asyncio.get_running_loop().time() + self._request_timeout)
                    if server.away_until <= now or not others:
                        await asyncio.sleep(PAUSE)
        except TimeoutError:
            name = server.endpoint.name if server is not None else "the inference servers"
            raise ServerUnreachable(
                f"{name} did not finish request {request_id} in {self._request_timeout:g} s (inference.request_timeout)"
            ) from None

    async def _trouble(self, server: _Server, answer: Answer, version: int, others: bool) -> InferenceError | None:
        """Why the server did not sample, if a retry may help; None: it can sample now. Raises the error of a request that is wrong.

        A server with an older version is updated. If there are other servers, the fleet does this meanwhile.
        """
        endpoint = server.endpoint
        if answer.status == 500:  # it failed this request; other requests may go on
            return error_of(endpoint.name, answer.status, answer.error)
        if answer.status != 409:
            raise error_of(endpoint.name, answer.status, answer.error)
        stale = StaleServer(f"{endpoint.name} has an older version than {version} and was not updated: {answer.error}")
        if others or server.removed:
            server.away_until = time.monotonic() + 4 * PAUSE
        elif self._restore is not None:
            await self._restore(endpoint)
            return None
        return stale

    async def _sample(self, server: _Server, request: GenerateRequest) -> Answer:
        """The server's answer. Raises ServerUnreachable if there is none or its engine is dead, RequestRefused for a wrong key."""
        endpoint = server.endpoint
        try:
            channel = server.channel
            if channel is None or channel.ended:
                channel = await self._connect(server)
            answer = await channel.ask(request)
            if answer.status != 503:
                return answer
            cause = f"{endpoint.name}: {answer.error}"
        except aiohttp.WSServerHandshakeError as error:
            if 400 <= error.status < 500 and not endpoint.superseded:
                raise RequestRefused(f"{endpoint.name} ({error.status}): it refused the connection; check the API key") from None
            cause = f"{endpoint.name} ({error.status}): {error.message}"
        except (aiohttp.ClientError, OSError) as error:
            cause = f"{endpoint.name} does not answer: {error or type(error).__name__}"
        server.away_until = time.monotonic() + 4 * PAUSE
        server.endpoint = endpoint.refreshed()
        raise ServerUnreachable(cause)

    async def _connect(self, server: _Server) -> Channel:
        """The connection to a server. Opens one if there is none."""
        assert self._session is not None, "use the sampler as `async with Sampler(…) as sampler`"
        async with asyncio.timeout(CONNECT), server.connecting:  # a hung server accepts connections, but does not shake hands
            if server.channel is None or server.channel.ended:
                url = server.endpoint.url + "/generate"
                server.channel = await Channel.connect(self._session, url, server.endpoint.headers, self._run)
            return server.channel

    def _choose(self, affinity: int, failed: _Server | None = None) -> _Server:
        """The server of this affinity if it answers; otherwise the least loaded server, preferably one that answers.

        `failed`: the server that has just failed this request.
        """
        server = self._affinity.get(affinity)
        now = time.monotonic()
        if server is None or server is failed or server.removed or server.away_until > now:
            server = min(self._servers, key=lambda server: (server.away_until > now, server is failed, server.load))
            self._affinity[affinity] = server
            if len(self._affinity) > REMEMBERED:
                self._affinity.popitem(last=False)
        self._affinity.move_to_end(affinity)
        return server


def _turn(prompt: bytes, completion: Completion) -> Turn:
    runs = np.array(completion.versions, dtype=np.int32).reshape(-1, 2)
    return Turn(
        prompt_ids=np.frombuffer(prompt, INT),
        completion_ids=np.frombuffer(completion.token_ids, INT),
        logprobs=np.frombuffer(completion.logprobs, FLOAT),
        versions=runs[:, 0].repeat(runs[:, 1]),
        temperature=completion.temperature,
        finish_reason=completion.finish_reason,
    )
