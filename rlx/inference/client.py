"""The policy as the orchestrator sees it: tokens in, tokens with log-probabilities and versions out, over any number of servers.

A request goes to the least loaded server; requests of equal `affinity` go to one server, where the earlier turns' keys and values are.
A server that does not answer is tried again, at the address its endpoint file says by then; one that comes back with an older version
than the others is given the newest weights before it samples another token.
Knows the protocol. Knows neither vLLM nor environments.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np

from rlx.inference.channel import Channel
from rlx.inference.endpoints import Endpoint
from rlx.inference.protocol import (
    FLOAT,
    INT,
    Answer,
    Completion,
    ContextTooLong,
    Failure,
    GenerateRequest,
    InferenceError,
    PolicyState,
    RequestRefused,
    Sampling,
    ServerUnreachable,
    StaleServer,
    UpdateRefused,
    pack_ids,
)
from rlx.types import Turn

T = TypeVar("T")

PAUSE = 0.25  # seconds between two attempts at a server that does not answer
RESTART = 60.0  # seconds a server may be away before a request on it fails
REMEMBERED = 16384  # affinities kept; the least recently used is forgotten

_state = msgspec.json.Decoder(PolicyState)
_failure = msgspec.json.Decoder(Failure)


class _Server:
    """One replica and what is under way on it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.load = 0  # requests in flight
        self.away_until = 0.0  # monotonic time before which other servers are preferred: it did not answer
        self.updating = asyncio.Lock()
        self.channel: Channel | None = None
        self.connecting = asyncio.Lock()

    @property
    def name(self) -> str:
        return f"inference server {self.endpoint.url}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.endpoint.api_key}"}

    def gone(self, endpoint: Endpoint) -> None:
        """It did not answer at `endpoint`: others are preferred for a while, and it may be at another address now."""
        self.away_until = time.monotonic() + 4 * PAUSE
        self.endpoint = endpoint.refreshed()


class InferenceClient:
    """The servers of one run. An async context manager; belongs to one event loop.

    `version` is what all servers were last told to serve. A request never samples from an older one.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], request_timeout: float, restart_timeout: float = RESTART, drain_tokens: int = 0
    ) -> None:
        """`request_timeout`: seconds for one request, retries included; `restart_timeout`: seconds that servers may be away meanwhile.

        `drain_tokens`: see `protocol.UpdateRequest`.
        """
        if not endpoints:
            raise ValueError("no inference server: give inference.base_url, or hardware.inference_replicas of at least 1")
        self.version = 0
        self._weights: Path | None = None  # where `version` is, once it is above 0
        self._servers = [_Server(endpoint) for endpoint in endpoints]
        self._affinity: OrderedDict[int, _Server] = OrderedDict()
        self._request_timeout = request_timeout
        self._restart_timeout = restart_timeout
        self._drain_tokens = drain_tokens
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> InferenceClient:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=300)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._session is not None
        for server in self._servers:
            if server.channel is not None:
                await server.channel.close()
        await self._session.close()

    # -- sampling

    async def generate(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], request_id: str, affinity: int = 0) -> Turn:
        """Sample one completion of `prompt_ids` [P] under the newest policy or, where it changes meanwhile, under several in turn.

        `sampling`: the fields of `protocol.Sampling`; the same seed gives the same tokens as long as the policy is the same.
        Requests of equal `affinity` go to one server. Cancelling the call aborts the request on the server.
        Raises ContextTooLong, RequestRefused, ServerUnreachable or StaleServer.
        """
        prompt = pack_ids(prompt_ids)
        try:
            parameters = msgspec.convert(sampling, Sampling)
        except msgspec.ValidationError as error:
            raise RequestRefused(f"sampling parameters {dict(sampling)}: {error}") from error
        away_since: float | None = None
        try:
            async with asyncio.timeout(self._request_timeout):
                while True:
                    server = self._choose(affinity)
                    server.load += 1
                    try:
                        answer = await self._sample(server, GenerateRequest(request_id, prompt, parameters, self.version))
                    except ServerUnreachable:
                        away_since = away_since or time.monotonic()
                        if time.monotonic() - away_since > self._restart_timeout:
                            raise
                        await asyncio.sleep(PAUSE)
                        continue
                    finally:
                        server.load -= 1
                    if answer.completion is not None:
                        return _turn(prompt, answer.completion)
                    if answer.status == 409:
                        await self._restore(server)
                        continue
                    raise _error(server, answer.status, answer.error)
        except TimeoutError:
            raise ServerUnreachable(
                f"{server.name} did not finish request {request_id} in {self._request_timeout:g} s (inference.request_timeout)"
            ) from None

    async def _sample(self, server: _Server, request: GenerateRequest) -> Answer:
        """The server's answer. Raises ServerUnreachable for none, or when the engine behind it is dead; RequestRefused for a wrong key."""
        endpoint = server.endpoint
        try:
            channel = server.channel
            if channel is None or channel.ended:
                channel = await self._connect(server)
            answer = await channel.ask(request)
            if answer.status != 503:
                return answer
            cause = f"{server.name}: {answer.error}"
        except aiohttp.WSServerHandshakeError as error:
            if 400 <= error.status < 500:
                raise RequestRefused(f"{server.name} ({error.status}): it refused the connection; is the key right?") from None
            cause = f"{server.name} ({error.status}): {error.message}"
        except (aiohttp.ClientError, OSError) as error:
            cause = f"{server.name} does not answer: {error or type(error).__name__}"
        server.gone(endpoint)
        raise ServerUnreachable(cause)

    async def _connect(self, server: _Server) -> Channel:
        """The connection to a server; a new one where there is none."""
        assert self._session is not None, "use the client as `async with InferenceClient(…) as client`"
        async with server.connecting:
            if server.channel is None or server.channel.ended:
                server.channel = await Channel.connect(self._session, server.endpoint.url + "/generate", server.headers)
            return server.channel

    def _choose(self, affinity: int) -> _Server:
        """The server of this affinity while it answers; else the least loaded of those that answer."""
        server = self._affinity.get(affinity)
        now = time.monotonic()
        if server is None or server.away_until > now:
            server = min(self._servers, key=lambda server: (server.away_until > now, server.load))
            self._affinity[affinity] = server
            if len(self._affinity) > REMEMBERED:
                self._affinity.popitem(last=False)
        self._affinity.move_to_end(affinity)
        return server

    # -- versions

    async def update_weights(self, path: Path, version: int, timeout: float = 600.0) -> None:
        """Make all servers serve `version` from the folder `path`, each without losing a request. Returns when all do.

        The folder must stay until the next update: a server that starts again loads it.
        Raises UpdateRefused when a server found the files wrong, ServerUnreachable or InferenceError when one did not do it in time.
        """
        try:
            async with asyncio.timeout(timeout):
                await _all(self._tell(server, path, version) for server in self._servers)
        except TimeoutError:
            raise ServerUnreachable(f"not all servers had version {version} after {timeout:g} s (weight_broadcast.timeout)") from None
        self._weights, self.version = path, version

    async def _tell(self, server: _Server, path: Path, version: int) -> None:
        async with server.updating:
            body = json.dumps({"weight_dir": str(path), "version": version, "drain_tokens": self._drain_tokens}).encode()
            status, answer = await self._insist(server, "POST", "/update_weights", body)
            if status == 422:
                raise UpdateRefused(f"{server.name}: {_failure.decode(answer).error}")
            if status != 200:
                raise _error(server, status, answer)

    async def _restore(self, server: _Server) -> None:
        """Bring a server that started again up to the run's version."""
        async with server.updating:
            if (await self._state(server)).version >= self.version:
                return
        if self._weights is None:
            raise StaleServer(f"{server.name} has an older version than {self.version}, and where that is was never told")
        try:
            await self._tell(server, self._weights, self.version)
        except UpdateRefused as error:
            raise StaleServer(f"{server.name} started again and could not be given version {self.version}: {error}") from error

    async def versions(self) -> list[int]:
        """The policy version that each server has, in the order of the endpoints."""
        return [state.version for state in await self._states()]

    async def stats(self) -> dict[str, float]:
        """What the servers are doing now, by metric name: the mean cache usage, the sums of the rest."""
        states = await self._states()
        return {
            "perf/kv_cache_usage": sum(state.kv_cache_usage for state in states) / len(states),
            "perf/running": sum(state.running for state in states),
            "perf/waiting": sum(state.waiting for state in states),
            "perf/preemptions": sum(state.preemptions for state in states),
        }

    async def wait_ready(self, timeout: float, tick: Callable[[], None] | None = None) -> None:
        """Return when every server answers and has version 0; one that still has a version of an earlier run is taken back to 0.

        `tick` is called several times a second meanwhile. Raises ServerUnreachable naming the server, RequestRefused for a wrong key.
        """
        deadline = time.monotonic() + timeout
        for server in self._servers:
            while True:
                try:
                    state = await self._state(server)
                    break
                except ServerUnreachable as error:
                    if time.monotonic() > deadline:
                        raise ServerUnreachable(f"{server.name} was not ready after {timeout:g} s: {error}") from error
                if tick is not None:
                    tick()
                await asyncio.sleep(PAUSE)
            if state.version > self.version:
                status, answer = await self._insist(server, "POST", "/reload_weights")
                if status != 200:
                    raise _error(server, status, answer)

    async def _states(self) -> list[PolicyState]:
        return await _all(self._state(server) for server in self._servers)

    async def _state(self, server: _Server) -> PolicyState:
        status, answer = await self._ask(server, "GET", "/policy")
        if status != 200:
            raise _error(server, status, answer)
        return _state.decode(answer)

    # -- asking

    async def _insist(self, server: _Server, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """`_ask` until the server answers, `restart_timeout` at most."""
        deadline = time.monotonic() + self._restart_timeout
        while True:
            try:
                return await self._ask(server, method, path, body)
            except ServerUnreachable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(PAUSE)

    async def _ask(self, server: _Server, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """One request; its status and body. Raises ServerUnreachable when there is no whole answer, or the engine behind it is dead."""
        assert self._session is not None, "use the client as `async with InferenceClient(…) as client`"
        endpoint = server.endpoint
        try:
            async with self._session.request(method, endpoint.url + path, data=body, headers=server.headers) as answer:
                content = await answer.read()
                if answer.status == 503:
                    raise ServerUnreachable(f"{server.name}: {_failure.decode(content).error}")
                return answer.status, content
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            cause = ServerUnreachable(f"{server.name} does not answer: {error or type(error).__name__}")
        except ServerUnreachable as error:
            cause = error
        server.gone(endpoint)
        raise cause


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all calls, run at once; the first that raises cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    return [task.result() for task in tasks]


def _turn(prompt: bytes, completion: Completion) -> Turn:
    runs = np.array(completion.versions, dtype=np.int32).reshape(-1, 2)
    return Turn(
        prompt_ids=np.frombuffer(prompt, INT),
        completion_ids=np.frombuffer(completion.token_ids, INT),
        logprobs=np.frombuffer(completion.logprobs, FLOAT),
        versions=np.repeat(runs[:, 0], runs[:, 1]),
        finish_reason=completion.finish_reason,
    )


def _error(server: _Server, status: int, answer: bytes | str) -> InferenceError:
    """What an answer other than 200 means for the caller."""
    if isinstance(answer, str):
        text = answer
    else:
        try:
            text = _failure.decode(answer).error
        except msgspec.MsgspecError:
            text = answer[:500].decode(errors="replace")
    kind = ContextTooLong if status == 413 else RequestRefused if 400 <= status < 500 else InferenceError
    return kind(f"{server.name} ({status}): {text}")
