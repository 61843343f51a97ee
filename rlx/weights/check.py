"""Checks a folder of weights before a server loads it, and reads it: it must hold, unchanged, what the trainer wrote for this model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlx.paths import COMPLETE
from rlx.weights.files import identity
from rlx.weights.shapes import (
    ADAPTER_CONFIG,
    TIED_HEAD,
    Entry,
    check_layers,
    check_shapes,
    check_tensors,
    digest,
    digest_of,
    entries,
    manifest,
)


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


def read_tensors(found: Mapping[str, Entry], twice: Path | None) -> Iterator[tuple[str, Any]]:
    """Read the tensors of a folder, one at a time. `found`: its `entries`.

    `twice`: a model whose files store its tied head a second time. The trainer publishes such a head once; here it comes twice, too.
    """
    from safetensors import safe_open  # for torch, which other users of this module do without

    twin, initial = "", entries(twice) if twice is not None and TIED_HEAD not in found else {}
    if initial:
        twin = next(name for name in found if name in initial and digest(initial[name]) == digest(initial[TIED_HEAD]))
    for path in dict.fromkeys(entry.path for entry in found.values()):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)
                if name == twin:
                    yield TIED_HEAD, file.get_tensor(name)
