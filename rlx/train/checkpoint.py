"""The trainer's state on disk: weights, optimizer state, progress and random states, by torch.distributed.checkpoint (DCP).

Every rank writes its shards; any number of ranks can read them. Weights and optimizer state keep their own precision, so a resumed run
computes the same bits. If adapters are trained, the weights are these alone, with name and digest of their model.
Learning rates are not stored: they follow from the configuration and the number of updates.
This module handles tensors in one folder. `rlx.checkpoints` coordinates the roles.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from rlx.models.load import check_packed_forward
from rlx.parallel.mesh import Mesh
from rlx.train.step import PolicyTrainer

# DCP warns about a single process without a process group; here that is a normal case.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized", category=UserWarning)

log = logging.getLogger("rlx.trainer")

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class TrainerProgress:
    """The progress of training."""

    step: int  # training steps done: the policy's version
    updates: int  # optimizer steps done; the learning rate follows from it


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, writer: Writer, mesh: Mesh, copied: Future[None] | None = None, written: Future[Any] | None = None) -> None:
        self._writer, self._mesh, self._copied, self._written = writer, mesh, copied, written

    def wait_copied(self) -> None:
        """Return when the trainer may change its state. Raises any error of the copy."""
        if self._copied is not None:
            self._copied.result()

    @property
    def done(self) -> bool:
        """Whether every rank has written its part."""
        return self._written is None or self._written.done()

    def files(self) -> dict[str, dict[str, Any]]:
        """On rank 0, wait until everything is written and return `{name: {"size": bytes, "xxh3": digest}}`. Other ranks return {}.

        Raises the error of the lowest rank that failed to write.
        """
        if self._written is not None:
            with _plain_errors(self._mesh):
                self._written.result()
        return self._writer.files


@dataclass(frozen=True)
class Part(WriteResult):
    """What DCP tells rank 0 of a written tensor, with the record of its file: reading a checkpoint, DCP does not notice a damaged byte."""

    file: dict[str, Any]


class Writer(dcp.FileSystemWriter):
    """DCP's writer. On rank 0 it also has the size and digest of every file, once all ranks have written."""

    def __init__(self, folder: Path, digest: Callable[[Path], str], **options: Any) -> None:
        super().__init__(folder, overwrite=False, **options)
        self._folder, self._digest = folder, digest
        self.files: dict[str, dict[str, Any]] = {}

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's files."""
        written: Any = super().write_data(plan, planner)
        parts = written.wait()
        records = {name: self._record(name) for name in {part.storage_data.relative_path for part in parts}}
        told: Any = torch.futures.Future()
        told.set_result([Part(**vars(part), file=records[part.storage_data.relative_path]) for part in parts])
        return told

    def finish(self, metadata: Any, results: Any) -> None:
        """On rank 0, write what describes all files."""
        super().finish(metadata, results)
        found = {part.storage_data.relative_path: part.file for part in chain.from_iterable(results)}
        self.files = dict(sorted((found | {METADATA: self._record(METADATA)}).items()))

    def _record(self, name: str) -> dict[str, Any]:
        return {"size": (self._folder / name).stat().st_size, "xxh3": self._digest(self._folder / name)}


class Saver:
    """Writes the state of one trainer, any number of times. Every rank of the mesh has a Saver and makes the same calls."""

    def __init__(self, trainer: PolicyTrainer, digest: Callable[[Path], str], *, in_background: bool = False) -> None:
        """`digest`: of a file, for `Saving.files`. `in_background` needs memory for a second copy of the state."""
        self.trainer, self.mesh, self._digest = trainer, trainer.mesh, digest
        cuda = trainer.device.type == "cuda"
        options = StagingOptions(use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=cuda)
        self._stager = DefaultStager(options) if in_background else None
        self._group = trainer.mesh.background_group() if in_background else None

    def save(self, folder: Path, progress: TrainerProgress) -> Saving:
        """Write the state into `folder`, which must be empty or absent: in the background if so configured, otherwise before returning."""
        state = _state_of(self.trainer, progress)
        # In the background, DCP's loader for devices would wait for the training's work; the stager has copied everything.
        writer = Writer(folder, self._digest, **({} if self._stager is None else {"per_thread_copy_ahead": 0}))
        if self._stager is None:
            with _plain_errors(self.mesh):
                dcp.save(state, storage_writer=writer, no_dist=not self.mesh.is_distributed)
            return Saving(writer, self.mesh)
        self.mesh.synchronize()  # the stager copies on its own stream, which does not wait for the optimizer's
        response: Any = dcp.async_save(
            state, storage_writer=writer, async_stager=self._stager, process_group=self._group, no_dist=not self.mesh.is_distributed
        )
        return Saving(writer, self.mesh, response.staging_completion, response.upload_completion)

    def close(self) -> None:
        """Release the background's memory, threads and connections. Every rank calls this, when everything is written."""
        if self._stager is not None:
            self._stager.close()
            group, self._group = self._group, None
            self.mesh.end_background(group)


def load(folder: Path, trainer: PolicyTrainer, *, alone: bool = True) -> TrainerProgress:
    """Load the state in `folder` into a trainer of the same model and optimizer, on any number of ranks. Every rank calls this.

    Random states are restored if the number of ranks is the same and the trainer is `alone`. If no reference was saved, it never moved, so
    a reference that follows the policy starts as the initial policy.
    `alone`: whether the process trains nothing else. Otherwise its random state, which is of all runs, stays as it is, and the model's
    packed forward is not checked, because a model with several adapters has passed that when it was loaded.
    Raises ValueError if the state belongs to another model or optimizer, if it holds a moved reference that this trainer
    would ignore, or if the model fails `check_packed_forward`.
    """
    reader = Reader(folder)
    stored = reader.read_metadata().state_dict_metadata
    state = _state_of(trainer, TrainerProgress(0, 0))
    stateless = _without_state(state, stored)
    moved = any(name.startswith("reference.") for name in stored)
    reference = trainer.reference
    if moved and reference is not None and reference.sync_interval is None and not reference.teacher:
        raise ValueError(
            f"the reference in {folder} followed the policy, but ref.sync_interval=null makes it the initial policy. Set it to the "
            "steps between two updates, as before; more than max_steps keeps the reference where it is"
        )
    if not moved and state["reference"]:
        log.info("the reference starts as the initial policy, because %s has no reference that followed the policy", folder)
        state["reference"] = {}
    mesh = trainer.mesh
    if alone and f"random.{mesh.world_size - 1}" in stored and f"random.{mesh.world_size}" not in stored:
        entry: Any = stored[f"random.{mesh.rank}"]
        state["random"] = {str(mesh.rank): torch.empty(entry.size, dtype=torch.uint8)}
    else:
        state["random"] = {}
    try:
        with _plain_errors(mesh):
            dcp.load(state, storage_reader=reader, planner=Planner(), no_dist=not mesh.is_distributed)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(
            f"the checkpoint {folder} does not fit this model and optimizer: {error}. "
            "Resume with the model.*, lora.* and optim._target_ that it has"
        ) from error
    unused = sorted(name for name in stored if name.startswith("model.") and name.removeprefix("model.") not in state["model"])
    if unused:
        raise ValueError(
            f"the checkpoint {folder} has {len(unused)} weights that this model lacks: {', '.join(unused[:3])}. Resume with the model.* "
            "and lora.* that it has; if its head was not tied to the embedding, set tie_word_embeddings to false in the model's config.json"
        )
    parameters = dict(trainer.model.named_parameters())
    for name in stateless:
        trainer.optimizer.state.pop(parameters[name], None)
    for packed in state["random"].values():
        _set_random_state(packed)
    progress = TrainerProgress(**state["progress"])
    trainer.updates = progress.updates
    told_by = "digest" if state["base"].get("dtype") == trainer.model.base.get("dtype") else "name"  # rounded weights have another digest
    if state["base"].get(told_by) != trainer.model.base.get(told_by):
        raise ValueError(
            f"the adapters in {folder} belong to another model: they were trained beside {state['base']['name']} (digest "
            f"{state['base']['digest']}), not {trainer.model.base['name']} ({trainer.model.base['digest']}). Resume with the same model.*"
        )
    if alone:
        check_packed_forward(trainer.model, trainer.device)
    if trainer.losses.adapts:  # otherwise beta comes from the configuration
        trainer.losses.load_state_dict(state["objective"])
    return progress


def _without_state(state: dict[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """Take out of a fresh `state` what a checkpoint rightly lacks: the optimizer's state of parameters that never had a gradient.

    Returns their names. The optimizer of a run that never stopped has none for them, either. Nothing is taken out if the checkpoint lacks
    the parameter itself, or has no optimizer's state at all: then loading says what does not fit.
    """
    kept = {name.removeprefix("optimizer.").rpartition(".")[0] for name in stored if name.startswith("optimizer.")}
    there = {name for name in state["optimizer"] if f"model.{name.removeprefix('hf.')}" in stored}
    found = [name for name, entry in state["optimizer"].items() if entry and kept and name in there and name not in kept]
    for name in found:
        del state["optimizer"][name]
    return found


def _state_of(trainer: PolicyTrainer, progress: TrainerProgress) -> dict[str, Any]:
    """The tensors themselves, not copies, because loading writes into them. Creates the state of an optimizer that has made no step yet."""
    fresh = not trainer.optimizer.state
    optimizer = get_optimizer_state_dict(trainer.model, trainer.optimizer)["state"]
    for state in trainer.optimizer.state.values() if fresh else ():
        if torch.is_tensor(state.get("step")):
            state["step"].zero_()  # torch creates the state by a step without gradients, and counts it
    moving = trainer.reference is not None and trainer.reference.sync_interval is not None
    return {
        "model": dict(trainer.model.named_weights()),
        "base": dict(trainer.model.base),
        "optimizer": optimizer,
        "reference": dict(trainer.reference.model.named_weights()) if trainer.reference is not None and moving else {},
        "objective": trainer.losses.state_dict(),
        "progress": asdict(progress),
        "random": {str(trainer.mesh.rank): _random_state()},
    }


def _random_state() -> torch.Tensor:
    """The state of every random generator of this process, as bytes: [n] uint8."""
    generator: Any = np.random.get_state()
    algorithm, keys, *rest = generator
    state = {"python": random.getstate(), "numpy": (algorithm, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    content = io.BytesIO()
    torch.save(state, content)
    return torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)


def _set_random_state(packed: torch.Tensor) -> None:
    try:
        state = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    except Exception as error:  # torch's reader raises many types
        raise ValueError("the random states of the checkpoint are of another version of rlx, so it cannot be resumed") from error
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


@contextlib.contextmanager
def _plain_errors(mesh: Mesh) -> Iterator[None]:
    """Raise the error of the lowest rank that failed, instead of DCP's collection, which is not an Exception."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        cause.add_note(f"on rank {rank} of {mesh.world_size}")
        raise cause from error


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
