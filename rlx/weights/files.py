"""Policy versions as Hugging Face folders, written whole or not at all, with a manifest that proves each byte.

`weights/step_13/` holds safetensors under Hugging Face's names, the model's configuration and tokenizer, and, written last, `COMPLETE`:
`{"version": 13, "files": {name: {"size", "xxh3"}}, "tensors": {name: {"shape", "dtype", "sum"}}}`. Any program that loads Hugging Face
models can load it. If adapters are trained, it is a PEFT folder instead: `adapter_model.safetensors` and `adapter_config.json`, and the
manifest has `"base": {"name", "identity"}` of the model that they belong to. `"untrained": [name, …]` are tensors of the
initial model's files that versions do not have, if there are any.

Each tensor has one checksum, its sum (`sums.py`), because all three users can compute it. The trainer sums its memory, which also catches
write errors. A server sums the files as it reads them, before it pauses. Its engine sums the parameters that it serves, where they lie.
Only the header of a safetensors file has a digest too (`"header": {"size", "xxh3"}`). Small files have one digest of all their bytes.
Reading, checking and pruning need no torch; writing imports it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from rlx.paths import COMPLETE, RunPaths, listed
from rlx.weights import spare, tmpfs
from rlx.weights.sums import sum_of_file

if TYPE_CHECKING:
    import torch

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # of a PEFT folder
IDENTIFYING = 4096  # bytes of each tensor
CHUNK = 1 << 20  # bytes read at a time when checking
THREADS = 4  # that check a large file
ALONE = 1 << 26  # bytes below which one thread is faster
# The files of a model folder besides weights: configuration, tokenizer, chat template, code.
STATIC = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py")


class WeightsError(ValueError):
    """A weights folder does not match its manifest."""


# reading


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face model folder that make up the model, as transformers chooses them.

    These are `model.safetensors`, or the files named by `model.safetensors.index.json`, or `model*.safetensors`. Others beside them are
    ignored: they hold the same weights under their original names (`consolidated.safetensors`).
    Raises ValueError if there are none, FileNotFoundError if the index names a missing file.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of weights: {type(error).__name__}: {error}") from error
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise FileNotFoundError(f"{index} names missing files: {', '.join(missing)}; fetch the model again")
        return [folder / name for name in names]
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        others = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))) or "none at all"
        raise ValueError(f"{folder} holds no model*.safetensors (other safetensors files: {others})")
    return files


def header(path: Path) -> tuple[dict[str, Any], int]:
    """The tensors of a safetensors file by name (`dtype`, `shape`, `data_offsets`), and the byte where their values begin.

    The file starts with the length of its header (8 bytes, little endian) and the JSON header. Offsets count from the header's end.
    Raises ValueError if the file is not in this format, or not as long as its header says.
    """
    with path.open("rb") as file:
        start = file.read(8)
        size = struct.unpack("<Q", start)[0] if len(start) == 8 else path.stat().st_size
        text = file.read(size) if size < path.stat().st_size else b""
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        end = 8 + size + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        for entry in entries.values():
            tuple(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a safetensors file, or was cut short") from error
    if end != path.stat().st_size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, but its header says {end}")
    return entries, 8 + size


def identity(folder: Path) -> str:
    """Tells a model's weights from others, at no cost: a digest of all names, shapes and dtypes, and of the beginning of every tensor.

    It is the same however the weights are divided into files. Damage may go unnoticed. Raises as `weight_files` and `header`.
    """
    tensors = {
        name: (path, begin, entry) for path in weight_files(folder) for entries, begin in [header(path)] for name, entry in entries.items()
    }
    beginnings: dict[str, bytes] = {}
    by_place = sorted(tensors.items(), key=lambda item: (item[1][0], item[1][2]["data_offsets"]))
    for path, parts in itertools.groupby(by_place, key=lambda item: item[1][0]):
        with path.open("rb", buffering=0) as file:
            for name, (_, begin, entry) in parts:
                start, end = entry["data_offsets"]
                file.seek(begin + start)
                beginnings[name] = file.read(min(end - start, IDENTIFYING))
    state = xxhash.xxh3_64()
    for name, (_, _, entry) in sorted(tensors.items()):
        state.update(f"{name} {entry['dtype']} {entry['shape']}".encode())
        state.update(beginnings[name])
    return state.hexdigest()


def verify(path: Path, *, tensors: bool = True, digests: bool = True) -> dict[str, Any]:
    """Check every file of a version against its manifest and return the manifest.

    Without `tensors`, the values of tensors with a checksum of their own are left to whoever reads them. Without `digests`, only names and
    sizes are checked, because reading a large checkpoint takes minutes.
    Raises WeightsError naming the file, what was expected and what was found.
    """
    marker = path / COMPLETE
    if not marker.is_file():
        raise WeightsError(tmpfs.lost(path) or f"{path}: no file {COMPLETE}; the folder was not finished, or is not a weights folder")
    try:
        manifest = json.loads(marker.read_text())
        files: Mapping[str, Any] = manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{marker}: not a manifest ({error})") from error
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise WeightsError(f"{file}: expected {expected['size']} bytes, found no such file")
        if (size := file.stat().st_size) != expected["size"]:
            raise WeightsError(f"{file}: expected {expected['size']} bytes, found {size}")
        if not digests:
            continue
        if "header" in expected:
            _verify_header(file, expected["header"])
            if tensors:
                _verify_tensors(file, manifest["tensors"])
        elif (digest := _digest(file)) != expected["xxh3"]:
            raise WeightsError(f"{file}: expected checksum {expected['xxh3']}, found {digest}; its {size} bytes are damaged")
    return manifest


def _verify_header(file: Path, expected: Mapping[str, Any]) -> None:
    """Check the header of a safetensors file by its digest."""
    if (digest := _digest(file, expected["size"])) != expected["xxh3"]:
        raise WeightsError(f"{file}: expected checksum {expected['xxh3']}, found {digest}; its header is damaged")


def _verify_tensors(file: Path, tensors: Mapping[str, Any]) -> None:
    """Check the tensors of a safetensors file by their sums."""
    entries, begin = header(file)

    def check(name: str) -> None:
        start, end = entries[name]["data_offsets"]
        with file.open("rb", buffering=0) as content:
            content.seek(begin + start)
            if (found := sum_of_file(content, end - start)) != tensors[name]["sum"]:
                raise WeightsError(f"{file}: expected checksum {tensors[name]['sum']}, found {found}; the tensor {name} is damaged")

    if file.stat().st_size < ALONE:
        for name in entries:
            check(name)
    else:
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "verify") as pool:  # numpy sums without Python's lock
            for _ in pool.map(check, entries):
                pass


def versions(weights: Path) -> list[int]:
    """The complete policy versions in a folder of weights, oldest first."""
    found = []
    for path in weights.glob("step_*"):
        number = path.name.removeprefix("step_")
        try:
            if number.isdecimal() and listed(path / COMPLETE):
                found.append(int(number))
        except PermissionError:
            if not path.is_symlink():  # else it is in the memory of another user's run, as `tmpfs.lost` says
                raise
    return sorted(found)


def lasts(paths: RunPaths, version: int) -> bool:
    """Whether a version is complete and on the disk: one in memory ends with the run."""
    return version in versions(paths.weights) and not paths.weights_of(version).is_symlink()


def latest_version(paths: RunPaths) -> int | None:
    """The newest complete policy version on disk; None without one."""
    return max(versions(paths.weights), default=None)


def prune(paths: RunPaths, keep_last: int, protect: Collection[int] = (), *, reuse: bool = False) -> list[int]:
    """Delete all versions except the newest `keep_last` and those in `protect`. Returns the deleted versions.

    A folder is renamed before it is deleted, so no reader finds half a version.
    With `reuse`, the next version may overwrite its large files (`spare`): only for the thread that writes versions, as others prune, too.
    """
    assert keep_last >= 1, keep_last
    gone = [version for version in versions(paths.weights)[:-keep_last] if version not in protect]
    for version in gone:
        path = paths.weights_of(version)
        doomed = path.with_name(f".{path.name}.deleted.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):  # another process prunes, too
            path.rename(doomed)
            if reuse:
                spare.keep(doomed, [file.name for file in doomed.glob("*.safetensors") if file.stat().st_size >= ALONE])
            else:
                tmpfs.delete(doomed)
    return gone


def _digest(path: Path, size: int | None = None) -> str:
    """The digest of the file's first `size` bytes; None: of all bytes."""
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK if size is None else min(CHUNK, size)):
            state.update(chunk)
            size = None if size is None else size - len(chunk)
    return state.hexdigest()


# writing


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model folder that do not change during training, by file name."""

    files: Mapping[str, bytes]
    base: Mapping[str, str] | None = None  # of adapters: `name` and `identity` of their model
    untrained: Sequence[str] = ()  # tensors of the initial model's files that no version has (`rlx.weights.untrained`)

    @classmethod
    def read(cls, source: str, hf: Any, dtype: str, *, trust_remote_code: bool = False) -> ModelFiles:
        """Read the model at `source` (folder or hub name). The configuration comes from `hf`, with the dtype of saved versions."""
        from transformers import AutoTokenizer

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if Path(source).is_dir():
                for pattern in STATIC:
                    for file in Path(source).glob(pattern):
                        if not file.name.endswith(".safetensors.index.json"):
                            shutil.copyfile(file, folder / file.name)
            else:
                AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code).save_pretrained(folder)
                hf.generation_config.save_pretrained(folder)
            config = copy.deepcopy(hf.config)
            config.dtype, config.architectures = dtype, [type(hf).__name__]
            if hasattr(config, "quantization_config"):  # the model was read without it: versions hold plain weights
                del config.quantization_config
            config.save_pretrained(folder)
            return cls({file.name: file.read_bytes() for file in sorted(folder.iterdir())})

    @classmethod
    def of_adapters(cls, config: Mapping[str, Any], model: Path) -> ModelFiles:
        """The one file beside the adapters of a PEFT folder, for the model in the folder `model`."""
        base = {"name": config["base_model_name_or_path"], "identity": identity(model)}
        return cls({ADAPTER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()}, base)

    def with_chat_template(self, path: Path) -> ModelFiles:
        """These files with another chat template. `chat_template.jinja` wins over the one in `tokenizer_config.json`."""
        return replace(self, files={**self.files, "chat_template.jinja": path.read_bytes()})


Tensors = dict[str, "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Written:
    """The part of a manifest that one rank writes."""

    files: dict[str, dict[str, Any]]  # `size` and `header` of each safetensors file
    tensors: dict[str, dict[str, Any]]  # `shape`, `dtype` and `sum` of each published tensor
    index: dict[str, str]  # the file of each published tensor


def begin(paths: RunPaths, version: int, *, in_memory: bool = False) -> None:
    """Make the empty folder of a version, under a hidden name. Replaces one that a stopped attempt left.

    `in_memory`: the hidden name is a link to a folder that `tmpfs` makes; everything else is the same.
    """
    folder = hidden(paths, version)
    abandon(paths, version)
    if in_memory:
        folder.symlink_to(tmpfs.fresh(paths.weights, paths.weights_of(version).name))
    else:
        folder.mkdir(parents=True)


def write(paths: RunPaths, version: int, parts: Mapping[str, Tensors], export: Callable[[Tensors], Tensors]) -> Written:
    """Write safetensors files of a version into its folder. Raises OSError if the disk is full.

    `parts`: the tensors of each file, in host memory, in the dtype to serve. `export` gives those of a file the names and shapes of
    published checkpoints.
    """
    from rlx.weights.saving import save

    written = Written({}, {}, {})
    for name, part in parts.items():
        path = hidden(paths, version) / name
        spare.take(path)
        written.files[name], found = save({key: tensor.contiguous() for key, tensor in export(part).items()}, path)
        written.tensors.update(found)
        written.index.update(dict.fromkeys(found, name))
    return written


def complete(paths: RunPaths, version: int, written: Sequence[Written], static: ModelFiles) -> None:
    """Add what belongs to the whole version: its small files, the index of several safetensors files, the manifest, which is the last.

    `written`: of every rank that wrote a part. `publish` makes the version visible. Raises OSError if the disk is full.
    """
    folder = hidden(paths, version)
    manifest = {name: record for part in written for name, record in part.files.items()}
    tensors = {name: record for part in written for name, record in part.tensors.items()}
    small = dict(static.files)
    if len(manifest) > 1:
        size = sum(record["size"] for record in manifest.values())
        index = {name: file for part in written for name, file in part.index.items()}
        small["model.safetensors.index.json"] = json.dumps({"metadata": {"total_size": size}, "weight_map": index}).encode()
    for name, content in small.items():
        (folder / name).write_bytes(content)
        manifest[name] = {"size": len(content), "xxh3": xxhash.xxh3_64_hexdigest(content)}
    more: dict[str, Any] = {} if static.base is None else {"base": dict(static.base)}
    more |= {"untrained": list(static.untrained)} if static.untrained else {}
    (folder / COMPLETE).write_text(json.dumps({"version": version, "files": manifest, "tensors": tensors, **more}))


def publish(paths: RunPaths, version: int) -> None:
    """Make a written version visible. Replaces the one of an earlier attempt, or one in memory."""
    final = paths.weights_of(version)
    if final.is_symlink():
        final.unlink()  # a server may still read what it leads to, which `tmpfs.clear` deletes
    else:
        shutil.rmtree(final, ignore_errors=True)
    hidden(paths, version).rename(final)


def abandon(paths: RunPaths, version: int) -> None:
    """Delete a version that was not published."""
    folder = hidden(paths, version)
    if folder.is_symlink():
        tmpfs.delete(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def hidden(paths: RunPaths, version: int) -> Path:
    """The folder of a version that is being written."""
    final = paths.weights_of(version)
    return final.with_name(f".{final.name}.writing")
