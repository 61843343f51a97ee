"""How the trainer publishes a policy version: as files, or from its memory (`transfer.py`). `subscribe.py` is the orchestrator's end.

    step 12 ends      gather(13)  →  the metrics of step 12 are written  →  announce(13, …): the version appears  →  offer(13)

`gather` copies the current weights to host memory: to that of each host's first rank its own share of the files, so that no host holds all
of them if there are several. A thread of each of these writers writes its files and computes digests. That of rank 0 begins the folder,
collects what the others report (or their errors) and completes the version; reports are messages, so a full disk can be reported. Adapters
are small: rank 0 writes them alone. Only one version is written at a time: `gather` waits for the previous one.

Over files, `offer` does nothing. With a transfer it returns when the servers have the version, and only versions that last have files:
those of checkpoints, those that are evaluated and the last one. With `weight_broadcast.folder` the files of all others are in a folder in
memory (`tmpfs.py`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from rlx.config.chat_format import template_path
from rlx.config.memory import versions_in_memory
from rlx.config.schema import Config, PlayRoot, TrainingRoot
from rlx.parallel import mesh as meshes
from rlx.parallel.mesh import Mesh, RankLost
from rlx.paths import RunPaths, listed
from rlx.polling import wait_for
from rlx.weights import files, tmpfs
from rlx.weights.export import Export
from rlx.weights.files import ModelFiles, Tensors
from rlx.weights.hub import fetch
from rlx.weights.shapes import ADAPTER

if TYPE_CHECKING:
    from rlx.config.schema import LoraConfig
    from rlx.models.policy import PolicyModel
    from rlx.models.slots import Slot
    from rlx.weights.transfer import Transfer

FOLDER_TIMEOUT = 180.0  # seconds until another host must see the folder that rank 0 has made; NFS may take 60 by default
LIMIT = 3600.0  # seconds for a report, thus also for what its sender does before: writing tens of GB to a slow disk


class PublishFailed(RuntimeError):
    """A version could not be written; the message says why and what to do."""

    filename: str  # the folder, which tells a user whose disk is full which one


def setup_memory_folder(cfg: TrainingRoot, paths: RunPaths) -> None:
    """Make the run's folder in memory, if the configuration has one. Rank 0 calls this before it loads anything.

    Deletes that of an attempt that was killed. Raises OSError if the versions do not fit.
    """
    tmpfs.clear(paths.weights)
    if cfg.memory_folder is not None:
        tmpfs.make(paths.weights, cfg.memory_folder, versions_in_memory(cfg))


class Publisher:
    """The versions of one run. Every rank has a Publisher and makes the same calls; some ranks write."""

    transfer: Transfer | None = None  # None: servers read files
    working: Callable[..., AbstractContextManager[Any]] = staticmethod(lambda *_: nullcontext())  # entered with phase and step

    def __init__(
        self,
        model: PolicyModel | Slot,
        mesh: Mesh,
        paths: RunPaths,
        static: ModelFiles,
        dtype: torch.dtype,
        *,
        writers: Sequence[int] = (0,),
        in_memory: bool = False,
    ) -> None:
        """`model`: what is trained, or a slot of a shared trainer. `static` holds the files of a model folder besides weights (rank 0's).

        `dtype` is that of the published parameters; buffers keep theirs. `writers`: the ranks that write, with rank 0 first.
        `in_memory`: versions that need not last are written into the run's folder in memory, which exists (`tmpfs.make`).
        """
        self.model: Any = model
        self.mesh, self.paths, self.static, self.in_memory, self.writers = mesh, paths, static, in_memory, tuple(writers)
        self.export = Export(model, dtype)
        self.seconds = 0.0  # writing time of the last version, concurrently with the trainer's steps
        self._group = dist.new_group(list(writers), timedelta(seconds=LIMIT), backend="gloo") if len(writers) > 1 else None
        self._copies: Tensors = {}  # of what this rank writes; allocated once: allocating takes longer than copying
        self._thread = ThreadPoolExecutor(1, "publisher")
        self._pending: list[Future[None]] = []  # of the version being written: its writing and its announcement

    @classmethod
    def of(
        cls,
        model: PolicyModel,
        mesh: Mesh,
        paths: RunPaths,
        *,
        source: str,
        dtype: torch.dtype,
        chat_template: Path | None = None,
        lora: LoraConfig | None = None,
        in_memory: bool = False,
    ) -> Self:
        """The publisher of a model loaded from `source` (folder or hub name), with that model's configuration and tokenizer.

        `chat_template`: a file; the published folders have this template instead of the model's own. `lora`: that of the model's adapters;
        then these are published without a tokenizer. `in_memory`: see `__init__`.
        """
        # Ranks of one host share its memory and its way to the disk, so one of them writes.
        writers = (0,) if lora is not None else [ranks[0] for ranks in mesh.ranks_by_host()]
        found = cls(model, mesh, paths, ModelFiles({}), dtype, writers=writers, in_memory=in_memory)
        if mesh.first and lora is not None:
            from rlx.models.lora import peft_config

            found.static = ModelFiles.of_adapters(peft_config(model.hf, lora, source), fetch(source, None))
        elif mesh.first:
            folder, name = fetch(source, None), str(dtype).removeprefix("torch.")
            found.static = ModelFiles.read(folder, model.hf, name, found.export.unused_checkpoint_tensors(folder), chat_template)
        return found

    @classmethod
    def from_config(
        cls, cfg: TrainingRoot, model: PolicyModel, mesh: Mesh, paths: RunPaths, source: str, working: Callable[..., Any]
    ) -> Self:
        """The publisher of a model loaded from `source` (folder or hub name), as the configuration says.

        Raises ValueError if servers that the run starts would refuse its versions.
        """
        from rlx.models.load import DTYPES

        found = cls.of(
            *(model, mesh, paths),
            source=source,
            dtype=DTYPES[cfg.model.dtype],
            chat_template=None if cfg.model.chat_template is None else template_path(cfg.model.chat_template),
            lora=cfg.lora if cfg.lora.enabled else None,
            in_memory=cfg.memory_folder is not None,
        )
        if not model.adapts:
            found.export.units()  # raises for a model that cannot be published, before anything is trained
        if mesh.first and isinstance(cfg, PlayRoot) and cfg.started_servers:
            found.export.check_servers(source, fetch(source, None), cfg.lora.rank)
        if isinstance(cfg, Config) and cfg.transfer is not None:
            from rlx.weights.transfer import Transfer

            found.transfer = Transfer.of(cfg, model, mesh, paths, found.export)
        found.working = working
        return found

    # -- files

    def gather(self, version: int, *, lasts: bool = True) -> None:
        """Copy the current weights and start writing them. Every rank calls this. Raises PublishFailed for the previous version.

        `lasts`: somebody may want the version when the run has ended, so it is written to the disk in any case.
        """
        self.wait()
        own = {name for writer, names in self._parts.values() if writer == self.mesh.rank for name in names}
        pinned = self.mesh.device.type == "cuda"
        for name, tensor in self.model.named_weights():
            whole = tensor.to(self.export.published(name, tensor))
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole  # importing DTensor's class takes seconds
            if name in own:
                if name not in self._copies:
                    self._copies[name] = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=pinned)
                self._copies[name].copy_(whole, non_blocking=pinned)
        self.mesh.synchronize()  # until the copies are complete
        if self.mesh.rank in self.writers:
            self._pending = [self._thread.submit(self._write, version, self.in_memory and not lasts)]

    def announce(self, version: int, *, keep_last: int | None = None, protect: Collection[int] = ()) -> None:
        """Make the gathered version visible once it is written. Then delete all except the newest `keep_last` and those in `protect`.

        Call it only when everything that a reader of the version must find is on disk.
        """
        if self.mesh.first:
            (written,) = self._pending
            self._pending.append(self._thread.submit(self._appear, version, written, keep_last, frozenset(protect)))

    def publish(self, version: int) -> None:
        """Publish the current weights on the disk. Returns on every rank when the version is there. Raises PublishFailed or RankLost."""
        self.gather(version)
        self.announce(version)
        self.mesh.run_on_all_or_raise(self.wait)

    def offer(self, version: int, tick: Callable[[], None]) -> None:
        """Send a version that has no files from memory to the servers. Returns when they have it. `tick`: called while they do not ask.

        Call it when everything that a reader of the version must find is on disk. Raises Preempted on every rank if `tick` does on rank 0.
        """
        if self.transfer is not None:
            with self.working(f"sending version {version}", version):
                self.transfer.offer(version, tick)

    def ensure(self, version: int) -> None:
        """Make sure that the version is on the disk. If not, publish the current weights as that version. Every rank calls this."""
        self.mesh.run_on_all_or_raise(self.wait)
        if self.mesh.any(self.mesh.first and not files.is_persistent(self.paths, version)):
            self.publish(version)

    def leave_on_disk(self, version: int) -> None:
        """Before the trainer leaves: `ensure` a version that may be in memory alone."""
        if self.transfer is not None or self.in_memory:
            with self.working(f"writing version {version}"):
                self.ensure(version)

    def check(self) -> None:
        """Raise PublishFailed if writing has failed. Cheap, so call it often: otherwise others wait in vain for the version."""
        for future in self._pending:
            if future.done():
                future.result()

    def wait(self) -> None:
        """Return when every announced version has appeared. Raises PublishFailed."""
        for future in self._pending:
            future.result()
        self._pending = []

    def wait_briefly(self, seconds: float) -> None:
        """Before an end by an error: give the announced versions so long to appear."""
        wait(self._pending, seconds)

    def close(self) -> None:
        """Wait for the version being written, and refuse servers from now on. Raises PublishFailed."""
        self.wait()
        self._thread.shutdown()
        if self.transfer is not None:
            self.transfer.close()

    @property
    def times(self) -> dict[str, float]:
        """Metrics: the seconds that the last version took to be written, and those that its transfers have held the trainer."""
        return {"time/write_weights": self.seconds, "time/send_weights": self.transfer.seconds if self.transfer is not None else 0.0}

    def _write(self, version: int, in_memory: bool) -> None:
        """In each writer's thread: write all files of a version, up to its manifest."""
        began = time.perf_counter()
        try:
            self._write_together(version, in_memory)
        except Exception as error:
            if self.mesh.first:
                tmpfs.delete(files.hidden(self.paths, version))
            raise self._failed(version, error, in_memory) from error
        self.seconds = time.perf_counter() - began

    def _write_together(self, version: int, in_memory: bool) -> None:
        """Raise this rank's error, or another writer's, once all writers have ended; RankLost if one left."""
        error: Exception | None = None
        mine: Any = None
        try:
            if self.mesh.first:
                files.begin(self.paths, version, in_memory=in_memory)
            folder, rank = files.hidden(self.paths, version), self.mesh.rank
            what = f"{folder}, which rank 0 makes: all hosts of the trainer must have the same run.dir ({self.paths.root})"
            wait_for(lambda: listed(folder), what, FOLDER_TIMEOUT)
            own = {file: {name: self._copies[name] for name in names} for file, (writer, names) in self._parts.items() if writer == rank}
            mine = files.write(self.paths, version, own, self.export.convert)
        except Exception as raised:
            error, mine = raised, f"rank {self.mesh.rank}: {type(raised).__name__}: {raised}"
        found = [mine] * len(self.writers)
        if self._group is not None:
            try:
                dist.all_gather_object(found, mine, group=self._group)
            except RuntimeError as lost:
                time.sleep(meshes.RANK_LOST_SECONDS)
                raise RankLost(f"another writer left, or sent nothing for {LIMIT:g} s; its own log says why") from lost
        if failures := [each for each in found if isinstance(each, str)]:
            raise error or RuntimeError(failures[0])
        if self.mesh.first:
            files.complete(self.paths, version, found, self.static)

    def _appear(self, version: int, written: Future[None], keep_last: int | None, protect: Collection[int]) -> None:
        written.result()
        try:
            files.publish(self.paths, version)
            if keep_last is not None:
                files.prune(self.paths, keep_last=keep_last, protect=protect)
        except OSError as error:
            raise self._failed(version, error) from error

    def _failed(self, version: int, error: Exception, in_memory: bool = False) -> PublishFailed:
        folder = tmpfs.place(self.paths.weights) if in_memory else self.paths.weights
        space = "" if isinstance(error, RankLost) else "free some space there, or lower weight_broadcast.keep_last; then "
        failed = PublishFailed(
            f"version {version} of the weights could not be written to {folder}: {type(error).__name__}: {error}\n"
            f"  fix: {space}continue with resume=latest"
        )
        failed.filename = str(folder)
        return failed

    @functools.cached_property
    def _parts(self) -> dict[str, tuple[int, list[str]]]:
        """All files of a version, with their writers and tensors."""
        sizes = {name: tensor.numel() * self.export.published(name, tensor).itemsize for name, tensor in self.model.named_weights()}
        if self.model.adapts:  # PEFT's format has one file
            return {ADAPTER: (0, list(sizes))}
        return files.divide(self.export.units(), sizes, self.writers)
