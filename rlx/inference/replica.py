"""What a fleet knows of one of its servers, and the calls that bring a version of the weights to it.

    rlx_check on every rank (while it generates)  →  pause  →  rlx_load  →  rlx_compare, when due  →  label  →  resume

If a load begins and does not end well (a lost connection, a cancelled update, other weights than the files), the server stays paused: it
generates nothing until the next attempt has loaded a version, compared it and labelled it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx.concurrent import all_of
from rlx.inference import wire
from rlx.inference.client import Client
from rlx.inference.endpoints import Endpoint
from rlx.inference.wire import InferenceError, ServerUnreachable, UpdateRefused, WeightsDiffer, label_of
from rlx.paths import COMPLETE
from rlx.types import WeightVersion
from rlx.weights.shapes import digest_of, manifest

log = logging.getLogger(__name__)

POLL = 0.02  # seconds between two looks at a check
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
    """One server."""

    endpoint: Endpoint
    serves: bool = True  # samplers use it
    state: ServerState | None = None  # the latest one
    hung: bool = False  # it took a connection and did not answer
    silent_since: float | None = None  # monotonic time of the first of its latest failures to answer
    warned: str = ""  # the latest warning about it
    compared: float | None = None  # share of the served weights that the latest compare covered; None: none since it started
    compare_seconds: float = 0.0  # of the latest compare
    updates: int = 0  # since the latest compare
    updated: float = field(default_factory=time.monotonic)  # monotonic time of the latest update
    adapters: list[str] = field(default_factory=list)  # of this run, oldest first
    paused: bool = False  # it was told to pause, and not yet to go on
    loading: bool = False  # a load has begun, and no label followed: what it would serve is not known
    interrupted: float = 0.0  # requests that pauses have interrupted since it started: vLLM counts them among its preemptions
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # callers of `load` and `reset` hold it

    async def look(self, client: Client, extension: bool = True) -> ServerState:
        """Ask for its state. `extension`: it must have the worker extension of rlx. Raises InferenceError."""
        models = wire.models_of(await self.ask(client.get(self.endpoint, wire.MODELS)))
        if not models:
            raise InferenceError(f"{self.endpoint.name} serves no model")
        _, model, context = models[0]
        adapters = tuple(name for name, *_ in models[1:])
        if not extension:
            self.state = ServerState(wire.UNLABELLED, model, context, adapters=adapters)
            return self.state
        ranks = self.good(await self.ask(client.call_workers(self.endpoint, "rlx_state")))
        label = await self.ask(client.label(self.endpoint))
        first = ranks[0]
        if self.state is not None and first["start"] != self.state.start:
            self.compared, self.adapters, self.interrupted = None, [], 0.0
        # A load that was not labelled afterwards went wrong.
        pristine = all(rank["label"] in (None, label) for rank in ranks) and (label == wire.UNLABELLED or label.startswith("0@"))
        about = {name: first[name] for name in ("model", "context", "start", "identity")}
        self.state = ServerState(label, **about, pristine=pristine, adapters=adapters, devices=tuple(ranks))
        return self.state

    async def ask(self, answer: Any) -> Any:
        """Await an answer, and note whether there is one."""
        try:
            found = await answer
        except ServerUnreachable:
            self.silent_since = self.silent_since or time.monotonic()
            self.endpoint = self.endpoint.refreshed()
            raise
        except InferenceError:
            self.silent_since = None
            raise
        self.silent_since = None
        return found

    def good(self, ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The ranks' records. Raises UpdateRefused if a rank has an error, InferenceError if the server ends because of it."""
        for rank in ranks:
            if rank.get("broken"):
                raise InferenceError(f"{self.endpoint.name} failed in the middle of a load and ends: {rank['error']}")
        for rank in ranks:
            if "error" in rank:
                raise UpdateRefused(f"{self.endpoint.name}, rank {rank['rank']}: {rank['error']}")
        return ranks

    async def load(self, client: Client, weights: WeightVersion, run: str, verify_every: int) -> None:
        """Bring a version from files to the server, under the label of the run.

        Raises UpdateRefused if the server did not take it and still serves the old version, WeightsDiffer if it serves something else than
        what was trained, InferenceError if it fails.
        """
        await self._check(client, weights.where, await asyncio.to_thread(_manifest_digest, weights))
        if weights.kind == "adapter":
            await self._load_adapter(client, weights.where, label_of(weights.version, run))
        else:
            await self._load_model(client, weights.where, label_of(weights.version, run), verify_every)

    async def reset(self, client: Client, run: str, folder: str) -> None:
        """Bring the server to version 0, the model in `folder`. Raises the same errors as `load`."""
        assert self.state is not None
        if self.loading or not self.state.pristine or folder != self.state.model:
            await self._check(client, folder, "")
            await self._load_model(client, folder, label_of(0, run), 1)
            await self.look(client)
        else:
            await self.label(client, label_of(0, run))

    async def _check(self, client: Client, folder: str, digest: str) -> None:
        while not all(rank["ready"] for rank in await self._call(client, "rlx_check", folder, digest)):
            await asyncio.sleep(POLL)

    async def _load_model(self, client: Client, folder: str, label: str, verify_every: int) -> None:
        known, due = not self.loading, self._compare_is_due(verify_every)
        await self.pause(client)
        self.loading = True
        ranks = await self.ask(client.call_workers(self.endpoint, "rlx_load", folder, label))
        if known and all("error" in rank and not rank.get("broken") for rank in ranks):  # nothing was changed
            await self.resume(client)
        self.good(ranks)
        if due:
            await self._compare(client, folder, label)
        self.updates, self.updated = self.updates + 1, time.monotonic()
        await self.label(client, label)

    async def label(self, client: Client, label: str) -> None:
        """Give the served weights a label, and let the server generate."""
        await self.ask(client.post(self.endpoint, wire.SET_LABEL, {"new_version": label}))
        await self.resume(client)

    async def pause(self, client: Client) -> None:
        self.paused = True
        # Together, as each waits for a step of the engine.
        text, _ = await all_of([self.ask(client.get(self.endpoint, wire.METRICS)), self.ask(client.post(self.endpoint, wire.PAUSE))])
        self.interrupted += wire.metrics_of(text)["num_requests_running"]

    async def resume(self, client: Client) -> None:
        await self.ask(client.post(self.endpoint, wire.RESUME))
        self.paused = self.loading = False

    def _compare_is_due(self, verify_every: int) -> bool:
        cheap = self.compare_seconds < CHEAP * (time.monotonic() - self.updated)
        return self.loading or self.compared is None or self.updates + 1 >= verify_every or cheap

    async def _compare(self, client: Client, folder: str, label: str) -> None:
        ranks = await self._call(client, "rlx_compare", folder)
        wrong = [rank for rank in ranks if rank["different"]]
        if wrong:
            numbers = sum(rank["different"] for rank in wrong)
            raise WeightsDiffer(
                f"{self.endpoint.name} serves other weights than version {label}, which it has just loaded: {numbers} numbers differ on "
                f"{len(wrong)} of {len(ranks)} ranks, most in {', '.join(wrong[0]['names'])} (files: {folder}). It is not used any more"
            )
        self.compared = sum(rank["equal"] for rank in ranks) / sum(rank["served"] for rank in ranks)
        self.compare_seconds, self.updates = max(rank["seconds"] for rank in ranks), -1
        log.info("%s serves %s; %.1f %% of its weights were compared with the files", self.endpoint.name, label, 100 * self.compared)

    async def _load_adapter(self, client: Client, folder: str, name: str) -> None:
        if name not in self.adapters:
            if self.state is None or name not in self.state.adapters:  # unless the answer to an earlier attempt was lost
                await self.ask(client.post(self.endpoint, wire.LOAD_ADAPTER, {"lora_name": name, "lora_path": folder}))
            self.adapters.append(name)
        while len(self.adapters) > ADAPTERS_LEFT:
            await self.ask(client.post(self.endpoint, wire.UNLOAD_ADAPTER, {"lora_name": self.adapters.pop(0)}))

    async def _call(self, client: Client, method: str, *arguments: Any) -> list[dict[str, Any]]:
        return self.good(await self.ask(client.call_workers(self.endpoint, method, *arguments)))

    def gone(self, now: float, patience: float) -> bool:
        """Whether it is useless to wait for it."""
        return self.hung or (self.silent_since is not None and now - self.silent_since > patience)

    def differs_from(self, others: Iterable[Replica]) -> Replica | None:
        """The first of these servers that started with other weights, if both report theirs."""
        mine = self.state.identity if self.state else ""
        return next((one for one in others if mine and one.state and one.state.identity and one.state.identity != mine), None)


def _manifest_digest(weights: WeightVersion) -> str:
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
