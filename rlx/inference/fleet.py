"""The servers of a run as a whole: tracks their policy version and updates all of them to the next one.

There is one fleet per run. It checks every server now and then, and which servers there are. A server that restarted or joined gets the
run's version before it samples for the run: requests name the version that they need, and a server refuses versions newer than its own.
A server that does not answer is left out while others do: updates do not wait for it, and samplers are told (`on_change`).
Sampling is `rlx.inference.sampler`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence

import aiohttp
import msgspec

from rlx.concurrent import all_of
from rlx.inference import replica
from rlx.inference.endpoints import Endpoint
from rlx.inference.protocol import (
    CONNECT,
    FAILING,
    HELD,
    PAUSE,
    RESTART,
    Claim,
    Device,
    InferenceError,
    PolicyState,
    ServerUnreachable,
    StaleServer,
    TakenServer,
    UpdateRefused,
    WeightsGone,
    error_of,
    failure_of,
    names_version,
)
from rlx.inference.replica import Replica
from rlx.inference.telling import AT_ONCE, Limit, Manner, tell_all, tell_in_turn
from rlx.types import InitialModel, WeightVersion

log = logging.getLogger(__name__)

LOOK = 2.0  # seconds between two checks of the servers
HUNG = 30.0  # seconds after which a server that takes a connection but does not answer counts as lost, if others answer
FREED = HELD + 5.0  # seconds to wait at the start for a server of another run: it may have been killed

_state = msgspec.json.Decoder(PolicyState)


class Fleet:
    """All servers of one run. An async context manager, of one event loop. `version`: the version of the latest complete update."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        restart_timeout: float = RESTART,
        manner: Manner = AT_ONCE,
        look: float = LOOK,
        find: Callable[[], Sequence[Endpoint]] | None = None,
        hung: float = HUNG,
        run: str = "",
    ) -> None:
        """`restart_timeout`: seconds for which a lone server may be unreachable during an update.

        `manner`: how updates treat requests in flight. `look`: seconds between two checks of the servers.
        `find`: the servers that the run has at the moment, called in a thread at every check; None: they never change.
        `hung`: seconds for an answer in such a check, if other servers answer.
        `run`: the run's directory, which claims the servers: no other run can change their weights meanwhile (`protocol.Claim`).
        """
        self.version = 0
        self.on_change: Callable[[Sequence[Endpoint], Collection[str]], None] = lambda serving, lost: None  # `Sampler.use`
        self.look_up: Callable[[int], WeightVersion | None] = lambda version: None  # where else a version is now: `Subscriber.at`
        self.insists = True  # on servers that began with what the trainer began with; False: a difference is said
        self.trained: Callable[[], InitialModel | None] = lambda: None  # what the trainer began with, once it says so: `Subscriber.initial`
        self._weights: WeightVersion | None = None  # the weights of `version`; None for version 0
        self._patience = 600.0  # seconds for the latest update
        self._told = 0  # the version of the latest update, whether or not it is complete
        self._servers = [Replica(endpoint) for endpoint in endpoints]
        self._restart_timeout = restart_timeout
        self._manner = manner
        self._look = look
        self._find = find
        self._hung = hung
        self._run = run
        self._taken: TakenServer | None = None  # another run has claimed a server on which this run played
        self._adopted = False  # the versions are somebody else's
        self._session: aiohttp.ClientSession | None = None
        self._watching: asyncio.Task[None] | None = None
        self._limit: Limit | None = None  # of the update in progress

    async def __aenter__(self) -> Fleet:
        connector, timeout = aiohttp.TCPConnector(limit=0, keepalive_timeout=300), aiohttp.ClientTimeout(total=None, sock_connect=CONNECT)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        self._watching = asyncio.ensure_future(self._watch())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._session is not None
        assert self._watching is not None
        self._watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watching
        if self._run:
            leaving = [self._ask(server, "POST", "/claim", self._claim(keep=False)) for server in self._servers]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(replica.GONE):  # without an answer, the server is free later
                    await asyncio.gather(*leaving, return_exceptions=True)
        await self._session.close()

    # -- versions

    async def update(self, weights: WeightVersion, timeout: float = 600.0) -> None:
        """Update all servers to a version, without losing a request. Returns when all servers that answer have it.

        A server that does not answer or is too late is left out if another one has the version. It gets it before it serves again.
        The version's files must stay until the next update, because a server that restarts loads them.
        Raises UpdateRefused if a server rejects the weights, WeightsGone if the trainer does not have them any more, and ServerUnreachable
        or InferenceError if a server fails or none finishes in time (`telling.Limit`). Time does not count while no server answers, nor
        while servers wait until the trainer is ready to send.
        """
        servers, self._patience = [server for server in self._servers if server.serves] or self._servers, timeout
        self._limit, self._told = Limit(weights, timeout), weights.version

        def tell(server: Replica, together: int) -> Awaitable[None]:
            return self._tell(server, weights, together)

        try:
            if weights.kind == "memory":
                # Between two updates the trainer may never be able to send (sharded, and with its next batch ready): they join now.
                joining = [one for one in self._servers if one not in servers and one.claimed and not one.gone]
                missing = await tell_all(servers, tell, self._limit, beside=joining)
            else:
                missing = await (tell_in_turn if self._manner.in_turn else tell_all)(servers, tell, self._limit)
        finally:
            self._limit = None
        for server, why in missing:
            self._leave_out(server, f"version {weights.version} is served without {server.endpoint.name}: {why}")
        self._weights, self.version = weights, weights.version

    async def restore(self, endpoint: Endpoint) -> None:
        """Update the server at `endpoint` to the run's version if it restarted. Raises StaleServer if that fails."""
        for server in self._servers:
            if server.endpoint.key == endpoint.key:
                server.endpoint = endpoint
                await self._restore(server)
                return
        raise StaleServer(f"{endpoint.name} is not one of this run's servers: {', '.join(s.endpoint.url for s in self._servers)}")

    @property
    def size(self) -> int:
        """Servers that serve the run at the moment."""
        return sum(server.serves for server in self._servers)

    async def versions(self) -> list[int]:
        """The policy version that each server has, in the order of the endpoints."""
        return [state.version for state in await self.states()]

    async def stats(self) -> dict[str, float]:
        """Current metrics by name of the servers that answer: the mean of the cache usage, the sums of the others.

        Raises the first server's error if no server answers.
        """
        serving = [server for server in self._servers if server.serves] or self._servers
        answers = await asyncio.gather(*(self._state_soon(server) for server in serving), return_exceptions=True)
        states = [answer for answer in answers if isinstance(answer, PolicyState)]
        for answer in answers:
            if isinstance(answer, BaseException) and (not states or not isinstance(answer, InferenceError)):
                raise answer
        return replica.totals(states)

    async def devices(self) -> list[Device]:
        """What the workers of the servers that serve compute on. Raises ServerUnreachable if one does not say so in `hung` seconds."""
        asked = (one.in_time(self._ask(one, "GET", "/devices"), self._hung, "devices") for one in self._servers if one.serves)
        return replica.devices_of(await all_of(asked))

    async def states(self) -> list[PolicyState]:
        """The state of each server, in the order of the endpoints."""
        return await all_of(self._state(server) for server in self._servers)

    async def wait_ready(self, timeout: float, tick: Callable[[], None] | None = None, adopt: bool = False) -> None:
        """Return when every server answers and has version 0. A server that still has a version of an earlier run is reset to 0.

        `tick`: called several times a second meanwhile. `adopt`: the servers keep their version, which is then the fleet's. Raises
        ServerUnreachable, which names the server, RequestRefused for a wrong key, TakenServer if another run has a server for longer than a
        killed one would, or InferenceError if versions to adopt differ.
        """
        self._adopted = adopt
        began = time.monotonic()
        for server in self._servers:
            while True:
                try:
                    state = await self._state_soon(server)
                    break
                except ServerUnreachable as error:
                    if time.monotonic() > began + timeout:
                        raise ServerUnreachable(f"{server.endpoint.name} was not ready after {timeout:g} s: {error}") from error
                except TakenServer as error:
                    patience = min(timeout, FREED)
                    if not server.said:
                        log.warning("%s. It is asked for %g s, because that run may be gone", error, patience)
                    server.said = str(error)
                    if time.monotonic() > began + patience:
                        raise
                if tick is not None:
                    tick()
                await asyncio.sleep(PAUSE)
            if not adopt and server.serves and (other := server.differs_from(self._servers[:1])) is not None:
                raise InferenceError(
                    f"{server.endpoint.name} began with other weights than {other.endpoint.name}: its model is {state.model}. "
                    "All servers of a run need the model that it trains"
                )
            if state.version > self.version and not adopt:
                await self._reset(server)
            server.claimed = True
        if adopt:
            have = set(await self.versions())
            if len(have) > 1:
                raise InferenceError(f"the servers have different versions: {sorted(have)}. Does a run update them (inference.base_url)?")
            (self.version,) = have

    async def held(self) -> None:
        """Runs for ever. Raises TakenServer once another run has claimed a server on which this run plays, and InferenceError once the
        trainer says that it began with another model than the servers (`trained`)."""
        trained: InitialModel | None = None
        while self._taken is None:
            # Only version 0 could be another model unnoticed, so a run that goes on from a checkpoint looks no longer than it has it.
            if trained is None and not self.version and (trained := await asyncio.to_thread(self.trained)) is not None:
                serving = [one for one in self._servers if one.serves]
                replica.check_contexts(serving, trained)
                try:
                    replica.check_initial(serving, trained)
                except InferenceError as error:
                    if self.insists:
                        raise
                    log.warning("%s. The same weights in another dtype, or with a tied head stored, differ in this, too", error)
            await asyncio.sleep(PAUSE)
        raise self._taken

    async def _reset(self, server: Replica) -> None:
        """Return a server to version 0: it still has a version of another run."""
        status, answer = await self._insist(server, "POST", "/reload_weights", self._claim())
        if status != 200:
            raise error_of(server.endpoint.name, status, answer)

    # -- servers that come and go

    async def _watch(self) -> None:
        """Restore servers that restarted, whichever process samples on them, and follow servers that come and go."""
        checks: dict[Replica, asyncio.Task[None]] = {}  # one that takes long, as a restore does, delays no other server's claim
        try:
            while True:
                await asyncio.sleep(self._look)
                try:
                    if self._find is not None:
                        self._follow(await asyncio.to_thread(self._find))
                    for server in [server for server, check in checks.items() if check.done()]:
                        checks.pop(server).result()
                    if self._run or self._weights is not None or len(self._servers) > 1:
                        for server in [server for server in self._servers if server not in checks]:
                            checks[server] = asyncio.ensure_future(self._check(server))
                except Exception:  # the run goes on with the servers that it has; the next check may succeed
                    log.exception("a check of the inference servers failed")
        finally:
            for check in checks.values():
                check.cancel()
            await asyncio.gather(*checks.values(), return_exceptions=True)

    def _follow(self, endpoints: Sequence[Endpoint]) -> None:
        """Add new servers, which `_check` brings up to date, and remove those that are no longer named, except the last one."""
        named = {endpoint.key: endpoint for endpoint in endpoints}
        for key in named.keys() - {server.endpoint.key for server in self._servers}:
            log.info("%s joins; it serves once it has the run's version", named[key].name)
            self._servers.append(Replica(named[key], serves=False))
        for server in [server for server in self._servers if server.endpoint.key not in named]:
            if any(other.serves for other in self._servers if other is not server):
                log.info("%s was taken away; its requests end or go elsewhere", server.endpoint.name)
                self._servers.remove(server)
                self._tell_samplers()

    async def _check(self, server: Replica) -> None:
        """Bring one server up to date. Leave it out while it does not answer. A failure is logged once."""
        others = any(other.serves for other in self._servers if other is not server)
        doing, limit = "report its version", self._hung if others else self._restart_timeout
        try:
            async with asyncio.timeout(limit):
                state = await self._state(server)
            if self._adopted and state.version != self.version:
                raise StaleServer(f"{server.endpoint.name} has version {state.version} now, and version {self.version} is played")
            doing, limit = f"load version {self.version}", self._restart_timeout
            async with asyncio.timeout(limit):
                strange = state.version > max(self.version, self._told) or (self._run and state.version and not server.claimed)
                if strange and not server.serves:
                    if state.running or state.waiting:  # they may be this run's own: the server was taken away and is back
                        raise StaleServer(f"{server.endpoint.name} still answers earlier requests; it joins when they have ended")
                    await self._reset(server)
                    state = await self._state(server)
                server.claimed = True
                if not self.version and not server.serves:
                    replica.check_joins(server, [one for one in self._servers if one.serves])
                if state.version < self.version:
                    await self._restore(server)
        except (InferenceError, TimeoutError, msgspec.MsgspecError) as error:
            server.hung = isinstance(error, TimeoutError)
            if isinstance(error, TakenServer):  # its weights are not the run's any more
                if server.claimed and server.serves:
                    self._taken = error
                server.claimed = False
            text = str(error) or f"{server.endpoint.name} did not {doing} in {limit:g} s"
            others = any(other.serves for other in self._servers if other is not server)  # again: their checks run beside this one
            if others and server.gone:
                self._leave_out(server, text)
            elif server.said != text:
                log.warning("%s", text)
            server.said = text
        else:
            server.hung, server.said = False, ""
            if not server.serves:
                server.serves, server.late = True, False
                log.info("%s serves version %d", server.endpoint.name, max(self.version, state.version))
                self._tell_samplers()

    def _leave_out(self, server: Replica, why: str) -> None:
        if server.serves:
            server.serves = False
            log.warning("%s; the other servers go on without it", why)
            self._tell_samplers(server.endpoint.key)

    def _tell_samplers(self, *lost: str) -> None:
        self.on_change([server.endpoint for server in self._servers if server.serves], lost)

    async def _restore(self, server: Replica) -> None:
        async with server.updating:
            state = await self._state(server)
            if state.version >= self.version:
                return
            if self._weights is None:
                raise StaleServer(f"{server.endpoint.name} has an older version than {self.version}, and the fleet has no weights for it")
            log.info("%s has version %d; updating it to version %d", server.endpoint.name, state.version, self.version)
            try:
                await self._load(server, self.look_up(self.version) or self._weights)
            except WeightsGone as error:  # the next update brings a newer version
                raise ServerUnreachable(str(error)) from error
            except UpdateRefused as error:
                raise StaleServer(f"{server.endpoint.name} restarted and could not load version {self.version}: {error}") from error

    async def _tell(self, server: Replica, weights: WeightVersion, together: int) -> None:
        async with server.updating:
            await self._load(server, weights, together)

    async def _load(self, server: Replica, weights: WeightVersion, together: int = 1) -> None:
        """`together`: servers that are told this now."""
        where = {"weight_dir": weights.where, "version": weights.version, "kind": weights.kind}
        manner = {"drain_tokens": self._manner.drain_tokens, "keep_kv": self._manner.keep_kv}
        request = where | manner | {"run": self._run, "together": together, "timeout": self._patience}
        deadline = time.monotonic() + min(FAILING, self._restart_timeout)
        while True:
            status, answer = await self._insist(server, "POST", "/update_weights", json.dumps(request).encode())
            if status == 422:
                raise UpdateRefused(f"{server.endpoint.name}: {failure_of(answer).error}")
            if status == 200:
                server.late = False
                return
            # A server whose load failed midway says which version it has, and ends. Any other 5xx may pass (a proxy, a busy host).
            if status < 500 or names_version(answer) or time.monotonic() > deadline:
                raise error_of(server.endpoint.name, status, answer)
            await asyncio.sleep(PAUSE)

    async def _state(self, server: Replica) -> PolicyState:
        if self._taken is not None:
            raise self._taken
        asked = ("POST", "/claim", self._claim()) if self._run else ("GET", "/policy")
        status, answer = await self._ask(server, *asked)
        if status != 200:
            raise error_of(server.endpoint.name, status, answer)
        return server.told(_state.decode(answer))

    async def _state_soon(self, server: Replica) -> PolicyState:
        return await server.in_time(self._state(server), self._hung, "state")

    # -- asking

    def _claim(self, keep: bool = True) -> bytes:
        return msgspec.json.encode(Claim(self._run, keep))

    async def _insist(self, server: Replica, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """`_ask` until the server answers, for at most `restart_timeout` seconds."""
        deadline = time.monotonic() + self._restart_timeout
        while True:
            try:
                return await self._ask(server, method, path, body)
            except ServerUnreachable:
                if time.monotonic() > deadline:
                    raise
                if self._limit is not None:
                    self._limit.anew()
                await asyncio.sleep(PAUSE)

    async def _ask(self, server: Replica, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """One request; returns status and body. Raises ServerUnreachable if the answer is missing or cut, or if the engine is dead."""
        assert self._session is not None, "use the fleet as `async with Fleet(…) as fleet`"
        endpoint = server.endpoint
        try:
            async with self._session.request(method, endpoint.url + path, data=body, headers=endpoint.headers) as answer:
                content = await answer.read()
                if answer.status != 503 and not (answer.status == 401 and endpoint.superseded):
                    server.silent_since = None
                    return answer.status, content
                cause = str(error_of(endpoint.name, answer.status, content))
        except (aiohttp.ClientError, OSError) as error:
            cause = f"{endpoint.name} does not answer: {error or type(error).__name__}"
        server.silent_since = server.silent_since or time.monotonic()
        server.endpoint = endpoint.refreshed()
        raise ServerUnreachable(cause)
