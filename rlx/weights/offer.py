"""The trainer's offer of a version in memory: `endpoints/weights.json`, `{"version": 13, "where": "host:port", "token": …}`."""

from __future__ import annotations

import json
import os

from rlx.parallel.rendezvous import TOKEN
from rlx.paths import RunPaths, listed, write_text
from rlx.types import WeightVersion


def write_offer(paths: RunPaths, version: int, where: str) -> None:
    """Offer a version at an address. Replaces the offer before it."""
    write_text(paths.offer, json.dumps({"version": version, "where": where, "token": os.environ.get(TOKEN, "")}))


def read_offer(paths: RunPaths) -> WeightVersion | None:
    """The version that the trainer of this attempt offers; None without one."""
    try:
        found = json.loads(paths.offer.read_text()) if listed(paths.offer) else {"token": None}
    except OSError:
        return None
    if found["token"] != os.environ.get(TOKEN, ""):
        return None
    return WeightVersion(version=found["version"], kind="memory", where=found["where"])
