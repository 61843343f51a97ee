"""What the engine reads of a folder of weights, and whether the folder can become the served policy: files alone, without vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from rlx.weights.files import ADAPTER, ADAPTER_CONFIG, header, verify, weight_files

if TYPE_CHECKING:
    import torch

Shapes = dict[str, tuple[int, ...]]
TIED_HEAD = "lm_head.weight"
CHUNK = 2**24  # bytes compared at a time
SHOWN = 5  # names listed in a message
EXPERTS = ".experts."  # in the name of a matrix that belongs to one of several experts
TABLES = ("lm_head", "embed_tokens", "embed_in", "embed_out", "wte", "wpe")  # matrices that are no layers to adapt
OF_ADAPTER = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")  # PEFT's names: the layer, and which of the two matrices


def tensor_shapes(folder: Path) -> Shapes:
    """Name and shape of every tensor of the model in a folder (`weight_files`), from the files' headers.

    Raises ValueError if there are no weight files, if a file is not a safetensors file or its length does not match its header, or if two
    files have a tensor of the same name. Raises OSError if a file is missing.
    """
    shapes: Shapes = {}
    for path in weight_files(folder):
        entries, _ = header(path)
        for name, entry in entries.items():
            if name in shapes:
                raise ValueError(f"{folder} holds {name} twice, once in {path.name}")
            shapes[name] = tuple(entry["shape"])
    return shapes


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in the weight files of a model folder, in the order of the files."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)


def with_head(entries: Iterator[tuple[str, torch.Tensor]], twin: str | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The entries. If `twin` is given and they have no head, a copy of the tensor `twin` is added as the head."""
    head = twin
    for name, tensor in entries:
        if name == TIED_HEAD:
            head = None
        yield name, tensor
        if name == twin:
            copy = tensor
    if head is not None:
        yield TIED_HEAD, copy


def twin_of_head(folder: Path) -> str | None:
    """Name of the tensor that has the same bytes as the folder's `lm_head.weight`: the head is tied to it and stored a second time.

    None if the files have no head or its values differ from every other tensor. Reads the head and all tensors of its shape.
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
    """Raise ValueError unless the folder is complete, of this version, and has the names and shapes of the served model.

    The values of tensors are not read here: the workers compare them as they read them (`reading.py`). Everything else is checked.
    With `tied` embeddings, the head is optional, both here and in the served model (see `twin_of_head`). Tensors of the served model may be
    missing that the manifest names as `untrained`.
    """
    manifest = verify(folder, tensors=False)
    if manifest.get("version") != version:
        raise ValueError(f"{folder} holds version {manifest.get('version')}, not {version}")
    for path in folder.glob("*.safetensors"):
        if path.name not in manifest["files"]:
            raise ValueError(f"{path} is not in the manifest, so it is not part of version {version}")
    check_shapes(str(folder), tensor_shapes(folder), served, tied, manifest.get("untrained", ()))


def check_shapes(what: str, given: Shapes, served: Shapes, tied: bool, untrained: Iterable[str] = ()) -> None:
    """Raise ValueError unless the given tensors have the names and shapes of the served model. `what`: where they come from.

    `untrained`: tensors in the served model's files that the trainer's model does not have (`rlx.weights.untrained`).
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


def linear_layers(shapes: Shapes) -> list[str]:
    """The last parts of the names of a model's linear layers, as far as its files show them: matrices other than embeddings and experts."""
    return sorted({name.rpartition(".")[2] for name in _matrices(shapes) if EXPERTS not in name} - set(TABLES))


def expert_layers(shapes: Shapes) -> set[str]:
    """The last parts of the names of the experts' matrices, where each has its own."""
    return {name.rpartition(".")[2] for name in _matrices(shapes) if EXPERTS in name}


def _matrices(shapes: Shapes) -> list[str]:
    return [name.removesuffix(".weight") for name, shape in shapes.items() if name.endswith(".weight") and len(shape) == 2]


def check_adapter(folder: Path, version: int, served: Shapes, rank: int, model: str | None = None) -> None:
    """Raise ValueError unless the folder holds complete, undamaged adapters of this version for layers of the served model.

    `rank`: the largest that the engine can serve. `model`: the `identity` of the served model, which must be that of the trained one.
    """
    manifest = verify(folder)
    if manifest.get("version") != version:
        raise ValueError(f"{folder} holds version {manifest.get('version')}, not {version}")
    base = manifest.get("base")
    if model is not None and base is not None and base["identity"] != model:
        raise ValueError(
            f"the adapters in {folder} were trained beside {base['name']} (weights {base['identity']}), but this server has other weights "
            f"({model}); start it with the same model"
        )
    has = json.loads((folder / ADAPTER_CONFIG).read_text())["r"]
    if has > rank:
        raise ValueError(f"{folder} has adapters of rank {has}, but this server was started for rank {rank} (lora.rank)")
    check_layers(str(folder), {name: tuple(entry["shape"]) for name, entry in header(folder / ADAPTER)[0].items()}, served, has)


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
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
