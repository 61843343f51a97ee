"""The servers of a run as a whole: tracks their policy version and brings all of them to the next one.

There is one fleet per run. Every POLL_SECONDS it asks every server for its version, and which servers there are. A server that restarted
or joined gets the run's version before samplers use it. A server that does not answer is left out while others do: updates do not wait for
it, and samplers learn of it (`on_change`).

    what happens to a server                                what the fleet does
    no answer during an update                              left out once another has the version; without another: waits `restart_timeout`
    it is slower than the others by far                     left out; it gets the version before it serves again
    it refuses the version (names, shapes, checksums)       UpdateRefused: the run ends, nothing was changed
    it serves other weights than those loaded               WeightsDiffer: the run ends, the server stays paused
    a load fails midway                                     the server ends; another one serves, or the run waits for its restart
    it has a label of another run                           TakenServer: the run ends

Whatever the reason, `_bring` is how a server gets a version. Sampling is `rlx.inference.sampler`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from rlx.aio import all_of
from rlx.inference import wire
from rlx.inference.client import Client
from rlx.inference.endpoints import Endpoint
from rlx.inference.replica import Replica, ServerState, totals
from rlx.inference.sampler import FAILING, PAUSE, RESTART
from rlx.inference.wire import (
    InferenceError,
    RequestRefused,
    ServerUnreachable,
    StaleServer,
    TakenServer,
    UpdateRefused,
    WeightsDiffer,
    WeightsGone,
    label_of,
    parse_label,
)
from rlx.types import InitialModel, WeightVersion
from rlx.weights.subscribe import request_transfer

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0  # seconds between two checks of the servers
HUNG = 30.0  # seconds after which a server that takes a connection but does not answer counts as lost, if others answer
GONE = 2.0  # seconds without an answer after which an update goes on without a server, if others have the version
SLOWER = 4.0  # factor: a server that takes so much longer than the first one is left out of an update
INITIAL = WeightVersion(version=0, kind="initial", where="")

Missing = dict[Replica, BaseException]  # servers that did not get a version, and why


class Fleet:
    """All servers of one run. An async context manager, of one event loop."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        restart_timeout: float = RESTART,
        *,
        run: str = "",
        adopt: bool = False,
        verify_every: int = 16,
        look: float = POLL_SECONDS,
        find: Callable[[], Sequence[Endpoint]] | None = None,
        hung: float = HUNG,
    ) -> None:
        """`restart_timeout`: seconds for which a lone server may be unreachable during an update.

        `run`: the token in the labels of the run's versions. `adopt`: the servers are updated by others, or by nobody; their version is
        this fleet's. `verify_every`: updates between two full compares. `look`: seconds between two checks of the servers. `find`: the
        servers that the run has at the moment, called in a thread at every check; None: they never change. `hung`: seconds for an answer in
        such a check, if other servers answer.
        """
        self.on_change: Callable[..., None] = lambda **known: None  # `Sampler.change`
        self.look_up: Callable[[int], WeightVersion | None] = lambda version: None  # where a version is now: `Subscriber.at`
        self.insists = True  # on servers that started with the trainer's model; False: a difference is logged
        self.initial: Callable[[str], str] = lambda model: model  # the folder of version 0 for a server that started with `model`
        self.trained: Callable[[], InitialModel | None] = lambda: None  # the trainer's model, once it is known: `Subscriber.initial`
        self._weights = INITIAL  # of the latest complete update
        self._restart_timeout, self._run, self._adopts, self._verify_every = restart_timeout, run, adopt, verify_every
        self._look, self._find, self._hung = look, find, hung
        self._failed: asyncio.Future[InferenceError] = asyncio.get_running_loop().create_future()  # what a check found ends the run
        self._watching: asyncio.Task[None] | None = None
        self._client = Client()
        self._servers = [Replica(self._client, endpoint, not adopt) for endpoint in endpoints]

    async def __aenter__(self) -> Fleet:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await self._client.__aexit__()

    async def wait_ready(self, timeout: float, tick: Callable[[], None] = lambda: None) -> None:
        """Return when every server answers and has version 0, or with `adopt` whatever it has. From then on the servers are watched.

        `tick`: called several times a second meanwhile. Raises ServerUnreachable, which names the server, RequestRefused for a wrong key
        or a server without the worker extension, or InferenceError if servers have different models or versions.
        """
        began = time.monotonic()
        for server in self._servers:
            while server.state is None:
                try:
                    await server.in_time(server.look(), self._hung, "report its state")
                except ServerUnreachable as error:
                    if time.monotonic() > began + timeout:
                        raise ServerUnreachable(f"{server.endpoint.name} was not ready after {timeout:g} s: {error}") from error
                    tick()
                    await asyncio.sleep(PAUSE)
        states = [server.state for server in self._servers if server.state is not None]
        if self._adopts:
            if len(labels := {state.label for state in states}) > 1:
                raise InferenceError(f"the servers have different versions: {sorted(labels)}. Does a run update them (inference.base_url)?")
            found = parse_label(states[0].label)
            self._weights = INITIAL if found is None else WeightVersion(version=found[0], kind="initial", where="")
        else:
            await all_of(self._bring(server, INITIAL) for server in self._servers)
        self._tell_samplers()
        self._watching = asyncio.ensure_future(self._watch())

    # -- versions

    async def update(self, weights: WeightVersion, timeout: float = 600.0) -> None:
        """Bring all servers to a version, in parallel, without losing a request. Returns when all servers that answer have it.

        The version's files must stay until the next update, because a server that restarts loads them.
        Raises the errors of the table above, and ServerUnreachable if no server has the version after `timeout` seconds, in which time
        without any server does not count.
        """
        missing = await (self._transfer if weights.kind == "memory" else self._load_all)(weights, timeout)
        self._weights = weights
        self._leave_out(missing)
        self._tell_samplers()

    async def restore(self, endpoint: Endpoint) -> None:
        """Bring the server at `endpoint` to the run's version if it restarted. Raises InferenceError if that fails."""
        for server in self._servers:
            if server.endpoint.key == endpoint.key:
                return await self._bring_current(server)
        raise StaleServer(f"{endpoint.name} is not one of this run's servers: {', '.join(s.endpoint.url for s in self._servers)}")

    async def _bring_current(self, server: Replica) -> None:
        await server.in_time(self._bring(server, self._weights), self._restart_timeout, f"load version {self.version}")

    async def _bring(self, server: Replica, weights: WeightVersion) -> None:
        """Bring a server to a version and let it generate, unless it has the version or a newer one of this run. One attempt.

        Raises TakenServer if another run uses it, and InferenceError if it started with another model than the other servers.
        """
        async with server.lock:  # one of several calls at once loads
            state = await server.look()
            version, run = parse_label(state.label) or (-1, "")
            if version >= 0 and run != self._run and server.serves and self._watching is not None:
                raise TakenServer(
                    f"{server.endpoint.name} has version {version} of another run ({run}; this one is {self._run}).\n"
                    "  fix: give each run servers of its own, or run them in turn"
                )
            if server.loading or not self._has(state, weights):
                if weights.kind == "initial":
                    self._compare_with_others(server)  # before it generates
                where = weights if weights.kind == "initial" else self.look_up(weights.version) or weights
                await server.load(where, label_of(weights.version, self._run), self.initial(state.model), self._verify_every)
            elif server.paused:
                await server.resume()
            if weights.kind == "initial":
                self._compare_with_others(server)

    def _has(self, state: ServerState, weights: WeightVersion) -> bool:
        """Whether a server has a version, or a newer one of this run."""
        version, run = parse_label(state.label) or (-1, "")
        has = label_of(weights.version, self._run) in state.adapters if weights.kind == "adapter" else version >= weights.version
        return has and run == self._run  # an adapter on the model of another run is another policy

    def _compare_with_others(self, server: Replica) -> None:
        """Raise InferenceError if a server has another version 0 than one of the others that have it. Later versions are verified."""
        there = [each.state for each in self._servers if each.serves or each is server]
        models = {state.identity: state.model for state in there if state and state.identity and self.initial(state.model) == state.model}
        if len(models) > 1:
            raise InferenceError(
                f"{server.endpoint.name} or another server started with other weights: the servers have {' and '.join(models.values())}.\n"
                "  fix: start all servers of a run with the model that it trains"
            )

    async def _load_all(self, weights: WeightVersion, timeout: float) -> Missing:
        """Load a version into all serving servers. Returns those without it; at least one has it.

        A server that fails or does not answer delays the others only until one of them has the version.
        """
        loading = {asyncio.ensure_future(self._insist(server, weights)): server for server in self._serving()}
        waiting, missing = set(loading), Missing()
        began = last = time.monotonic()
        first: float | None = None  # seconds of the first server that has it
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=PAUSE, return_when=asyncio.FIRST_COMPLETED)
                now = time.monotonic()
                away = all(loading[task].silent_since is not None and not loading[task].hangs for task in waiting)
                if first is None and not done and away:  # while no server is there, the time does not count
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
                    needless = first is not None and (server.gone(now, GONE) or now - began > max(self._hung, SLOWER * first))
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
        if first is None:
            raise ServerUnreachable("; ".join(map(str, missing.values())))
        return missing

    async def _insist(self, server: Replica, weights: WeightVersion) -> None:
        """Bring a server to a version. Try again for `restart_timeout` seconds without an answer, and for FAILING while it fails."""
        failing_since: float | None = None
        while True:
            try:
                return await self._bring(server, weights)
            except (RequestRefused, WeightsDiffer, TakenServer):
                raise
            except InferenceError as error:
                if server.warned != str(error):
                    log.warning("an attempt to load a version failed; it is made again: %s", error)
                server.warned = str(error)
                now, silent = time.monotonic(), server.silent_since is not None
                failing_since = None if silent else failing_since or now
                limit = self._restart_timeout if silent else min(FAILING, self._restart_timeout)
                if now - (server.silent_since or failing_since or now) > limit:
                    raise
            await asyncio.sleep(PAUSE)

    async def _transfer(self, weights: WeightVersion, timeout: float) -> Missing:
        """Let the trainer send a version from its memory to all servers, which are paused meanwhile. Returns those without it.

        All: nobody brings such a version to servers that join later. Raises WeightsGone if the trainer has another version by now, or the
        transfer broke. They stay paused.
        """
        servers = self._servers.copy()
        async with contextlib.AsyncExitStack() as stack:
            for server in servers:
                await stack.enter_async_context(server.lock)
            missing, began = await self._pause_all(servers), time.monotonic()
            while len(missing) == len(servers):
                if time.monotonic() - began > self._restart_timeout:
                    raise ServerUnreachable("; ".join(map(str, missing.values())))
                await asyncio.sleep(PAUSE)
                missing = await self._pause_all(servers)
            receiving = [server for server in servers if server not in missing]
            for server in receiving:
                server.loading = True
            urls = [(server.endpoint.url, server.endpoint.api_key) for server in receiving]
            if failed := await request_transfer(weights.where, weights.version, urls, timeout):
                raise WeightsGone(f"the servers did not get version {weights.version}: {failed}")
            await all_of(server.label(label_of(weights.version, self._run)) for server in receiving)
        return missing

    async def _pause_all(self, servers: Sequence[Replica]) -> Missing:
        """Pause all servers. Returns those that do not answer."""
        asked = [server.in_time(server.pause(), self._hung, "pause") for server in servers]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return {server: error for server, error in zip(servers, answers, strict=True) if isinstance(error, BaseException)}

    def adapter(self, version: int) -> str | None:
        """The name of the adapter that a version is; None: it is a whole model."""
        return label_of(version, self._run) if self._weights.kind == "adapter" else None

    # -- state

    @property
    def version(self) -> int:
        """The version of the latest complete update."""
        return self._weights.version

    @property
    def size(self) -> int:
        """Servers that serve the run at the moment."""
        return sum(server.serves for server in self._servers)

    @property
    def context(self) -> int:
        """Tokens of prompt and completion together that every server takes; 0: not known yet."""
        return min((server.state.context for server in self._servers if server.state is not None), default=0)

    @property
    def compared(self) -> float:
        """The share of the served weights that was compared with the files, of the server where it is smallest."""
        return min((server.compared or 0.0 for server in self._servers if server.serves), default=0.0)

    def _serving(self) -> list[Replica]:
        return [server for server in self._servers if server.serves] or self._servers

    async def stats(self) -> dict[str, float]:
        """Current metrics by name of the servers that answer. Raises the first server's error if no server answers."""
        asked = [server.in_time(server.ask(wire.METRICS), self._hung, "report metrics") for server in self._serving()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = [wire.metrics_of(answer) for answer in answers if isinstance(answer, bytes)]
        for answer in answers:
            if isinstance(answer, BaseException) and (not found or not isinstance(answer, InferenceError)):
                raise answer
        values = totals(found) | {"perf/weights_compared": self.compared}
        interrupted = sum(server.interrupted for server in self._serving())
        return values | {"perf/preemptions": max(0.0, values["perf/preemptions"] - interrupted)}

    async def states(self) -> list[ServerState]:
        """The state of each server that serves."""
        return await all_of(server.look() for server in self._serving())

    async def held(self) -> None:
        """Runs for ever. Raises what makes the run's rollouts wrong: TakenServer, WeightsDiffer, or InferenceError once it is known that
        the trainer began with another model than the servers (`trained`)."""
        trained: InitialModel | None = None
        while not self._failed.done():
            # Only version 0 could be another model unnoticed, so a run that goes on from a checkpoint looks no longer than it has it.
            if trained is None and not self.version and (trained := await asyncio.to_thread(self.trained)) is not None:
                for server in self._serving():
                    server.compare_with(trained, self.insists)
            await asyncio.wait([self._failed], timeout=PAUSE)
        raise self._failed.result()

    # -- servers that come and go

    async def _watch(self) -> None:
        """Restore servers that restarted, and follow servers that come and go."""
        checks: dict[Replica, asyncio.Task[None]] = {}  # one that takes long delays no other server's check
        try:
            while True:
                await asyncio.sleep(self._look)
                try:
                    if self._find is not None:
                        self._follow(await asyncio.to_thread(self._find))
                    for server in [server for server, check in checks.items() if check.done()]:
                        checks.pop(server).result()
                    for server in [server for server in self._servers if server not in checks]:
                        checks[server] = asyncio.ensure_future(self._check(server))
                except Exception:  # the run goes on with the servers that it has; the next check may succeed
                    log.exception("a check of the inference servers failed")
        finally:
            for check in checks.values():
                check.cancel()
            await asyncio.gather(*checks.values(), return_exceptions=True)

    def _follow(self, endpoints: Iterable[Endpoint]) -> None:
        """Add new servers, which `_check` brings up to date, and remove those that are no longer named, except the last one."""
        named = {endpoint.key: endpoint for endpoint in endpoints}
        for key in named.keys() - {server.endpoint.key for server in self._servers}:
            log.info("%s joins; it serves once it has the run's version", named[key].name)
            self._servers.append(Replica(self._client, named[key], not self._adopts, serves=False))
        for server in [server for server in self._servers if server.endpoint.key not in named]:
            if self._others(server):
                log.info("%s was taken away; its requests end or go elsewhere", server.endpoint.name)
                self._servers.remove(server)
                self._tell_samplers()

    async def _check(self, server: Replica) -> None:
        """Bring one server up to date. Leave it out while it does not answer. A failure is logged once."""
        if server.lock.locked():  # an update is in progress
            return
        before = server.endpoint
        try:
            limit = self._hung if self._others(server) else self._restart_timeout
            state = await server.in_time(server.look(), limit, "report its version")
            if not self._adopts and (server.loading or server.paused or not self._has(state, self._weights)):
                await self._bring_current(server)
        except InferenceError as error:
            if isinstance(error, TakenServer | WeightsDiffer) and not self._failed.done():
                self._failed.set_result(error)
            if self._others(server) and server.gone(time.monotonic(), GONE):
                self._leave_out({server: error})
            elif server.warned != str(error):
                log.warning("%s", error)
            server.warned = str(error)
        else:
            server.warned = ""
            if not server.serves:
                server.serves = True
                log.info("%s serves version %d", server.endpoint.name, self.version)
                self._tell_samplers()
            elif server.endpoint != before:  # it restarted at another address, and samplers of other processes hear of it here
                self._tell_samplers()

    def _others(self, server: Replica) -> bool:
        return any(other.serves for other in self._servers if other is not server)

    def _leave_out(self, missing: Missing) -> None:
        lost = [server for server in missing if server.serves]
        for server in lost:
            server.serves = False
            log.warning("%s; the other servers go on without it", missing[server])
        if lost:
            self._tell_samplers(*(server.endpoint.key for server in lost))

    def _tell_samplers(self, *lost: str) -> None:
        if serving := [server.endpoint for server in self._servers if server.serves]:
            self.on_change(endpoints=serving, lost=lost, version=self.version, adapter=self.adapter(self.version), context=self.context)
