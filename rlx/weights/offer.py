"""The trainer's offer of a version in memory: `endpoints/weights.json`, `{"version": 13, "where": "host:port", "token": …}`.

Beside it, `endpoints/weights.key` holds the secret of the attempt, which only the run's user can read.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from rlx.parallel.rendezvous import TOKEN
from rlx.paths import RunPaths, listed, write_text
from rlx.types import WeightVersion


def new_secret(paths: RunPaths) -> bytes:
    """Make the secret of this attempt, with which trainer and servers sign what they tell each other."""
    write_text(paths.offer_secret, secret := secrets.token_hex(32), mode=0o600)
    return secret.encode()


def read_secret(path: Path) -> bytes:
    """The secret in the file. Raises FileNotFoundError without one."""
    if not listed(path):
        raise FileNotFoundError(f"there is no {path}, which the trainer writes when it starts")
    return path.read_bytes()


def write_offer(paths: RunPaths, version: int, where: str) -> None:
    """Offer a version at an address. Replaces the offer before it."""
    write_text(paths.offer, json.dumps({"version": version, "where": where, "token": os.environ.get(TOKEN, "")}))


def read_offer(paths: RunPaths) -> WeightVersion | None:
    """The version that the trainer of this attempt offers; None without one."""
    try:
        found = json.loads(paths.offer.read_text()) if listed(paths.offer) else None
    except OSError:
        return None
    if found is None or found["token"] != os.environ.get(TOKEN, ""):
        return None
    return WeightVersion(version=found["version"], kind="memory", where=found["where"])
