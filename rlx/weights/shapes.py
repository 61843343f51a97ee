"""The tensors in safetensors folders: names, dtypes, shapes and places, read from the files without torch or vLLM.

    entries(folder)["model.norm.weight"]  →  Entry(path=…/model.safetensors, dtype="F32", shape=(64,), begin=4096, end=4352)

A folder holds a Hugging Face model or a PEFT adapter. `files.py` verifies whole versions with this.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from rlx.paths import COMPLETE

Shapes = Mapping[str, tuple[int, ...]]
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # of a PEFT folder
INDEX = "model.safetensors.index.json"
TIED_HEAD = "lm_head.weight"
OF_ADAPTER = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")  # PEFT's names: the layer, and which of the two matrices
CHUNK = 1 << 20  # bytes read at a time for a digest
LISTED = 5  # names listed in a message


class WeightsError(ValueError):
    """A weights folder does not match its manifest, or has none."""


class Entry(NamedTuple):
    """Where a tensor lies in a file."""

    path: Path
    dtype: str  # the format's name
    shape: tuple[int, ...]
    begin: int  # byte of the file, inclusive
    end: int  # exclusive


def entries(folder: Path) -> dict[str, Entry]:
    """The tensors of the model or the adapter in a folder, by name, in the order of the files.

    Of a model these are `model.safetensors`, or the files named by `model.safetensors.index.json`, or `model*.safetensors`, as transformers
    chooses them. Others hold the same weights under their original names (`consolidated.safetensors`).
    Raises ValueError if there are none, if a file is not a safetensors file or its length differs from what its header says, or if two
    files have a tensor of the same name. Raises OSError if a file is missing.
    """
    names = [name for name in ("model.safetensors", ADAPTER) if (folder / name).is_file()][:1]
    if not names and (folder / INDEX).is_file():
        names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    found: dict[str, Entry] = {}
    for path in [folder / name for name in names] or sorted(folder.glob("model*.safetensors")):
        here = header(path)
        if twice := sorted(here.keys() & found.keys()):
            raise ValueError(f"{folder} holds {twice[0]} twice: in {found[twice[0]].path.name} and in {path.name}")
        found |= here
    if not found:
        raise ValueError(f"{folder} holds no model*.safetensors")
    return found


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a folder, by name. Raises as `entries`."""
    return {name: entry.shape for name, entry in entries(folder).items()}


def header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, by name.

    The file starts with the length of its header (8 bytes, little endian) and the JSON header. Offsets count from the header's end.
    Raises ValueError if the file is not in this format, or not as long as its header says.
    """
    length = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else length
        text = file.read(size) if size < length else b""
    try:
        described = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        begin = 8 + size
        found = {
            name: Entry(path, entry["dtype"], tuple(entry["shape"]), *(begin + at for at in entry["data_offsets"]))
            for name, entry in described.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a safetensors file, or was cut short") from error
    end = max((entry.end for entry in found.values()), default=begin)
    if end != length:
        raise ValueError(f"{path} has {length} bytes, but its header says {end}")
    return found


def digest_of(path: Path, begin: int = 0, end: int | None = None) -> str:
    """The xxh3 of a part of a file, as 16 hexadecimal digits. Bytes that the file does not have are not counted."""
    state, buffer = xxhash.xxh3_64(), memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        left = CHUNK if end is None else end - begin
        while left > 0 and (got := file.readinto(buffer[: min(left, CHUNK)])):
            state.update(buffer[:got])
            left -= 0 if end is None else got
    return state.hexdigest()


def manifest(folder: Path) -> dict[str, Any]:
    """The content of a version's manifest, `COMPLETE` (`files.py` describes it). Raises WeightsError without a valid one."""
    try:
        found: dict[str, Any] = json.loads((folder / COMPLETE).read_bytes())
        _ = found["files"]
    except OSError as error:
        raise WeightsError(f"{folder}: no file {COMPLETE}; the folder was not finished, or is not a weights folder") from error
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{folder / COMPLETE}: not a manifest ({type(error).__name__}: {error})") from error
    return found


def check_shapes(what: str, given: Shapes, served: Shapes, tied: bool, untrained: Iterable[str] = ()) -> None:
    """Raise ValueError unless the given tensors have the names and shapes of the served model. `what`: where they come from.

    With `tied` embeddings both may lack a head or have one. `untrained`: tensors in the served model's files that the trainer's model does
    not have (`Export.unused_checkpoint_tensors`).
    """
    allowed = {TIED_HEAD} if tied else set()
    missing = sorted(served.keys() - given.keys() - allowed - set(untrained))
    unknown = sorted(given.keys() - served.keys() - allowed)
    wrong = [
        f"{name} {list(given[name])} instead of {list(served[name])}"
        for name in sorted(given.keys() & served.keys())
        if given[name] != served[name]
    ]
    problems = [f"{what}: {_list(names)}" for what, names in (("missing", missing), ("unknown", unknown), ("wrong shape", wrong)) if names]
    if problems:
        raise ValueError(f"{what} is not this model; " + "; ".join(problems))


def check_layers(what: str, given: Shapes, served: Shapes, rank: int) -> None:
    """Raise ValueError unless the given tensors are adapters of this rank for layers of the served model. `what`: where they come from."""
    wrong = []
    for name, shape in given.items():
        found = OF_ADAPTER.fullmatch(name)
        whole = served.get(f"{found[1]}.weight") if found else None
        if found is None or whole is None or len(whole) != 2 or shape != ((rank, whole[1]) if found[2] == "A" else (whole[0], rank)):
            wrong.append(f"{name} {list(shape)}")
        elif name.replace(f".lora_{found[2]}.", f".lora_{'BA'['AB'.index(found[2])]}.") not in given:
            wrong.append(f"{name} without its other half")
    if wrong or not given:
        raise ValueError(f"{what} holds no adapters for this model: {_list(wrong) or 'no tensors'}")


def _list(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
