"""Reads checkpoints that somebody else may have written: DCP unpickles, and a pickle can name any function of any module."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

OF_DCP = "torch.distributed.checkpoint.metadata"
OTHERS = {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"), ("torch", "Size")}
PATHS = {("pathlib", name) for name in ("Path", "PosixPath")}


class _Unpickler(pickle.Unpickler):
    """Of DCP's record of a checkpoint. It makes what DCP writes there, and imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for anything else."""
        if (module, name) in OTHERS | PATHS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == OF_DCP and isinstance(found := vars(dcp.metadata).get(name), type) and found.__module__ == OF_DCP:
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of rlx does, so it is not read")


class Reader(dcp.FileSystemReader):
    """DCP's reader of a folder."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Raises UnpicklingError if the record holds anything but a description of tensors and files."""
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as file:
            found: Metadata = _Unpickler(file).load()
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class Planner(dcp.DefaultLoadPlanner):
    """DCP's planner, which unpickles what is no tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises UnpicklingError for anything but plain data."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)
