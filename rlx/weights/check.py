"""Checks a folder of weights before a server loads it: it must hold, unchanged, what the trainer wrote, for the model that is served."""

from __future__ import annotations

import json
from pathlib import Path

from rlx.paths import COMPLETE
from rlx.weights.files import identity
from rlx.weights.shapes import ADAPTER_CONFIG, Entry, check_layers, check_shapes, check_tensors, digest_of, entries, manifest


def check_folder(folder: Path, expected: str, initial: Path, tied: bool) -> dict[str, Entry]:
    """The tensors of a folder, after their names, shapes, lengths and checksums were checked.

    `expected`: the digest of the folder's manifest, as the client read it; "": it has none, because it is an initial model.
    `initial`: the folder of the model that the server started with. `tied`: its head is its embedding, so either may lack a head.
    Raises ValueError or OSError that says what is wrong.
    """
    if expected and digest_of(folder / COMPLETE) != expected:
        raise ValueError(f"{folder / COMPLETE} is not the manifest that the client read")
    found, known = entries(folder), manifest(folder) if expected else {}
    given, served = ({name: entry.shape for name, entry in each.items()} for each in (found, entries(initial)))
    if (folder / ADAPTER_CONFIG).is_file():
        if known["base"]["identity"] != identity(initial):
            raise ValueError(f"{folder} holds adapters of another model ({known['base']['name']}) than {initial}")
        check_layers(str(folder), given, served, json.loads((folder / ADAPTER_CONFIG).read_text())["r"])
    else:
        check_shapes(str(folder), given, served, tied, known.get("untrained", ()))
    if expected:
        check_tensors(folder, found, known["tensors"])
    return found
