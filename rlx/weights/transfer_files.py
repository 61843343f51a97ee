"""How the orchestrator has the trainer send a version to the servers from its memory (`weight_broadcast.type` nccl or ipc): three files.

    endpoints/weights.json          trainer: {version: 13}                          the version that its weights are now
    endpoints/weights_wanted.json   orchestrator: {id, version: 13, servers: […]}   these servers are paused and wait for it
    endpoints/weights_sent.json     trainer: {id, version: 13, failed: {url: why}}  the other servers have it

Each file also has the token of the attempt, so files of an earlier attempt count as absent. Reading and writing need no torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.parallel.rendezvous import TOKEN
from rlx.paths import RunPaths, arrived, write_text
from rlx.waiting import Pause

WANTED, SENT = "weights_wanted.json", "weights_sent.json"  # beside `RunPaths.offer`
POLL = 0.005  # seconds between the first looks for the trainer's reply


@dataclass(frozen=True, slots=True)
class Request:
    """Servers that wait for a version: `Request("5f0c…", 13, (("http://node2:8000", "the run's secret"),))`."""

    id: str
    version: int
    servers: tuple[tuple[str, str], ...]  # URL and API key of each


def write_record(path: Path, fields: Mapping[str, Any], mode: int = 0o644) -> None:
    """Write a JSON record of this attempt atomically."""
    write_text(path, json.dumps({**fields, "token": os.environ.get(TOKEN, "")}) + "\n", mode)


def read_record(path: Path) -> dict[str, Any] | None:
    """Read a JSON record; None if there is none of this attempt."""
    content = arrived(path)
    found = json.loads(content) if content else None
    return found if found is not None and found["token"] == os.environ.get(TOKEN, "") else None


def write_offer(paths: RunPaths, version: int) -> None:
    """Let the orchestrator know which version the trainer's weights are. It replaces the previous offer."""
    write_record(paths.offer, {"version": version})


def read_offer(paths: RunPaths) -> int | None:
    """The version that the trainer of this attempt can send; None if there is none."""
    found = read_record(paths.offer)
    return None if found is None else int(found["version"])


def read_request(paths: RunPaths) -> Request | None:
    """The orchestrator's latest request; None if there is none, or if it was answered."""
    found = read_record(paths.endpoints / WANTED)
    if found is None:
        return None
    sent = read_record(paths.endpoints / SENT)
    if sent is not None and sent["id"] == found["id"]:
        return None
    return Request(found["id"], found["version"], tuple((each["url"], each["api_key"]) for each in found["servers"]))


def answer_request(paths: RunPaths, request: Request, failed: Mapping[str, str]) -> None:
    """Report that the servers of a request have its version. `failed`: those that do not, by URL, and why."""
    write_record(paths.endpoints / SENT, {"id": request.id, "version": request.version, "failed": dict(failed)})


async def request_transfer(where: str, version: int, servers: Sequence[tuple[str, str]], timeout: float) -> dict[str, str]:
    """Have the trainer send a version to servers, given by URL and API key, which must be paused. `where`: the folder `endpoints`.

    Returns why servers do not have the version, by URL. After `timeout` seconds without a reply, these are all of them.
    """
    folder, number, deadline, pause = Path(where), uuid.uuid4().hex, time.monotonic() + timeout, Pause(POLL)
    waiting = [{"url": url, "api_key": key} for url, key in servers]
    write_record(folder / WANTED, {"id": number, "version": version, "servers": waiting}, mode=0o600)
    try:
        while time.monotonic() < deadline:
            sent = read_record(folder / SENT)
            if sent is not None and sent["id"] == number:
                return dict(sent["failed"])
            await asyncio.sleep(pause.seconds())
    finally:
        (folder / WANTED).unlink(missing_ok=True)
    return {url: f"the trainer did not send version {version} within {timeout:g} s (weight_broadcast.timeout)" for url, _ in servers}
