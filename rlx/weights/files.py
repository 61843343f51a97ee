"""Policy versions as Hugging Face folders, written whole or not at all, with a manifest that proves each byte.

`weights/step_13/` holds safetensors under Hugging Face's names, the model's configuration and tokenizer, and, written last, `COMPLETE`:
`{"version": 13, "files": {name: {"size", "xxh3"}}}`. Any program that loads Hugging Face models can load it. If adapters are trained, it is
a PEFT folder instead: `adapter_model.safetensors` and `adapter_config.json`, and the manifest has `"base": {"name", "identity"}` of the
model that they belong to. `"untrained": [name, …]` are tensors of the initial model's files that versions do not have, if there are any.

`xxh3` is the digest of a file's bytes. The trainer computes that of the weights from its memory, so it also catches write errors. Reading,
checking and pruning need no torch; writing imports it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from rlx.paths import COMPLETE, RunPaths, listed
from rlx.weights import tmpfs
from rlx.weights.shapes import (
    ADAPTER_CONFIG,
    INDEX,
    TIED_HEAD,
    Entry,
    WeightsError,
    check_layers,
    check_shapes,
    digest_of,
    entries,
    header,
    manifest,
    tensor_shapes,
)

if TYPE_CHECKING:
    import torch

IDENTIFYING = 4096  # bytes of each tensor
THREADS = 4  # that read the files of a folder
SHARD_BYTES = 5 * 2**30  # of a safetensors file; one may be larger by a part of a unit
# The files of a model folder besides weights: configuration, tokenizer, chat template, code.
STATIC = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")


# reading


def identity(folder: Path) -> str:
    """Tells a model's weights from others, at no cost: a digest of all names, shapes and dtypes, and of the beginning of every tensor.

    It is the same however the weights are divided into files. Damage may go unnoticed. Raises as `entries`.
    """
    state = xxhash.xxh3_64()
    for name, entry in sorted(entries(folder).items()):
        beginning = digest_of(entry.path, entry.begin, min(entry.end, entry.begin + IDENTIFYING))
        state.update(f"{name} {entry.dtype} {entry.shape} {beginning}".encode())
    return state.hexdigest()


def verify(path: Path, *, digests: bool = True) -> dict[str, Any]:
    """Check every file of a version, or of a checkpoint, against its manifest and return the manifest.

    Without `digests`, only names and sizes are checked, because reading a large checkpoint takes minutes.
    Raises WeightsError naming the file, what was expected and what was found.
    """

    def check(file: Path, expected: Mapping[str, Any]) -> None:
        if not file.is_file():
            raise WeightsError(f"{file}: expected {expected['size']} bytes, found no such file")
        if (size := file.stat().st_size) != expected["size"]:
            raise WeightsError(f"{file}: expected {expected['size']} bytes, found {size}")
        if digests and "xxh3" in expected and (value := digest_of(file)) != expected["xxh3"]:
            raise WeightsError(f"{file}: expected checksum {expected['xxh3']}, found {value}; its {size} bytes are damaged")

    found = manifest(path)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:  # reading and hashing release Python's lock
        list(pool.map(lambda item: check(path / item[0], item[1]), found["files"].items()))
    return found


def check_folder(folder: Path, expected: str, initial: Path, tied: bool) -> dict[str, Entry]:
    """The tensors of a folder that a server is to load: names and shapes are this model's, and every byte is what the trainer wrote.

    `expected`: the digest of the folder's manifest, as the client read it; "": it has none, because it is an initial model.
    `initial`: the folder of the model that the server started with. `tied`: its head is its embedding, so either may lack a head.
    Raises ValueError or OSError that says what is wrong.
    """
    if expected and digest_of(folder / COMPLETE) != expected:
        raise ValueError(f"{folder / COMPLETE} is not the manifest that the client read")
    found, known = entries(folder), manifest(folder) if expected else {}
    given, served = {name: entry.shape for name, entry in found.items()}, tensor_shapes(initial)
    if (folder / ADAPTER_CONFIG).is_file():
        if known["base"]["identity"] != identity(initial):
            raise ValueError(f"{folder} holds adapters of another model ({known['base']['name']}) than {initial}")
        check_layers(str(folder), given, served, json.loads((folder / ADAPTER_CONFIG).read_text())["r"])
    else:
        check_shapes(str(folder), given, served, tied, known.get("untrained", ()))
    if expected:
        proven = {name for name, record in verify(folder)["files"].items() if "xxh3" in record}
        if unproven := {entry.path.name for entry in found.values()} - proven:
            raise ValueError(f"the manifest of {folder} has no checksum of {', '.join(sorted(unproven))}")
    return found


def read_tensors(found: Mapping[str, Entry], twice: Path | None) -> Iterator[tuple[str, Any]]:
    """Read the tensors of a folder, one at a time. `found`: its `entries`.

    `twice`: a model whose files store its tied head a second time. The trainer publishes such a head once; here it comes twice, too.
    """
    from safetensors import safe_open  # for torch, which other users of this module do without

    twin, stored = "", entries(twice) if twice is not None and TIED_HEAD not in found else {}
    if stored:
        head = stored[TIED_HEAD]
        value = digest_of(head.path, head.begin, head.end)
        likely = ((name, stored[name]) for name in found if name in stored and stored[name].shape == head.shape)
        twin = next(name for name, each in likely if digest_of(each.path, each.begin, each.end) == value)
    for path in dict.fromkeys(entry.path for entry in found.values()):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)
                if name == twin:
                    yield TIED_HEAD, file.get_tensor(name)


def versions(weights: Path) -> list[int]:
    """The complete policy versions in a folder of weights, oldest first."""
    found = []
    for path in weights.glob("step_*"):
        number = path.name.removeprefix("step_")
        with contextlib.suppress(PermissionError):  # it is in the memory of another user's run
            if number.isdecimal() and listed(path / COMPLETE):
                found.append(int(number))
    return sorted(found)


def is_persistent(paths: RunPaths, version: int) -> bool:
    """Whether a version is complete and on the disk: one in memory ends with the run."""
    return version in versions(paths.weights) and not paths.weights_of(version).is_symlink()


def latest_version(paths: RunPaths) -> int | None:
    """The newest complete policy version; None without one."""
    return max(versions(paths.weights), default=None)


def prune(paths: RunPaths, keep_last: int, protect: Collection[int] = ()) -> list[int]:
    """Delete all versions except the newest `keep_last` and those in `protect`. Returns the deleted versions.

    A folder is renamed before it is deleted, so no reader finds half a version.
    """
    assert keep_last >= 1, keep_last
    gone = [version for version in versions(paths.weights)[:-keep_last] if version not in protect]
    for version in gone:
        path = paths.weights_of(version)
        doomed = path.with_name(f".{path.name}.deleted.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):  # another process prunes, too
            path.rename(doomed)
            tmpfs.delete(doomed)
    return gone


# writing


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a version that do not change during training, by file name."""

    files: Mapping[str, bytes]
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the manifest: `base` or `untrained`

    @classmethod
    def read(cls, model: Path, hf: Any, dtype: str, untrained: Sequence[str] = (), chat_template: Path | None = None) -> ModelFiles:
        """Read the folder of the model. The configuration comes from `hf`, with the dtype of versions.

        `chat_template` takes the place of the model's own: `chat_template.jinja` wins over the one in `tokenizer_config.json`.
        """
        found = {file.name: file.read_bytes() for pattern in STATIC for file in model.glob(pattern) if not file.name.endswith(INDEX)}
        config = copy.deepcopy(hf.config)
        config.dtype, config.architectures = dtype, [type(hf).__name__]
        if hasattr(config, "quantization_config"):  # the model was read without it: versions hold plain weights
            del config.quantization_config
        found["config.json"] = config.to_json_string().encode()
        if chat_template is not None:
            found["chat_template.jinja"] = chat_template.read_bytes()
        return cls(found, {"untrained": list(untrained)} if untrained else {})

    @classmethod
    def of_adapters(cls, config: Mapping[str, Any], model: Path) -> ModelFiles:
        """The one file besides the adapters of a PEFT folder, for the model in the folder `model`."""
        base = {"name": config["base_model_name_or_path"], "identity": identity(model)}
        return cls({ADAPTER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()}, {"base": base})


Tensors = dict[str, "torch.Tensor"]
# What one rank wrote, by safetensors file: the manifest's record, and the names of its tensors.
Written = dict[str, tuple[dict[str, Any], list[str]]]


def divide(units: Sequence[Sequence[str]], sizes: Mapping[str, int], writers: Sequence[int]) -> dict[str, tuple[int, list[str]]]:
    """Divide a version into files of about the same number of bytes: by file name, the rank that writes it and the trainer's tensors in it.

    Each writer has the same number of files, unless a unit is larger than a file. `units`: the trainer's tensors by name, in the model's
    order; those of a unit are in one file. `sizes`: their bytes.
    """
    total, before = sum(sizes.values()), 0
    count = len(writers) * max(1, -(-total // (SHARD_BYTES * len(writers))))
    found: dict[int, list[str]] = {}
    for unit in units:
        size = sum(sizes[name] for name in unit)
        middle = before + size // 2  # of the unit, in the bytes of the whole version
        found.setdefault(min(middle * count // max(total, 1), count - 1), []).extend(unit)
        before += size
    names = [f"model-{number:05d}-of-{len(found):05d}.safetensors" for number in range(1, len(found) + 1)]
    names = ["model.safetensors"] if len(found) == 1 else names
    return {name: (writers[place * len(writers) // count], found[place]) for name, place in zip(names, found, strict=True)}


def begin(paths: RunPaths, version: int, *, in_memory: bool = False) -> None:
    """Make the empty folder of a version, under a hidden name. Replaces one that a stopped attempt left.

    `in_memory`: the hidden name is a link to a folder that `tmpfs` makes; everything else is the same.
    """
    folder = hidden(paths, version)
    tmpfs.delete(folder)
    if in_memory:
        folder.symlink_to(tmpfs.fresh(paths.weights, paths.weights_of(version).name))
    else:
        folder.mkdir(parents=True)


def write(paths: RunPaths, version: int, parts: Mapping[str, Tensors], export: Callable[[Tensors], Tensors]) -> Written:
    """Write safetensors files of a version into its folder. Raises SafetensorError or OSError if the disk is full.

    `parts`: the tensors of each file, in host memory, in the dtype to serve. `export` gives those of a file the names and shapes of
    published checkpoints.
    """
    from safetensors.torch import save_file

    written: Written = {}
    for name, part in parts.items():
        path = hidden(paths, version) / name
        tensors = {key: tensor.detach().contiguous() for key, tensor in export(part).items()}
        save_file(tensors, path, metadata={"format": "pt"})
        written[name] = {"size": path.stat().st_size, "xxh3": _digest(path, tensors)}, list(tensors)
    return written


def _digest(path: Path, tensors: Tensors) -> str:
    """The digest of a file that holds contiguous tensors: of its header, and of the bytes that should follow, from memory."""
    import torch

    places = sorted((entry.begin, name) for name, entry in header(path).items())
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        state.update(file.read(places[0][0]))
    for _, name in places:
        state.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def complete(paths: RunPaths, version: int, written: Sequence[Written], static: ModelFiles) -> None:
    """Add what belongs to the whole version: its small files, the index of several safetensors files, and last the manifest.

    `written`: by every rank that wrote a part. `publish` makes the version visible. Raises OSError if the disk is full.
    """
    folder, small = hidden(paths, version), dict(static.files)
    shards = {name: shard for part in written for name, shard in part.items()}
    files = {name: record for name, (record, _) in shards.items()}
    if len(shards) > 1:
        index = {tensor: name for name, (_, tensors) in shards.items() for tensor in tensors}
        size = sum(record["size"] for record in files.values())
        small[INDEX] = json.dumps({"metadata": {"total_size": size}, "weight_map": index}).encode()
    for name, content in small.items():
        (folder / name).write_bytes(content)
        files[name] = {"size": len(content), "xxh3": xxhash.xxh3_64_hexdigest(content)}
    (folder / COMPLETE).write_text(json.dumps({"version": version, "files": files, **static.facts}))


def publish(paths: RunPaths, version: int) -> None:
    """Make a written version visible. Replaces the one of an earlier attempt, or one in memory."""
    final = paths.weights_of(version)
    if final.is_symlink():
        final.unlink()  # a server may still read its target, which `tmpfs.clear` deletes
    else:
        shutil.rmtree(final, ignore_errors=True)
    hidden(paths, version).rename(final)


def hidden(paths: RunPaths, version: int) -> Path:
    """The folder of a version that is being written."""
    final = paths.weights_of(version)
    return final.with_name(f".{final.name}.writing")
