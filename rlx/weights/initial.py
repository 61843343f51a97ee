"""What the trainer began with, for whoever compares it with the servers' version 0: `endpoints/initial_model.json`.

    {"identity": "6bc1…", "where": "/cache/…/snapshots/1a2b", "host": "node2", "longest": null, "token": …}

Every later version is compared in full when it is loaded. Version 0 reaches nobody: trainer and servers each read it from their own disk,
and a hub name may be another revision in the cache of another host.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from rlx.parallel.rendezvous import TOKEN
from rlx.paths import RunPaths, listed, write_text
from rlx.process import host_name
from rlx.types import InitialModel
from rlx.weights.files import identity


def write_initial(paths: RunPaths, folder: Path, longest: int | None = None) -> None:
    """Say what is trained from version 0 on. `longest`: `InitialModel.longest`.

    Nothing is said of a model without safetensors files: no server of rlx starts with one.
    """
    try:
        found = identity(folder)
    except (ValueError, FileNotFoundError):
        return
    record = {"identity": found, "where": str(folder), "host": host_name(), "longest": longest, "token": os.environ.get(TOKEN, "")}
    write_text(paths.trained_initial, json.dumps(record) + "\n")


def read_initial(paths: RunPaths) -> InitialModel | None:
    """What the trainer of this attempt has said; None before, and of one that goes on from a checkpoint."""
    try:
        found = json.loads(paths.trained_initial.read_text()) if listed(paths.trained_initial) else None
    except OSError:
        return None
    if found is None or found["token"] != os.environ.get(TOKEN, ""):
        return None
    return InitialModel(identity=found["identity"], where=found["where"], host=found["host"], longest=found["longest"])
