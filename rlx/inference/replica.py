"""What a fleet knows of one of its servers, and the calls that bring a version of the weights to it.

    rlx_check on every rank (while it generates)  →  pause  →  rlx_load  →  rlx_compare, when due  →  label  →  resume

If a load begins and does not end well (a lost connection, a cancelled update, other weights than the files), the server stays paused: it
generates nothing until the next attempt has loaded a version, compared it and labelled it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rlx.aio import all_of
from rlx.inference import wire
from rlx.inference.client import Client
from rlx.inference.endpoints import Endpoint
from rlx.inference.wire import UNLABELLED, InferenceError, RequestRefused, ServerUnreachable, StaleServer, UpdateRefused, WeightsDiffer
from rlx.paths import COMPLETE
from rlx.types import InitialModel, WeightVersion
from rlx.weights.shapes import digest_of, manifest

log = logging.getLogger(__name__)

T = TypeVar("T")
POLL_SECONDS = 0.02  # seconds between two looks at a check
CHEAP = 0.05  # share of the time between two updates that a compare may always take
ADAPTERS_LEFT = 2  # adapters of a run that stay loaded: requests in flight may have the one before


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a server reports of itself."""

    label: str  # of the served weights
    model: str  # folder or hub name of the model that it started with, or of version 0 if a run has loaded one
    context: int  # tokens of prompt and completion together
    start: str = ""  # another one each time that the server starts; "": it has no extension of rlx
    identity: str = ""  # of the model that it started with (`weights.files.identity`); "": it has no extension
    pristine: bool = True  # it serves `model`: nobody has loaded other weights
    adapters: tuple[str, ...] = ()
    devices: tuple[dict[str, Any], ...] = ()  # of its ranks: `device`, `peak_memory`, `memory`


@dataclass(eq=False)
class Replica:
    """One server. Callers of what changes it hold its lock."""

    client: Client
    endpoint: Endpoint
    extension: bool = True  # it must have the worker extension of rlx; False: a server of others
    serves: bool = True  # samplers use it
    state: ServerState | None = None  # the latest one
    silent_since: float | None = None  # monotonic time of the first of its latest failures to answer
    hangs: bool = False  # the latest of these: it took a question and did not answer in time
    warned: str = ""  # the latest warning about it
    compared: float | None = None  # share of the served weights that the latest compare covered; None: none since it started
    compare_seconds: float = 0.0  # of the latest compare
    updates: int = 0  # since the latest compare
    updated: float = field(default_factory=time.monotonic)  # monotonic time of the latest update
    paused: bool = False  # it was told to pause, and not yet to go on
    loading: bool = False  # a load has begun, and no label followed: what it would serve is not known
    interrupted: float = 0.0  # requests that pauses have interrupted since it started: vLLM counts them among its preemptions
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def look(self) -> ServerState:
        """Ask for its state. Raises InferenceError."""
        (_, model, context), *others = wire.models_of(await self.ask(wire.MODELS))
        if not self.extension:
            try:
                label = await self._label()
            except RequestRefused:  # it has no route for labels
                label = UNLABELLED
            self.state = ServerState(label, model, context)
            return self.state
        ranks, label = await self.call("rlx_state"), await self._label()
        if self.state is not None and ranks[0]["start"] != self.state.start:
            self.compared, self.interrupted = None, 0.0
        # A load that was not labelled afterwards went wrong.
        pristine = all(rank["label"] in (None, label) for rank in ranks) and (label == UNLABELLED or label.startswith("0@"))
        about = {name: ranks[0][name] for name in ("model", "context", "start", "identity")}
        adapters = tuple(name for name, *_ in others)
        self.state = ServerState(label, **about, pristine=pristine, adapters=adapters, devices=tuple(ranks))
        return self.state

    async def _label(self) -> str:
        return str(msgspec.json.decode(await self.ask(wire.LABEL))["weight_version"])

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The body of its answer."""
        return await self._noting(self.client.ask(self.endpoint, path, body))

    async def call(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """The records of its ranks. Raises UpdateRefused if a rank has an error, InferenceError if the server ends because of it."""
        ranks = await self._noting(self.client.call_workers(self.endpoint, method, *arguments))
        for rank in sorted(ranks, key=lambda rank: not rank.get("broken")):
            if rank.get("broken"):
                raise InferenceError(f"{self.endpoint.name} failed in the middle of a load and ends: {rank['error']}")
            if "error" in rank:
                raise UpdateRefused(f"{self.endpoint.name}, rank {rank['rank']}: {rank['error']}")
        return ranks

    async def _noting(self, answer: Awaitable[T]) -> T:
        """Await an answer, and note whether there is one."""
        try:
            found = await answer
        except ServerUnreachable:
            self.silent_since, self.hangs = self.silent_since or time.monotonic(), False
            self.endpoint = self.endpoint.refreshed()
            raise
        except InferenceError:
            self.silent_since = None
            raise
        self.silent_since = None
        return found

    async def in_time(self, answer: Awaitable[T], seconds: float, what: str) -> T:
        """Await answers. Raises ServerUnreachable if they do not come in time: the server hangs, and has been silent since the question."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            self.silent_since, self.hangs = self.silent_since or began, True
            raise ServerUnreachable(f"{self.endpoint.name} did not {what} in {seconds:g} s") from None

    def gone(self, now: float, patience: float) -> bool:
        """Whether it is useless to wait for it."""
        return self.silent_since is not None and now - self.silent_since > patience

    def compare_with(self, trained: InitialModel, insists: bool) -> None:
        """Raise InferenceError if its version 0 is another model than the trainer's, or computes with other rotary frequencies.

        `insists`: False: another model is only logged.
        """
        state, name = self.state, self.endpoint.name
        if state is not None and trained.longest is not None and state.context > trained.longest:
            raise InferenceError(
                f"{name} has a context of {state.context} tokens, so it takes the rotary frequencies of long texts for all requests, "
                f"and the trainer takes those of texts of up to {trained.longest} tokens (LongRoPE).\n"
                f"  fix: start the server with inference.max_model_len={trained.longest} or less"
            )
        if state is not None and state.identity not in ("", trained.identity):
            text = (
                f"{name} started with other weights than the trainer: its model is {state.model} (identity {state.identity}), that of "
                f"the trainer on {trained.host} is {trained.where} (identity {trained.identity}).\n  fix: give all hosts one model: "
                "a folder on a shared file system (model.name), or the same revision of a hub name in their caches"
            )
            if insists:
                raise InferenceError(text)
            log.warning("%s. The same weights in another dtype, or with a tied head stored, differ in this, too", text)

    async def load(self, weights: WeightVersion, label: str, initial: str, verify_every: int) -> None:
        """Bring a version to the server, and label it. `initial`: the folder of version 0. `verify_every`: updates between two compares.

        Raises UpdateRefused if the server did not take it and changed nothing, WeightsDiffer if it serves something else than what was
        trained, InferenceError if it fails.
        """
        assert self.state is not None
        if weights.kind == "memory":
            raise StaleServer(f"{self.endpoint.name} joins with the next version, which the trainer sends from its memory")
        if weights.kind == "adapter":
            await self._load_adapter(weights.where, await asyncio.to_thread(manifest_digest, weights), label)
        elif weights.kind == "files":
            await self._load_model(weights.where, await asyncio.to_thread(manifest_digest, weights), label, verify_every)
        elif self.loading or not self.state.pristine or initial != self.state.model:
            await self._load_model(initial, "", label, 1)
            await self.look()
        else:
            await self.label(label)

    async def _load_model(self, folder: str, digest: str, label: str, verify_every: int) -> None:
        await self._check(folder, digest)
        cheap = self.compare_seconds < CHEAP * (time.monotonic() - self.updated)
        due = self.loading or self.compared is None or self.updates + 1 >= verify_every or cheap
        await self.pause()
        self.loading = True
        await self.call("rlx_load", folder, label)
        self.updates, self.updated = self.updates + 1, time.monotonic()
        if due:
            await self._compare(folder, label)
        await self.label(label)

    async def _load_adapter(self, folder: str, digest: str, name: str) -> None:
        """Load an adapter beside those of requests in flight, and unload older ones of the same run."""
        assert self.state is not None
        await self._check(folder, digest)
        await self.ask(wire.LOAD_ADAPTER, {"lora_name": name, "lora_path": folder})
        own = [each for each in self.state.adapters if each.partition("@")[2] == name.partition("@")[2]]  # in the order of their loading
        for old in own[: 1 - ADAPTERS_LEFT]:
            await self.ask(wire.UNLOAD_ADAPTER, {"lora_name": old})

    async def _check(self, folder: str, digest: str) -> None:
        """Have every rank check the folder, while the server generates."""
        while not all(rank["ready"] for rank in await self.call("rlx_check", folder, digest)):
            await asyncio.sleep(POLL_SECONDS)

    async def label(self, label: str) -> None:
        """Give the served weights a label, and let the server generate."""
        await self.ask(wire.SET_LABEL, {"new_version": label})
        await self.resume()

    async def pause(self) -> None:
        self.paused = True
        # Together, as each waits for a step of the engine.
        text, _ = await all_of([self.ask(wire.METRICS), self.ask(wire.PAUSE, {})])
        self.interrupted += wire.metrics_of(text)["num_requests_running"]

    async def resume(self) -> None:
        await self.ask(wire.RESUME, {})
        self.paused = self.loading = False

    async def _compare(self, folder: str, label: str) -> None:
        ranks = await self.call("rlx_compare", folder)
        wrong = [rank for rank in ranks if rank["different"]]
        if wrong:
            numbers = sum(rank["different"] for rank in wrong)
            raise WeightsDiffer(
                f"{self.endpoint.name} serves other weights than version {label}, which it has just loaded: {numbers} numbers differ on "
                f"{len(wrong)} of {len(ranks)} ranks, most in {', '.join(wrong[0]['names'])} (files: {folder}). It is not used any more"
            )
        self.compared = sum(rank["equal"] for rank in ranks) / sum(rank["served"] for rank in ranks)
        self.compare_seconds, self.updates = max(rank["seconds"] for rank in ranks), 0
        log.info("%s serves %s; %.1f %% of its weights were compared with the files", self.endpoint.name, label, 100 * self.compared)


def manifest_digest(weights: WeightVersion) -> str:
    """The digest of a version's manifest. Raises UpdateRefused if the folder holds another version or an unfinished one."""
    try:
        found = manifest(Path(weights.where))["version"]
    except (OSError, ValueError) as error:
        raise UpdateRefused(str(error)) from error
    if found != weights.version:
        raise UpdateRefused(f"{weights.where} holds version {found}, not {weights.version}")
    return digest_of(Path(weights.where) / COMPLETE)


def totals(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of servers by name: the mean of their cache usage, the share of cached prompt tokens, the sums of the others."""
    total = {name: sum(each[name] for each in metrics) for name in wire.COUNTED}
    queries = total["prefix_cache_queries_total"]
    return {
        "perf/servers": len(metrics),
        "perf/kv_cache_usage": total["kv_cache_usage_perc"] / len(metrics),
        "perf/running": total["num_requests_running"],
        "perf/waiting": total["num_requests_waiting"],
        "perf/preemptions": total["num_preemptions_total"],
        "perf/answered": total["request_success_total"],
        **({"perf/prefix_cache_hits": total["prefix_cache_hits_total"] / queries} if queries else {}),
    }


def memory_of(states: Iterable[ServerState]) -> dict[str, float]:
    """Metrics of servers' memory by name; empty if none reports its devices."""
    devices = [device for state in states for device in state.devices]
    if not devices:
        return {}
    highest = max(devices, key=lambda device: device["peak_memory"])
    card = {"perf/device_memory_gb": highest["memory"] / 2**30} if highest["memory"] else {}
    return {"perf/peak_memory_gb": highest["peak_memory"] / 2**30} | card
