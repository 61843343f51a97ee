"""Whether a folder of weights can become the served policy, decided from the files alone, before anything is touched.

Knows safetensors headers and the `COMPLETE` marker. Knows neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlx.weights.files import header, verify, weight_files

Shapes = dict[str, tuple[int, ...]]
TIED_HEAD = "lm_head.weight"
CHUNK = 2**24  # bytes compared at once
SHOWN = 5  # names listed of a difference


def tensor_shapes(folder: Path) -> Shapes:
    """Name and shape of every tensor of the model in a folder (`weight_files`), from the files' headers.

    Raises ValueError where there is none, where a file is no safetensors file or not as long as its header says, or where a name is twice;
    OSError where one is missing.
    """
    shapes: Shapes = {}
    for path in weight_files(folder):
        entries, _ = header(path)
        for name, entry in entries.items():
            if name in shapes:
                raise ValueError(f"{folder} holds {name} twice, once in {path.name}")
            shapes[name] = tuple(entry["shape"])
    return shapes


def twin_of_head(folder: Path) -> str | None:
    """Name of the tensor whose bytes the folder's `lm_head.weight` repeats: the head is tied to it, and is stored a second time.

    None where there is no head, or one with values of its own. Reads both.
    """
    found: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for path in weight_files(folder):
        entries, start = header(path)
        found |= {name: (path, start, entry) for name, entry in entries.items()}
    head = found.get(TIED_HEAD)
    if head is None:
        return None
    alike = [
        name for name, (_, _, entry) in found.items() if name != TIED_HEAD and all(entry[key] == head[2][key] for key in ("shape", "dtype"))
    ]
    whole = _content(*head)
    for name in alike:
        other = _content(*found[name])
        if all(np.array_equal(whole[at : at + CHUNK], other[at : at + CHUNK]) for at in range(0, len(whole), CHUNK)):
            return name
    return None


def _content(path: Path, start: int, entry: Mapping[str, Any]) -> NDArray[np.uint8]:
    first, last = entry["data_offsets"]
    return np.memmap(path, np.uint8, "r", start + first, (last - first,))


def check_policy(folder: Path, version: int, served: Shapes, tied: bool) -> None:
    """Raise ValueError unless the folder is complete, undamaged, of this version, and has the names and shapes of the served model.

    With `tied` embeddings the head may be there or not. What is served may have it too: stored twice, see `twin_of_head`.
    """
    manifest = verify(folder)
    if manifest.get("version") != version:
        raise ValueError(f"{folder} holds version {manifest.get('version')}, not {version}")
    for path in folder.glob("*.safetensors"):
        if path.name not in manifest["files"]:
            raise ValueError(f"{path} is not in the manifest: it is no part of version {version}")
    given = tensor_shapes(folder)
    allowed = {TIED_HEAD} if tied else set()
    missing = sorted(served.keys() - given.keys() - allowed)
    unknown = sorted(given.keys() - served.keys() - allowed)
    wrong = [
        f"{name} {list(given[name])} instead of {list(served[name])}"
        for name in sorted(given.keys() & served.keys())
        if given[name] != served[name]
    ]
    problems = [f"{what}: {_list(names)}" for what, names in (("missing", missing), ("unknown", unknown), ("wrong shape", wrong)) if names]
    if problems:
        raise ValueError(f"{folder} is not this model; " + "; ".join(problems))


def _list(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
