"""Reads a checkpoint into a model that is still on the meta device: every rank reads its own shards from the safetensors files, by DCP.

transformers names stored tensors as the model does, and computes what no checkpoint has (the rotary tables). A parameter that a family
fuses or splits (experts) is made of whole stored tensors on every rank, one parameter at a time, and each rank keeps its part.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from rlx.models.lora import PARAMETERS
from rlx.parallel.mesh import Mesh

BLOCK, BLOCKS = 4096, 256  # bytes, and how many of them of each file tell whether two hosts have the same


def read_weights(hf: Any, source: str, mesh: Mesh, device: torch.device) -> None:
    """Fill `hf`, a transformers model on the meta device, whole or sharded by FSDP, from a folder or hub name. Tensors go to `device`.

    Adapters are left uninitialised. Every rank calls this. Raises ValueError if the checkpoint has no plain safetensors, or lacks weights
    of the model, and if hosts have different files.
    """
    files = weight_files(source, hf.config)
    _same_everywhere(files, source, mesh)
    if not files:
        raise ValueError(
            f"{source} has no safetensors files, or quantized weights. Convert it once, `AutoModelForCausalLM.from_pretrained({source!r}, "
            'dtype="auto").save_pretrained(FOLDER)`, save its tokenizer there too, and set model.name=FOLDER'
        )
    _allocate(hf, device)
    parameters = hf.state_dict()
    stored, fused = _targets(hf, files)
    _check_plain(source, files, parameters)
    reader = dcp.HuggingFaceStorageReader(str(Path(files[0]).parent))
    reader.fs = _Chosen(files)
    found = {name: parameters[becomes] for name, becomes in stored.items()}
    dcp.load(found, storage_reader=reader, no_dist=not mesh.is_distributed)
    made = {*stored.values()}
    for becomes, converter in fused.items():
        for name, value in converter.convert(becomes, model=hf, config=hf.config).items():
            _keep_part(parameters[name], value[0] if isinstance(value, list) else value)
            made.add(name)
    made |= {name for name in parameters if name.endswith(PARAMETERS)}
    present = {id(tensor) for name, tensor in hf.state_dict(keep_vars=True).items() if name in made}  # tied ones have several names
    absent = {name for name, tensor in hf.state_dict(keep_vars=True).items() if id(tensor) not in present}
    optional = hf._keys_to_ignore_on_load_missing or ()
    if missing := sorted(name for name in absent if not any(re.search(pattern, name) for pattern in optional)):
        raise ValueError(f"{source} lacks {len(missing)} weights of {type(hf).__name__}: {', '.join(missing[:3])}")
    _compute_the_rest(hf, absent)


def empty_weights(hf: Any, device: torch.device) -> None:
    """Leave the weights of a model on the meta device uninitialised, because others follow. Buffers that no checkpoint has are computed."""
    _allocate(hf, device)
    _compute_the_rest(hf)


def unties(hf: Any, source: str) -> bool:
    """Whether a checkpoint has a head of its own, although the configuration of `hf` ties it to the embedding: both are stored, and differ.

    transformers and vLLM load both then.
    """
    ties = {name: other for name, other in hf.all_tied_weights_keys.items() if name != other}
    files = weight_files(source, hf.config) if ties else []
    where = {becomes: name for name, becomes in _targets(hf, files)[0].items()}
    pairs = [(where[name], where[other]) for name, other in ties.items() if name in where and other in where]
    slices = {name: slice_ for name, slice_ in _slices(files) if any(name in pair for pair in pairs)}
    return any(not torch.equal(slices[one][:], slices[other][:]) for one, other in pairs)


def weight_files(source: str, config: Any) -> list[str]:
    """The safetensors files of a model, as transformers would choose them; none if it has none, or names files of its own."""
    if getattr(config, "transformers_weights", None) or getattr(config, "quantization_config", None):
        return []

    def find(name: str) -> str | None:
        return cached_file(source, name, _raise_exceptions_for_missing_entries=False)

    if (single := find(SAFE_WEIGHTS_NAME)) is not None:
        return [single]
    if (index := find(SAFE_WEIGHTS_INDEX_NAME)) is None:
        return []
    names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    return [found for name in names if (found := cached_file(source, name)) is not None]


def different_from_first(value: str, mesh: Mesh) -> list[int]:
    """The ranks whose `value` differs from rank 0's. Every rank calls this, and all get the same."""
    if mesh.world_size == 1:
        return []
    return mesh.ranks_where(value.encode() != mesh.broadcast_bytes(value.encode() if mesh.first else None))


class _Chosen(FileSystem):
    """DCP's file system, of these files: a folder may have others beside those of the index."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def ls(self, path: Any) -> list[str]:
        return self.files


def _slices(files: list[str]) -> Iterator[tuple[str, Any]]:
    """The stored tensors by name, of which parts can be read."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no mapping
                yield name, file.get_slice(name)


def _targets(hf: Any, files: list[str]) -> tuple[dict[str, str], dict[str, WeightConverter]]:
    """Of each stored tensor the model's name; and what makes the parameters that are more than a renamed tensor, by their first name."""
    mapping: list[Any] = get_model_conversion_mapping(hf)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    parameters = hf.state_dict()
    found: dict[str, str] = {}
    fused: dict[str, WeightConverter] = {}
    for name, slice_ in sorted(_slices(files), key=lambda item: dot_natural_key(item[0])):
        becomes, pattern = rename_source_key(name, renamings, converters, hf.base_model_prefix, parameters)
        if becomes not in parameters and name in parameters:
            becomes, pattern = name, None
        if becomes in parameters and pattern is None:
            found[name] = becomes
        elif becomes in parameters:
            converter = fused.setdefault(becomes, deepcopy(by_pattern[pattern]))
            converter.add_tensor(becomes, name, pattern, partial(slice_.__getitem__, ...))
    return found, fused


def _keep_part(parameter: Tensor, value: Tensor) -> None:
    """Copy the whole of a parameter, or this rank's part of it."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
        return
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    part = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    parameter.to_local().copy_(value[part])


def _same_everywhere(files: list[str], source: str, mesh: Mesh) -> None:
    """Raise ValueError on every rank if the files of some rank differ from rank 0's: hosts may have different revisions in their caches."""
    if mesh.world_size == 1:
        return
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        size = os.path.getsize(path)
        digest.update(f"{Path(path).name} {size} ".encode())
        with open(path, "rb") as file:
            for at in range(0, size, max(BLOCK, size // BLOCKS)):
                file.seek(at)
                digest.update(file.read(BLOCK))
    if others := different_from_first(digest.hexdigest(), mesh):
        raise ValueError(
            f"the files of {source} differ between hosts: those of rank {', '.join(map(str, others))} are not those of rank 0 (of "
            f"{mesh.world_size} ranks). Give every host the same: a folder on a shared file system, or the same revision in its cache"
        )


def _check_plain(source: str, files: list[str], parameters: Mapping[str, Tensor]) -> None:
    """Raise ValueError if stored weights are quantized although the configuration does not say so.

    Their numbers would be taken for weights, without the scales beside them.
    """
    floating = {name for name, tensor in parameters.items() if tensor.is_floating_point()}
    for name, slice_ in _slices(files):
        kind = slice_.get_dtype()
        if kind.startswith(("F8", "F4")) or (name in floating and "F" not in kind):
            raise ValueError(
                f"the weights of {source} are quantized, and only plain ones can be trained: {name} is {kind}. "
                "Name a version of the model that is not quantized"
            )


def _allocate(hf: Any, device: torch.device) -> None:
    """Give a model on the meta device memory, with tied parameters still tied."""
    seen: dict[int, tuple[nn.Module, str]] = {}
    ties = []
    for module in hf.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                ties.append((module, name, seen[id(parameter)]))
            seen.setdefault(id(parameter), (module, name))
    hf.to_empty(device=device)
    for module, name, first in ties:
        setattr(module, name, getattr(*first))


def _compute_the_rest(hf: Any, absent: Collection[str] = ()) -> None:
    """Compute the buffers that no checkpoint has, and what is `absent`; all else is there."""
    for name, tensor in hf.state_dict(keep_vars=True).items():
        tensor._is_hf_initialized = name not in absent
    hf.initialize_weights()
