"""Reads a checkpoint into a model that is still on the meta device: every rank reads its own shards from the files, and nothing else.

Rows are read straight into the memory that keeps them; safetensors' own slices would map the file, or read whole tensors. transformers maps
stored names, layouts and dtypes as in `from_pretrained`, and computes what no checkpoint has (the rotary tables).

A sharded read is exact only if rows 0 … n of a parameter need nothing but rows 0 … n of what is stored. Where a family fuses or splits
stored tensors along the rows, and for files other than safetensors and for quantized weights, rank 0 reads everything and sends it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import resource
from collections.abc import Iterator
from io import FileIO
from typing import Any
from unittest import mock

import torch
import transformers.core_model_loading
import transformers.modeling_utils
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
    set_param_for_module,
)
from transformers.modeling_utils import LoadStateDictConfig, str_to_torch_dtype
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from rlx.config.memory import size
from rlx.models.lora import PARAMETERS
from rlx.parallel.mesh import Mesh

log = logging.getLogger("rlx.trainer")

# Why a checkpoint is read whole, and what helps.
NO_SAFETENSORS = "it has no safetensors files"
QUANTIZED = "its weights are quantized"
IN_ANOTHER_LAYOUT = "is stored in another layout"
REMEDIES = {
    NO_SAFETENSORS: 'Convert it once, `AutoModelForCausalLM.from_pretrained("{source}", dtype="auto").save_pretrained(FOLDER)`, save its '
    "tokenizer there too, and set model.name=FOLDER",
    QUANTIZED: "Set model.name to a version of the model with plain safetensors",
    IN_ANOTHER_LAYOUT: "Checkpoints of this family are stored so, and no key avoids it: the host of rank 0 needs that much free memory",
}
OTHER_FILES = 512  # that this process may have open beside the weights
BEGINNING = 4096  # bytes of each tensor that tell whether two hosts have the same files


def read_weights(hf: Any, source: str, mesh: Mesh, device: torch.device, *, trust_remote_code: bool = False) -> None:
    """Fill `hf`, a transformers model on the meta device, whole or sharded by FSDP, from a folder or hub name. Tensors go to `device`.

    Adapters are left uninitialised. Every rank calls this. Raises ValueError if the checkpoint lacks weights of the model, or has them
    quantized.
    """
    with _kept_where_read(mesh.grouped and device.type != mesh.device.type):
        _read(hf, source, mesh, device, trust_remote_code)


@contextlib.contextmanager
def _kept_where_read(elsewhere: bool) -> Iterator[None]:
    """`elsewhere`: shards stay in host memory although their mesh is of GPUs. transformers' own function would move them to the mesh."""

    def wrapped(local: torch.Tensor, like: DTensor) -> DTensor:
        return DTensor(local.contiguous(), like._spec, requires_grad=local.requires_grad)

    with contextlib.ExitStack() as patched:
        for user in (transformers.core_model_loading, transformers.modeling_utils) if elsewhere else ():
            patched.enter_context(mock.patch.object(user, "_dtensor_from_local_like", wrapped))
        yield


def _read(hf: Any, source: str, mesh: Mesh, device: torch.device, trust_remote_code: bool) -> None:
    mapping: list[Any] = get_model_conversion_mapping(hf)
    with contextlib.ExitStack() as opened:
        stored: dict[str, Stored] = {}
        files = weight_files(source, hf.config)
        _allow_open(len(files))
        for path in files:
            stored |= stored_tensors(opened.enter_context(open(path, "rb", buffering=0)))
        why = None if stored else QUANTIZED if getattr(hf.config, "quantization_config", None) else NO_SAFETENSORS
        converted = _converted(hf, mapping, stored)
        if mesh.grouped and why is None:
            dims = {name: _sharded(tensor) for name, tensor in hf.state_dict().items()}
            moved = (name for name, (parameter, by) in converted.items() if not _keeps_shards(by, dims.get(parameter, set())))
            why = next((f"{name} {IN_ANOTHER_LAYOUT}" for name in moved), None)
        _same_everywhere(stored, str(why), source, mesh)
        _check_plain(source, stored, hf)
        if why is not None:
            if mesh.first:
                log.warning("%s", _about_whole(hf, source, mesh, why))
            _read_whole(hf, source, mesh, device, trust_remote_code)
            return
        plan = hf._get_dtype_plan(hf.dtype)
        loading = LoadStateDictConfig(
            pretrained_model_name_or_path=source, device_map={"": device}, dtype=hf.dtype, dtype_plan=plan, weight_mapping=mapping
        )
        # Not read: adapters, and parameters of which this rank has no row (it may have no expert, and then nothing to merge). Tied ones are
        # read by every rank: transformers compares both matrices across the ranks, unless all of them miss one.
        tied = {*hf.all_tied_weights_keys, *hf.all_tied_weights_keys.values()}
        locals_ = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in hf.state_dict().items()}
        absent = {name for name, tensor in locals_.items() if name.endswith(PARAMETERS) or not (tensor.numel() or name in tied)}
        wanted = {name: part for name, part in stored.items() if name not in converted or converted[name][0] not in absent}
        info, _ = convert_and_load_state_dict_in_model(hf, wanted, loading)
        del hf._weight_conversions  # else versions would be written as this file is, and those of a resumed run as its family usually is
    no_quantizer: Any = None
    for name in absent & info.missing_keys:
        set_param_for_module(hf, name, torch.empty_like(locals_[name], device=device), info, no_quantizer)
    lacking = sorted(hf._finalize_model_loading(hf, loading, info).missing_keys)
    if lacking:
        raise ValueError(f"{source} lacks {len(lacking)} weights of {type(hf).__name__}: {', '.join(lacking[:3])}")


def _about_whole(hf: Any, source: str, mesh: Mesh, why: str) -> str:
    """The warning that a checkpoint is read whole: how much memory that takes, and what helps."""
    bytes_ = sum(p.numel() * p.element_size() for name, p in hf.named_parameters() if not name.endswith(PARAMETERS))  # of all shards
    who = f"rank 0 of {mesh.world_size} reads the whole of {source} and sends the other ranks their shards"
    if mesh.world_size == 1:
        who = f"the whole of {source} is read beside the model"
    remedy = next(text for reason, text in REMEDIES.items() if why.endswith(reason))
    return f"{who}, which takes {size(bytes_)} of host memory more until it is loaded: {why}. {remedy.format(source=source)}"


def empty_weights(hf: Any, device: torch.device) -> None:
    """Leave the weights of a model on the meta device uninitialised, because others follow. Buffers that no checkpoint has are computed."""
    ties = _ties(hf)
    hf.to_empty(device=device)
    _tie(ties)
    for tensor in hf.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    hf.initialize_weights()


def may_be_untied(hf: Any, source: str) -> bool:
    """Whether a checkpoint may have both matrices of a model whose configuration ties them. They may differ."""
    tied = set(hf.all_tied_weights_keys)
    stored: set[str] = set()
    files = weight_files(source, hf.config) if tied else []
    if tied and not files:  # whatever files it has, they are read whole
        return True
    for path in files:
        with open(path, "rb", buffering=0) as file:
            stored.update(stored_tensors(file))
    return bool(tied & stored)


class Stored:
    """A tensor in a safetensors file, of which rows can be read. To transformers it is one of safetensors' slices."""

    def __init__(self, file: FileIO, begin: int, dtype: torch.dtype, shape: list[int]) -> None:
        """`begin`: the position of the first value."""
        self.file, self.begin, self.dtype, self.shape = file, begin, dtype, shape

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        """`[...]`, or a tuple with a slice for each dimension. Raises OSError if the file ends early."""
        rows = range(self.shape[0])[index[0]] if index is not Ellipsis and self.shape else None
        found = torch.empty(self.shape if rows is None else [len(rows), *self.shape[1:]], dtype=self.dtype)
        start = 0 if rows is None or not len(rows) else rows.start * (found.nbytes // len(rows))
        if found.nbytes:
            left: Any = found.reshape(-1).view(torch.uint8).numpy()
            left = memoryview(left)
            while left:
                count = os.preadv(self.file.fileno(), [left], self.begin + start)
                if not count:
                    raise OSError(f"{self.file.name} ends within a tensor; it was cut short")
                left, start = left[count:], start + count
        return found if rows is None else found[(slice(None), *index[1:])]


def stored_tensors(file: FileIO) -> dict[str, Stored]:
    """The tensors of a safetensors file by name. It starts with the length of its JSON header; offsets count from the header's end."""
    size = int.from_bytes(file.read(8), "little")
    entries = json.loads(file.read(size))
    return {
        name: Stored(file, 8 + size + entry["data_offsets"][0], str_to_torch_dtype[entry["dtype"]], entry["shape"])
        for name, entry in entries.items()
        if name != "__metadata__"
    }


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
    with open(index) as file:
        names = sorted(set(json.load(file)["weight_map"].values()))
    return [found for name in names if (found := cached_file(source, name)) is not None]


def _same_everywhere(stored: dict[str, Stored], why: str, source: str, mesh: Mesh) -> None:
    """Raise ValueError on every rank if the files of some rank differ from rank 0's: hosts may have different revisions in their caches.

    Compares `why`, names, shapes, dtypes and the beginning of every tensor.
    """
    if mesh.world_size == 1:
        return
    found = hashlib.blake2b(why.encode(), digest_size=16)
    for name, part in sorted(stored.items(), key=lambda item: (item[1].file.name.rpartition("/")[2], item[1].begin)):  # in the files' order
        length = min(math.prod(part.shape) * part.dtype.itemsize, BEGINNING)
        found.update(f"{name} {part.shape} {part.dtype} ".encode() + os.pread(part.file.fileno(), length, part.begin))
    others = different_from_first(found.hexdigest(), mesh)
    if others:
        raise ValueError(
            f"the files of {source} differ between hosts: those of rank {', '.join(map(str, others))} are not those of rank 0 (of "
            f"{mesh.world_size} ranks). Give every host the same: a folder on a shared file system, or the same revision in its cache"
        )


def different_from_first(value: str, mesh: Mesh) -> list[int]:
    """The ranks whose `value` differs from rank 0's. Every rank calls this, and all get the same."""
    if mesh.world_size == 1:
        return []
    return mesh.where(value.encode() != mesh.broadcast_bytes(value.encode() if mesh.first else None))


def _allow_open(num_files: int) -> None:
    """Let this process have so many more files open, as far as the system's hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else max(soft, min(wanted, hard)), hard))


def _converted(hf: Any, mapping: list[Any], stored: dict[str, Stored]) -> dict[str, tuple[str, WeightConverter]]:
    """The stored tensors that are more than renamed: the first parameter that each becomes a part of, and how."""
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    parameters = hf.state_dict() if converters else {}
    found = {}
    for name in stored if converters else ():
        becomes, pattern = rename_source_key(name, renamings, converters, hf.base_model_prefix, parameters)
        if pattern is not None:
            found[name] = (becomes, by_pattern[pattern])
    return found


def _sharded(tensor: torch.Tensor) -> set[int]:
    """The dimensions over which a parameter is sharded or divided."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return {placement.dim % tensor.ndim for placement in placements if hasattr(placement, "dim")}


def _keeps_shards(converter: WeightConverter, sharded: set[int]) -> bool:
    """Whether a conversion makes any range of the parameter's `sharded` dimensions, and of its rows, from the same range of what is stored.

    FSDP shards rows, dimension 0; of divided parameters it may shard another one.
    """
    fixed = sharded | {0}

    def keeps(operation: Any) -> bool:
        if isinstance(operation, MergeModulelist):  # one stored tensor for each row
            return operation.dim == 0
        if isinstance(operation, Transpose):
            return min(operation.dim0, operation.dim1) >= 1 and not fixed & {operation.dim0, operation.dim1}
        return isinstance(operation, Concatenate | Chunk) and operation.dim >= 1 and operation.dim not in fixed

    return all(map(keeps, converter.operations))


def _check_whole(source: str, full: Any, hf: Any, lacking: list[str]) -> None:
    """Raise ValueError unless `full`, read from `source`, has plain values for the whole of `hf`. `lacking`: what it could not read."""
    if lacking:
        raise ValueError(f"{source} lacks {len(lacking)} weights of {type(hf).__name__}: {', '.join(lacking[:3])}")
    names = hf.state_dict().keys()
    for name, tensor in full.state_dict().items():
        if name not in names or (tensor.is_floating_point() and tensor.element_size() < 2):
            raise _quantized(source, name, tensor.dtype)


def _check_plain(source: str, stored: dict[str, Stored], hf: Any) -> None:
    """Raise ValueError if stored weights are quantized although the configuration does not say so.

    transformers would take their numbers for weights, without the scales beside them.
    """
    floating = {name for name, tensor in hf.state_dict().items() if tensor.is_floating_point()}
    for name, part in stored.items():
        if part.dtype.itemsize < 2 if part.dtype.is_floating_point else name in floating:
            raise _quantized(source, name, part.dtype)


def _quantized(source: str, name: str, dtype: torch.dtype) -> ValueError:
    kind = str(dtype).removeprefix("torch.")
    return ValueError(
        f"the weights of {source} are quantized, and only plain ones can be trained: {name} is {kind}. "
        "Name a version of the model that is not quantized"
    )


def _read_whole(hf: Any, source: str, mesh: Mesh, device: torch.device, trust_remote_code: bool) -> None:
    """The same by way of rank 0, which reads the whole model into host memory."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict  # takes seconds, so not at the top

    full = None
    if mesh.first:  # its error ends the run
        keys: dict[str, Any] = {"dtype": hf.dtype, "trust_remote_code": trust_remote_code, "output_loading_info": True}
        full, info = AutoModelForCausalLM.from_pretrained(source, **keys)
        _check_whole(source, full, hf, sorted(info["missing_keys"]))
    ties = _ties(hf)
    hf.to_empty(device=device)
    if not mesh.any(full is not None and is_untied(full)):
        _tie(ties)
    state = full.state_dict() if full is not None else {}
    if mesh.grouped:
        broadcast = mesh.world_size > 1
        set_model_state_dict(hf, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=False))
    else:
        hf.load_state_dict(state, strict=False)
    values = dict(full.named_buffers()) if full is not None else {}
    for name, buffer in hf.named_buffers():
        value = values[name].to(mesh.device) if full is not None else torch.empty(buffer.shape, dtype=buffer.dtype, device=mesh.device)
        mesh.broadcast(value)
        module, _, attribute = name.rpartition(".")
        setattr(hf.get_submodule(module), attribute, value)


def is_untied(hf: Any) -> bool:
    """Whether a model has its own head although its configuration ties the head to the embedding: its checkpoint has both."""
    head, embedding = hf.get_output_embeddings(), hf.get_input_embeddings()
    return getattr(hf.config.get_text_config(), "tie_word_embeddings", False) and head is not None and head.weight is not embedding.weight


def _tie(ties: list[tuple[nn.Module, str, tuple[nn.Module, str]]]) -> None:
    """Tie again, after `to_empty` gave each name its own tensor."""
    for module, name, parameter_of in ties:
        setattr(module, name, getattr(*parameter_of))


def _ties(hf: nn.Module) -> list[tuple[nn.Module, str, tuple[nn.Module, str]]]:
    """(module, name, (module, name) of its first appearance) of every parameter that appears twice."""
    seen: dict[int, tuple[nn.Module, str]] = {}
    again = []
    for module in hf.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                again.append((module, name, seen[id(parameter)]))
            seen.setdefault(id(parameter), (module, name))
    return again
