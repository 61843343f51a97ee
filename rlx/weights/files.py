"""Policy versions as Hugging Face folders: written whole or not at all, with a manifest that proves each byte.

`weights/step_13/` holds safetensors under Hugging Face's names, the model's configuration and tokenizer, and last of all `COMPLETE`:
`{"version": 13, "files": {name: {"size": bytes, "xxh3": hex digest}}, "tensors": {name: {"shape", "dtype", "sum"}}}`, the sums of
`rlx.weights.attest`, from the trainer's memory. Anything that loads a Hugging Face model loads it.
Reading, checking and pruning need no torch; writing imports it. Knows nothing of who reads the folders.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from rlx.paths import COMPLETE, RunPaths

if TYPE_CHECKING:
    import torch

    from rlx.models.policy import PolicyModel
    from rlx.parallel.mesh import Mesh

SHARD_BYTES = 5 * 2**30  # a safetensors file grows no larger, except for a single larger tensor
CHUNK = 1 << 20  # bytes read at a time when checking
# What besides weights belongs to a model folder: configuration, tokenizer, chat template, code.
STATIC = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")


class WeightsError(ValueError):
    """A weights folder is not what its manifest says."""


# reading


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face model folder that make up the model, as transformers chooses them.

    `model.safetensors`, or the files that `model.safetensors.index.json` names, or `model*.safetensors`. Others may lie beside them: the
    same weights once more, under the names of their makers (`consolidated.safetensors`).
    Raises ValueError where there are none, FileNotFoundError where the index names a file that is not there.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of weights: {type(error).__name__}: {error}") from error
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise FileNotFoundError(f"{index} names files that are not there: {', '.join(missing)}; fetch the model again")
        return [folder / name for name in names]
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        others = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))) or "none at all"
        raise ValueError(f"{folder} holds no model*.safetensors (of other safetensors files: {others})")
    return files


def verify(path: Path) -> dict[str, Any]:
    """Check every file of a version against its manifest and return the manifest.

    Raises WeightsError naming the file, what was expected and what was found.
    """
    marker = path / COMPLETE
    if not marker.is_file():
        raise WeightsError(f"{path}: no file {COMPLETE}; the folder was not finished, or is no weights folder")
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
        if (digest := _digest(file)) != expected["xxh3"]:
            raise WeightsError(f"{file}: expected checksum {expected['xxh3']}, found {digest}; its {size} bytes are damaged")
    return manifest


def versions(paths: RunPaths) -> list[int]:
    """Complete policy versions on disk, oldest first."""
    found = []
    for path in paths.weights.glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdecimal() and (path / COMPLETE).is_file():
            found.append(int(number))
    return sorted(found)


def latest_version(paths: RunPaths) -> int | None:
    """The newest complete policy version on disk; None where there is none."""
    return max(versions(paths), default=None)


def prune(paths: RunPaths, keep_last: int, protect: Collection[int] = ()) -> list[int]:
    """Delete all but the newest `keep_last` versions and those in `protect`; returns what was deleted.

    A folder vanishes at once (it is renamed first), so nobody finds half a version.
    """
    assert keep_last >= 1, keep_last
    gone = [version for version in versions(paths)[:-keep_last] if version not in protect]
    for version in gone:
        path = paths.weights_of(version)
        doomed = path.with_name(f".{path.name}.deleted.{os.getpid()}")
        path.rename(doomed)
        shutil.rmtree(doomed)
    return gone


def _digest(path: Path) -> str:
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
    return state.hexdigest()


# writing


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Everything of a model folder that does not change while training, by file name."""

    files: Mapping[str, bytes]

    @classmethod
    def read(cls, source: str, hf: Any, dtype: str, *, trust_remote_code: bool = False) -> ModelFiles:
        """Of the model at `source` (folder or hub name); its configuration from `hf`, with the dtype that versions are saved in."""
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
            config.save_pretrained(folder)
            return cls({file.name: file.read_bytes() for file in sorted(folder.iterdir())})


def save_weights(model: PolicyModel, mesh: Mesh, paths: RunPaths, version: int, static: ModelFiles, dtype: torch.dtype) -> Path:
    """Write `weights/step_{version}` whole, weights in `dtype`. Every rank calls this; rank 0 writes."""
    write_weights(model, mesh, paths, version, static, dtype)
    if mesh.first:
        publish(paths, version)
    return paths.weights_of(version)


def write_weights(model: PolicyModel, mesh: Mesh, paths: RunPaths, version: int, static: ModelFiles, dtype: torch.dtype) -> None:
    """Write everything of a version under a hidden name, one shard in memory at a time; `publish` makes it appear.

    Every rank calls this. Returns when the folder is complete (rank 0) or this rank's part is given (others).
    """
    from safetensors.torch import save_file

    from rlx.weights.attest import facts

    temporary = _hidden(paths, version)
    if mesh.first:
        shutil.rmtree(temporary, ignore_errors=True)  # of an attempt that was stopped
        temporary.mkdir(parents=True)
    index: dict[str, str] = {}
    trained: dict[str, dict[str, Any]] = {}
    files = _shards(model, dtype)
    for number, shard in enumerate(files):
        name = "model.safetensors" if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        tensors = {}
        for key in shard:
            tensor = _gathered(shard[key])
            if mesh.first:
                tensors[key] = tensor.to(device="cpu", dtype=dtype if tensor.is_floating_point() else None).contiguous()
        if mesh.first:
            exported = _exported(model.hf, tensors)
            save_file(exported, temporary / name, metadata={"format": "pt"})
            index |= dict.fromkeys(exported, name)
            trained |= {key: facts(tensor) for key, tensor in exported.items()}
    if mesh.first:
        if len(files) > 1:
            size = sum(file.stat().st_size for file in temporary.iterdir())
            (temporary / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}))
        for name, content in static.files.items():
            (temporary / name).write_bytes(content)
        manifest = {file.name: {"size": file.stat().st_size, "xxh3": _digest(file)} for file in sorted(temporary.iterdir())}
        (temporary / COMPLETE).write_text(json.dumps({"version": version, "files": manifest, "tensors": trained}))


def publish(paths: RunPaths, version: int) -> None:
    """Make a version that was written appear, in place of one that an earlier attempt made."""
    final = paths.weights_of(version)
    shutil.rmtree(final, ignore_errors=True)
    _hidden(paths, version).rename(final)


def _hidden(paths: RunPaths, version: int) -> Path:
    final = paths.weights_of(version)
    return final.with_name(f".{final.name}.writing")


def _shards(model: PolicyModel, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Named weights in runs of at most SHARD_BYTES; all in one where names or shapes change on export."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    one_file = bool(get_model_conversion_mapping(model.hf, add_legacy=False))
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in model.named_weights():
        more = tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.dtype.itemsize)
        if shards[-1] and size + more > SHARD_BYTES and not one_file:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += more
    return shards


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor: every rank takes part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # a DTensor; importing the class takes seconds


def _exported(hf: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names and shapes of published checkpoints (transformers fuses experts when it loads some models)."""
    from transformers.core_model_loading import revert_weight_conversion

    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(hf, tensors).items()}
