"""The servers of a run as a whole: tracks their policy version and brings all of them to the next one.

There is one fleet per run. Every LOOK seconds it asks every server for its version, and which servers there are. A server that restarted
or joined gets the run's version before samplers use it. A server that does not answer is left out while others do: updates do not wait for
it, and samplers learn of it (`on_change`).

    what happens to a server                                what the fleet does
    no answer during an update                              left out once another has the version; without another: waits `restart_timeout`
    it is slower than the others by far                     left out; it gets the version before it serves again
    it refuses the version (names, shapes, checksums)       UpdateRefused: the run ends, nothing was changed
    it serves other weights than those loaded               WeightsDiffer: the run ends, the server stays paused
    a load fails midway                                     the server ends; another one serves, or the run waits for its restart
    it has a label of another run                           TakenServer: the run ends

Sampling is `rlx.inference.sampler`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rlx.concurrent import all_of
from rlx.inference import wire
from rlx.inference.client import Client
from rlx.inference.endpoints import Endpoint
from rlx.inference.replica import Replica, ServerState, totals
from rlx.inference.sampler import PAUSE, RESTART
from rlx.inference.update import GONE, insist, load_all, transfer
from rlx.inference.wire import (
    InferenceError,
    RequestRefused,
    ServerUnreachable,
    StaleServer,
    TakenServer,
    WeightsDiffer,
    label_of,
    parse_label,
)
from rlx.types import InitialModel, WeightVersion

log = logging.getLogger(__name__)

LOOK = 2.0  # seconds between two checks of the servers
HUNG = 30.0  # seconds after which a server that takes a connection but does not answer counts as lost, if others answer


class Fleet:
    """All servers of one run. An async context manager, of one event loop. `version`: the version of the latest complete update."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        restart_timeout: float = RESTART,
        *,
        run: str = "",
        adopt: bool = False,
        verify_every: int = 16,
        look: float = LOOK,
        find: Callable[[], Sequence[Endpoint]] | None = None,
        hung: float = HUNG,
    ) -> None:
        """`restart_timeout`: seconds for which a lone server may be unreachable during an update.

        `run`: the token in the labels of the run's versions. `adopt`: the servers are updated by others, or by nobody; their version is
        this fleet's. `verify_every`: updates between two full compares. `look`: seconds between two checks of the servers. `find`: the
        servers that the run has at the moment, called in a thread at every check; None: they never change. `hung`: seconds for an answer in
        such a check, if other servers answer.
        """
        self.version = 0
        self.on_change: Callable[[Sequence[Endpoint], Collection[str]], None] = lambda serving, lost: None  # `Sampler.use`
        self.look_up: Callable[[int], WeightVersion | None] = lambda version: None  # where a version is now: `Subscriber.at`
        self.insists = True  # on servers that started with the trainer's model; False: a difference is logged
        self.initial: Callable[[str], str] = lambda model: model  # the folder of version 0 for a server that started with `model`
        self.trained: Callable[[], InitialModel | None] = lambda: None  # the trainer's model, once it is known: `Subscriber.initial`
        self._weights: WeightVersion | None = None  # of `version`; None: the initial model
        self._servers = [Replica(endpoint) for endpoint in endpoints]
        self._restart_timeout, self._run, self._adopts, self._verify_every = restart_timeout, run, adopt, verify_every
        self._look, self._find, self._hung = look, find, hung
        self._failed: asyncio.Future[InferenceError] = asyncio.get_running_loop().create_future()  # what a check found ends the run
        self._watching: asyncio.Task[None] | None = None
        self._client = Client()

    async def __aenter__(self) -> Fleet:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await self._client.__aexit__()

    # -- versions

    async def update(self, weights: WeightVersion, timeout: float = 600.0) -> None:
        """Bring all servers to a version, in parallel, without losing a request. Returns when all servers that answer have it.

        The version's files must stay until the next update, because a server that restarts loads them.
        Raises the errors of the table above, and ServerUnreachable if no server has the version after `timeout` seconds, in which time
        without any server does not count.
        """
        serving = [server for server in self._servers if server.serves] or self._servers
        if weights.kind == "memory":  # to all: nobody brings such a version to servers that join later
            patience = self._hung, self._restart_timeout
            missing = await transfer(self._servers.copy(), self._client, weights, self._run, timeout, *patience)
        else:
            missing = await load_all(serving, lambda server: self._insist(server, weights), weights, timeout, self._hung)
        self._weights, self.version = weights, weights.version
        for server, error in missing.items():
            self._leave_out(server, str(error))

    async def _insist(self, server: Replica, weights: WeightVersion) -> None:
        await insist(server, lambda: self._load(server, weights), lambda: server.look(self._client), self._restart_timeout)

    async def _load(self, server: Replica, weights: WeightVersion) -> None:
        await server.load(self._client, self.look_up(weights.version) or weights, self._run, self._verify_every)

    async def restore(self, endpoint: Endpoint) -> None:
        """Bring the server at `endpoint` to the run's version if it restarted. Raises InferenceError if that fails."""
        for server in self._servers:
            if server.endpoint.key == endpoint.key:
                return await self._bring_up_to_date(server)
        raise StaleServer(f"{endpoint.name} is not one of this run's servers: {', '.join(s.endpoint.url for s in self._servers)}")

    async def _bring_up_to_date(self, server: Replica) -> None:
        """Bring one server to the run's version, unless it has it. Raises TakenServer if another run uses it."""
        seconds = self._restart_timeout
        await self._client.in_time(self._load_unless_there(server), server.endpoint, seconds, f"load version {self.version}")

    async def _load_unless_there(self, server: Replica) -> None:
        async with server.lock:  # an update in progress ends first, and one of several calls at once loads
            state = await server.look(self._client)
            if not self._has_version(server):
                await self._load_current(server, state)
            elif server.paused:
                await server.resume(self._client)

    async def _load_current(self, server: Replica, state: ServerState) -> None:
        other = parse_label(state.label)
        if other is not None and other[1] != self._run and server.serves:
            raise TakenServer(
                f"{server.endpoint.name} has version {other[0]} of another run ({other[1]}; this one is {self._run}).\n"
                "  fix: give each run servers of its own, or run them in turn"
            )
        log.info("%s has version %s; it gets version %d", server.endpoint.name, state.label, self.version)
        if self._weights is None:
            if (differs := server.differs_from([one for one in self._servers if one.serves])) is not None:
                raise StaleServer(
                    f"{server.endpoint.name} started with {state.model}, and {differs.endpoint.name} with other weights.\n"
                    "  fix: start it with the run's model"
                )
            await server.reset(self._client, self._run, self.initial(state.model))
        elif self._weights.kind == "memory" and (self.look_up(self.version) or self._weights).kind == "memory":
            raise StaleServer(f"{server.endpoint.name} joins with the next version, which the trainer sends from its memory")
        else:
            await self._load(server, self._weights)

    def _has_version(self, server: Replica) -> bool:
        assert server.state is not None
        if server.loading:
            return False
        name = label_of(self.version, self._run)
        if self._weights is not None and self._weights.kind == "adapter":
            return name in server.adapters
        found = parse_label(server.state.label)
        return server.state.label == name or (found is not None and found[1] == self._run and found[0] > self.version)

    def adapter(self, version: int) -> str | None:
        """The name of the adapter that a version is; None: it is a whole model."""
        return label_of(version, self._run) if self._weights is not None and self._weights.kind == "adapter" else None

    # -- state

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

    async def stats(self) -> dict[str, float]:
        """Current metrics by name of the servers that answer. Raises the first server's error if no server answers."""
        serving = [server for server in self._servers if server.serves] or self._servers
        asked = (
            self._client.in_time(self._client.get(s.endpoint, wire.METRICS), s.endpoint, self._hung, "report metrics") for s in serving
        )
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = [wire.metrics_of(answer) for answer in answers if isinstance(answer, bytes)]
        for answer in answers:
            if isinstance(answer, BaseException) and (not found or not isinstance(answer, InferenceError)):
                raise answer
        values = totals(found) | {"perf/weights_compared": self.compared}
        interrupted = sum(server.interrupted for server in serving)
        return values | {"perf/preemptions": max(0.0, values["perf/preemptions"] - interrupted)}

    async def states(self) -> list[ServerState]:
        """The state of each server that serves."""
        serving = [server for server in self._servers if server.serves] or self._servers
        return await all_of(server.look(self._client, not self._adopts) for server in serving)

    async def wait_ready(self, timeout: float, tick: Callable[[], None] | None = None) -> None:
        """Return when every server answers and has version 0, or with `adopt` whatever it has. From then on the servers are watched.

        `tick`: called several times a second meanwhile. Raises ServerUnreachable, which names the server, RequestRefused for a wrong key
        or a server without the worker extension, or InferenceError if servers have different models.
        """
        began = time.monotonic()
        for server in self._servers:
            while True:
                try:
                    asked = server.look(self._client, not self._adopts)
                    await self._client.in_time(asked, server.endpoint, self._hung, "report its state")
                    break
                except ServerUnreachable as error:
                    if time.monotonic() > began + timeout:
                        raise ServerUnreachable(f"{server.endpoint.name} was not ready after {timeout:g} s: {error}") from error
                if tick is not None:
                    tick()
                await asyncio.sleep(PAUSE)
        if self._adopts:
            await self._adopt()
        else:
            untrained = [one for one in self._servers if one.state is not None and self.initial(one.state.model) != one.state.model]
            await all_of(self._reset(server) for server in untrained)
            for server in self._servers:
                if (other := server.differs_from(self._servers[:1])) is not None and server.state is not None:
                    raise InferenceError(
                        f"{server.endpoint.name} started with other weights than {other.endpoint.name}: {server.state.model}.\n"
                        "  fix: start all servers of a run with the model that it trains"
                    )
            await all_of(self._reset(server) for server in self._servers if server not in untrained)
        self._watching = asyncio.ensure_future(self._watch())

    async def _reset(self, server: Replica) -> None:
        async with server.lock:
            assert server.state is not None
            await server.reset(self._client, self._run, self.initial(server.state.model))

    async def _adopt(self) -> None:
        """Take the servers' version for the fleet's. Servers without a route for labels have version 0."""
        labels = set()
        for server in self._servers:
            try:
                labels.add(await self._client.label(server.endpoint))
            except RequestRefused:
                labels.add(wire.UNLABELLED)
        if len(labels) > 1:
            raise InferenceError(f"the servers have different versions: {sorted(labels)}. Does a run update them (inference.base_url)?")
        found = parse_label(labels.pop())
        self.version = found[0] if found else 0

    async def held(self) -> None:
        """Runs for ever. Raises what makes the run's rollouts wrong: TakenServer, WeightsDiffer, or InferenceError once it is known that
        the trainer began with another model than the servers (`trained`)."""
        trained: InitialModel | None = None
        while not self._failed.done():
            # Only version 0 could be another model unnoticed, so a run that goes on from a checkpoint looks no longer than it has it.
            if trained is None and not self.version and (trained := await asyncio.to_thread(self.trained)) is not None:
                self._compare_initial(trained)
            await asyncio.wait([self._failed], timeout=PAUSE)
        raise self._failed.result()

    def _compare_initial(self, trained: InitialModel) -> None:
        """Raise InferenceError if a server started with another model than the trainer, or computes it with other rotary frequencies."""
        for server in self._servers:
            state, name = server.state, server.endpoint.name
            if state is None or not server.serves:
                continue
            if trained.longest is not None and state.context > trained.longest:
                raise InferenceError(
                    f"{name} has a context of {state.context} tokens, so it takes the rotary frequencies of long texts for all requests, "
                    f"and the trainer takes those of texts of up to {trained.longest} tokens (LongRoPE).\n"
                    f"  fix: start the server with inference.max_model_len={trained.longest} or less"
                )
            if state.identity and state.identity != trained.identity:
                text = (
                    f"{name} started with other weights than the trainer: its model is {state.model} (identity {state.identity}), that of "
                    f"the trainer on {trained.host} is {trained.where} (identity {trained.identity}).\n  fix: give all hosts one model: "
                    "a folder on a shared file system (model.name), or the same revision of a hub name in their caches"
                )
                if self.insists:
                    raise InferenceError(text)
                log.warning("%s. The same weights in another dtype, or with a tied head stored, differ in this, too", text)

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
        if server.lock.locked():  # an update is in progress
            return
        others, before = any(other.serves for other in self._servers if other is not server), server.endpoint
        limit = self._hung if others else self._restart_timeout
        try:
            await self._client.in_time(server.look(self._client, not self._adopts), server.endpoint, limit, "report its version")
            if not self._adopts and (server.paused or not self._has_version(server)):
                await self._bring_up_to_date(server)
        except InferenceError as error:
            server.hung = isinstance(error, ServerUnreachable) and server.silent_since is None
            if isinstance(error, TakenServer | WeightsDiffer) and not self._failed.done():
                self._failed.set_result(error)
            text = str(error)
            if any(other.serves for other in self._servers if other is not server) and server.gone(time.monotonic(), GONE):
                self._leave_out(server, text)
            elif server.warned != text:
                log.warning("%s", text)
            server.warned = text
        else:
            server.hung, server.warned = False, ""
            if not server.serves:
                server.serves = True
                log.info("%s serves version %d", server.endpoint.name, self.version)
                self._tell_samplers()
            elif server.endpoint != before:  # it restarted at another address, and samplers of other processes hear of it here
                self._tell_samplers()

    def _leave_out(self, server: Replica, why: str) -> None:
        if server.serves:
            server.serves = False
            log.warning("%s; the other servers go on without it", why)
            self._tell_samplers(server.endpoint.key)

    def _tell_samplers(self, *lost: str) -> None:
        serving: list[Any] = [server.endpoint for server in self._servers if server.serves]
        if serving:
            self.on_change(serving, lost)
