"""Which policy versions there are, as records that servers load. The orchestrator knows nothing else of weights.

    the trainer announces or offers version 13  →  latest() is `WeightVersion(13, …)`  →  the fleet updates every server

A record names where a server finds a version: files, or the trainer's memory (`request_transfer`). Nothing outside `rlx.weights` and the
servers looks there.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rlx.parallel.rendezvous import TOKEN
from rlx.paths import COMPLETE, RunPaths, arrived, listed_with_folder, write_text
from rlx.polling import Pause
from rlx.process import host_name
from rlx.types import InitialModel, WeightVersion
from rlx.weights import files, tmpfs
from rlx.weights.shapes import ADAPTER_CONFIG, digest_of

POLL_SECONDS = 0.005  # seconds between the first looks for the end of a transfer


def version_at(folder: Path, version: int) -> WeightVersion:
    """What servers load: a model's folder, or adapters for the model that they started with."""
    return WeightVersion(version=version, kind="adapter" if (folder / ADAPTER_CONFIG).is_file() else "files", where=str(folder))


class Subscriber:
    """The versions of one run."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths

    def initial(self) -> InitialModel | None:
        """The model that this attempt's trainer began with; None until it has recorded it, and if it resumes from a checkpoint."""
        found = _of_attempt(self.paths.trained_initial)
        return None if found is None else InitialModel(**found)

    def latest(self) -> WeightVersion | None:
        """The newest version that appeared; None without one."""
        offer = self._offered()  # before the files: an offer ends when its version has files
        version = files.latest_version(self.paths)
        if offer is not None and (version is None or offer.version >= version):
            return offer
        return None if version is None else self.at(version)

    def at(self, version: int) -> WeightVersion | None:
        """A version: as the trainer offers it, or from its files; None if there is neither at the moment.

        Over files the trainer keeps all versions after the servers' version. In memory it has one; those that are evaluated have files.
        """
        offer = self._offered()
        if offer is not None and offer.version == version:
            return offer
        return version_at(tmpfs.real(self.paths.weights_of(version)), version) if self.on_disk(version) else None

    def check_offered(self, version: int) -> None:
        """Raise FileNotFoundError for a version that `at` does not find, unless the trainer offers versions from memory: over files no
        one writes it later."""
        if self._offered() is None and self.at(version) is None:
            raise FileNotFoundError(
                f"{self.paths.weights_of(version) / COMPLETE} is missing: the servers need version {version}, and a newer one is on disk. "
                "Was it deleted?\n  fix: continue with resume=latest"
            )

    def on_disk(self, version: int) -> bool:
        """Whether the version has files. Version 0 has them if adapters are trained; otherwise it is the initial model."""
        return listed_with_folder(self.paths.weights_of(version) / COMPLETE)

    def prune(self, keep_last: int, protect: Collection[int]) -> None:
        """Delete the files of all versions except the newest `keep_last` and those in `protect`."""
        files.prune(self.paths, keep_last, protect)

    def _offered(self) -> WeightVersion | None:
        """The version that this attempt's trainer has in memory; None if it sends none."""
        found = _of_attempt(self.paths.offer)
        return None if found is None else WeightVersion(version=found["version"], kind="memory", where=str(self.paths.endpoints))


def digest_at(where: str) -> str | None:
    """Tells a saved version from another with the same number and place: a digest of its manifest. None if this host cannot read it."""
    try:
        return digest_of(Path(where) / COMPLETE)
    except OSError:
        return None


def write_initial(paths: RunPaths, folder: Path, longest: int | None = None) -> None:
    """Record the folder from which the trainer reads version 0: it is not sent, and a hub name may be another revision on another host.

    `longest`: `InitialModel.longest`. Nothing is recorded of a model without safetensors files: servers do not start with one.
    """
    try:
        record = {"identity": files.identity(folder), "where": str(folder), "host": host_name(), "longest": longest}
    except (ValueError, FileNotFoundError):
        return
    write_text(paths.trained_initial, json.dumps(record | {"token": os.environ.get(TOKEN, "")}) + "\n")


def _of_attempt(path: Path) -> dict[str, Any] | None:
    """The content of a JSON file that a process of this attempt wrote, without its `token`; None if there is none."""
    content = arrived(path)
    found: dict[str, Any] = json.loads(content) if content else {"token": None}
    return found if found.pop("token") == os.environ.get(TOKEN, "") else None


async def request_transfer(where: str, version: int, servers: Sequence[tuple[str, str]], timeout: float) -> str:
    """Have the trainer send a version to paused servers, given by URL and key. `where`: `WeightVersion.where`, the folder `endpoints`.

    Returns why they do not have the version; "": they have it. The trainer may have another one by now, or not report in `timeout` seconds.
    """
    offered, wanted, sent = (Path(where) / f"weights{end}.json" for end in ("", "_wanted", "_sent"))
    number, waiting = uuid.uuid4().hex, [{"url": url, "api_key": key} for url, key in servers]
    write_text(wanted, json.dumps({"version": version, "id": number, "servers": waiting}), mode=0o600)
    deadline, pause, why = time.monotonic() + timeout, Pause(POLL_SECONDS), f"did not send version {version} within {timeout:g} s"
    while time.monotonic() < deadline:
        offer = _of_attempt(offered) or {"version": None}  # before the reply, which the trainer writes before its offer ends
        if (content := arrived(sent)) and (found := json.loads(content))["id"] == number:  # not that of a request given up before
            return str(found["failed"])
        if offer["version"] != version:
            why = f"has version {offer['version']} instead of {version}"
            break
        await asyncio.sleep(pause.seconds())
    wanted.unlink(missing_ok=True)
    return f"the trainer {why} (weight_broadcast.timeout)"
