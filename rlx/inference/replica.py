"""What a fleet knows of one of its servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

import msgspec

from rlx.inference.endpoints import Endpoint
from rlx.inference.protocol import Device, InferenceError, PolicyState, ServerUnreachable, StaleServer
from rlx.types import InitialModel

T = TypeVar("T")
_devices = msgspec.json.Decoder(list[Device])
ASKING = 10.0  # seconds for which a server's word that it waits for the trainer holds
GONE = 2.0  # seconds without an answer after which an update goes on without a server, if others have the version


def totals(states: Sequence[PolicyState]) -> dict[str, float]:
    """Metrics of servers by name: the mean of their cache usage, the share of all their prompts' tokens, the sums of the others."""
    prompts = sum(state.prompt_tokens for state in states)
    return {
        "perf/servers": len(states),
        "perf/kv_cache_usage": sum(state.kv_cache_usage for state in states) / len(states),
        "perf/running": sum(state.running for state in states),
        "perf/waiting": sum(state.waiting for state in states),
        "perf/preemptions": sum(state.preemptions for state in states),
        **({"perf/prefix_cache_hits": sum(state.cached_tokens for state in states) / prompts} if prompts else {}),
    }


def devices_of(answers: Sequence[tuple[int, bytes]]) -> list[Device]:
    """The devices of all servers, of their answers to `GET /devices`; those of servers that do not know the route are not there."""
    return [device for status, body in answers if status == 200 for device in _devices.decode(body)]


def memory_of(devices: Sequence[Device]) -> dict[str, float]:
    """Metrics of servers' memory by name; empty without devices."""
    if not devices:
        return {}
    highest = max(devices, key=lambda device: device.peak_memory_gb)
    card = {"perf/device_memory_gb": highest.memory_gb} if highest.memory_gb else {}
    return {"perf/peak_memory_gb": highest.peak_memory_gb} | card


def check_joins(server: Replica, serving: Sequence[Replica]) -> None:
    """Raise StaleServer if a server that is to join at version 0 began with other weights than those that serve.

    Later versions are compared with what was trained when they are loaded, so only version 0 could be another model unnoticed.
    """
    if (other := server.differs_from(serving)) is not None:
        raise StaleServer(
            f"{server.endpoint.name} does not join at version 0: the weights of its model {server.model} are not those that "
            f"{other.endpoint.name} began with. Start it with the run's model"
        )


def check_initial(servers: Sequence[Replica], trained: InitialModel) -> None:
    """Raise InferenceError if a server began with other weights than the trainer: all rollouts of version 0 would be another model's."""
    for server in servers:
        if server.initial and server.initial != trained.identity:
            raise InferenceError(
                f"{server.endpoint.name} began with other weights than the trainer: its model is {server.model} (identity "
                f"{server.initial}), that of the trainer on {trained.host} is {trained.where} (identity {trained.identity}). Give all "
                "hosts the same: a folder on a shared file system (model.name), or the same revision of a hub name in their caches"
            )


def check_contexts(servers: Sequence[Replica], trained: InitialModel) -> None:
    """Raise InferenceError if a server computes with other rotary frequencies than the trainer, because its context is longer."""
    for server in servers:
        if trained.longest is not None and server.context > trained.longest:
            raise InferenceError(
                f"{server.endpoint.name} has a context of {server.context} tokens, so it takes the rotary frequencies of long texts for "
                f"all requests, and the trainer takes those of texts of up to {trained.longest} tokens (LongRoPE). Start the server with "
                f"inference.max_model_len={trained.longest} or less"
            )


class Replica:
    """One replica."""

    def __init__(self, endpoint: Endpoint, serves: bool = True) -> None:
        self.endpoint = endpoint
        self.serves = serves  # samplers use it
        self.initial = self.model = ""  # its word of version 0's weights, and of where they lie: `identity` and `model` of `PolicyState`
        self.context = 0  # tokens of prompt and completion together, by its word; 0: it has said nothing yet
        self.claimed = False  # for the run, and without another run's weights
        self.silent_since: float | None = None  # monotonic time of the first of its latest failures to answer
        self.hung = False  # it took a connection and did not answer
        self.late = False  # it answered, but did not load the latest version that it was told in time
        self._start: str | None = None  # which start of the server this is, by its latest word; None: it has said nothing yet
        self._version = 0  # by its latest word
        self.said = ""  # the latest warning about it
        self._asked: float | None = None  # monotonic time of its latest word that it waits for the trainer, unless it said otherwise since
        self.updating = asyncio.Lock()

    async def in_time(self, answer: Awaitable[T], seconds: float, what: str) -> T:
        """The server's answer about `what`. Raises ServerUnreachable if it does not come in time: the server may hang."""
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise ServerUnreachable(f"{self.endpoint.name} did not report its {what} in {seconds:g} s") from None

    @property
    def gone(self) -> bool:
        """Whether there is no use in waiting for it."""
        return self.hung or self.late or (self.silent_since is not None and time.monotonic() - self.silent_since > GONE)

    def told(self, state: PolicyState) -> PolicyState:
        """Keep in mind what the server says of itself."""
        self._asked = time.monotonic() if state.asking else None
        # At version 0 its version does not say so.
        began_anew = self._start not in (None, state.start) or state.version < self._version
        self.late &= not state.asking and not began_anew
        self._start, self._version = state.start, state.version
        self.initial, self.model, self.context = state.identity, state.model, state.context_length
        return state

    def differs_from(self, others: Iterable[Replica]) -> Replica | None:
        """The first of these servers that began with other weights, if both say so."""
        return next((other for other in others if self.initial and other.initial and self.initial != other.initial), None)

    @property
    def asks(self) -> bool:
        """Whether it waits until the trainer is ready to send a version. That is as long as a training step may take."""
        return self._asked is not None and time.monotonic() - self._asked < ASKING
