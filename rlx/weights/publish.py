"""How the trainer publishes a policy version as files. `subscribe.py` is the orchestrator's end.

    gather (in the step)  →  write (beside the next step)  →  announce: the version appears

`gather` copies the current weights to host memory: to that of each host's first rank its own share of the files (`division.py`), so that no
host holds all of them if there are several. A thread of each writes them and computes checksums; that of rank 0 also completes the version
and deletes old ones (`writers.py`). Adapters are small: rank 0 writes them alone.
Only one version is written at a time: `gather` waits for the previous one. Versions are folders that appear under `weights/`: of the kind
`files` with a whole model, of the kind `adapter` with adapters alone, if these are trained. Those that need not last may be in memory
(`tmpfs.py`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.parallel.gather import whole_on
from rlx.parallel.mesh import Mesh, RankLost
from rlx.paths import RunPaths
from rlx.weights import files, spare, tmpfs
from rlx.weights.attest import begun
from rlx.weights.division import Part, by_layer, divide
from rlx.weights.export import Export
from rlx.weights.files import ModelFiles, Tensors, Written
from rlx.weights.hub import fetch
from rlx.weights.saving import facts
from rlx.weights.untrained import untrained
from rlx.weights.writers import WriterFailed, Writers

if TYPE_CHECKING:
    import torch

    from rlx.config.schema import LoraConfig
    from rlx.models.policy import PolicyModel
    from rlx.models.slots import Slot


class PublishFailed(RuntimeError):
    """A version could not be written; the message says why and what to do."""


class CopyDiffers(RuntimeError):
    """A copy of the weights in host memory has other values than the device's tensor, so it is not what was trained."""


class Publisher:
    """The trainer's end. Every rank has a Publisher and makes the same calls; some ranks write.

    Step 12:  gather(13)  →  the metrics of step 12 are written  →  announce(13, …)  →  the folder `step_13` appears.
    """

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
        self.mesh, self.paths, self.static, self.in_memory = mesh, paths, static, in_memory
        self.export = Export(model, dtype)
        # Whether copies are compared with the tensors of the device. On a CPU both lie in host memory.
        self.compares = mesh.device.type == "cuda"
        self._sums: dict[str, str] = {}  # checksums of the device's tensors, of those that this rank writes
        self.seconds = 0.0  # writing time of the last version, beside the trainer's steps
        self._writers = Writers(mesh, paths, writers)
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
        trust_remote_code: bool = False,
        chat_template: Path | None = None,
        lora: LoraConfig | None = None,
        in_memory: bool = False,
    ) -> Publisher:
        """The publisher of a model loaded from `source` (folder or hub name), with that model's configuration and tokenizer.

        `chat_template`: a file; the published folders have this template instead of the model's own. `lora`: that of the model's adapters;
        then these are published without a tokenizer. `in_memory`: see `__init__`.
        """
        static = ModelFiles({})
        if mesh.first and lora is not None:
            from rlx.models.lora import peft_config

            static = ModelFiles.of_adapters(peft_config(model.hf, lora, source), fetch(source, None))
        elif mesh.first:
            static = ModelFiles.read(source, model.hf, str(dtype).removeprefix("torch."), trust_remote_code=trust_remote_code)
            if chat_template is not None:
                static = static.with_chat_template(chat_template)
        # Ranks of one host share its memory and its way to the disk, so one of them writes.
        writers = (0,) if lora is not None else [ranks[0] for ranks in mesh.hosts()]
        found = cls(model, mesh, paths, static, dtype, writers=writers, in_memory=in_memory)
        if mesh.first and lora is None:
            found.static = replace(static, untrained=untrained(fetch(source, None), model.hf, found.export.shapes))
        return found

    def gather(self, version: int, *, lasts: bool = True) -> None:
        """Copy the current weights and start writing them. Every rank calls this. Raises PublishFailed for the previous version.

        `lasts`: somebody may want the version when the run has ended, so it is written to the disk in any case.
        """
        self.wait()
        cuda, rank = self.mesh.device.type == "cuda", self.mesh.rank
        owners = {name: part.writer for part in self._parts for name in part.names}
        sums = {}
        for name, tensor in self.model.named_weights():
            whole = whole_on(tensor.to(self.export.published(name, tensor)), owners[name], rank)
            if whole is not None:
                self._keep(name, whole, pinned=cuda)
                if self.compares and whole.device.type == self.mesh.device.type:  # others come from host memory (fsdp_cpu_offload)
                    sums[name] = begun(whole)
        self.mesh.synchronize()  # until the copies are complete
        self._sums = {name: result() for name, result in sums.items()}
        if rank in self._writers.ranks:
            self._pending = [self._thread.submit(self._write, version, self.in_memory and not lasts)]

    def announce(self, version: int, *, keep_last: int | None = None, protect: Collection[int] = ()) -> None:
        """Make the gathered version visible once it is written. Then delete all except the newest `keep_last` and those in `protect`.

        Call it only when everything that a reader of the version must find is on disk.
        """
        if self.mesh.first:
            (written,) = self._pending
            self._pending.append(self._thread.submit(self._appear, version, written, keep_last, frozenset(protect)))

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

    def let_appear(self, seconds: float) -> None:
        """Before an end by an error: give the announced versions so long to appear."""
        wait(self._pending, seconds)

    def ensure(self, version: int) -> None:
        """Make sure that the version is on the disk. If not, publish the current weights as that version. Every rank calls this."""
        self.mesh.agreed(self.wait)
        if self.mesh.any(self.mesh.first and not files.lasts(self.paths, version)):
            self.gather(version)
            self.announce(version)
        self.mesh.agreed(self.wait)

    def close(self) -> None:
        """Wait for the version being written. Raises PublishFailed."""
        self.wait()
        self._thread.shutdown()
        if self.mesh.first:
            spare.delete(self.paths.weights)

    def _keep(self, name: str, tensor: torch.Tensor, *, pinned: bool) -> None:
        import torch

        if name not in self._copies:
            self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        self._copies[name].copy_(tensor, non_blocking=pinned)

    def _write(self, version: int, in_memory: bool) -> None:
        began = time.perf_counter()
        try:
            self._writers.write(version, lambda: self._write_own(version), self.static, in_memory=in_memory)
        except Exception as error:
            if in_memory and isinstance(error, OSError) and error.filename is None:
                error.filename = str(tmpfs.place(self.paths.weights))  # so that a full one is not taken for the disk
            if self.mesh.first:
                files.abandon(self.paths, version)
            raise _failed(version, error) from error
        self.seconds = time.perf_counter() - began

    def _write_own(self, version: int) -> Written:
        own = {part.file: {name: self._copies[name] for name in part.names} for part in self._parts if part.writer == self.mesh.rank}
        written = files.write(self.paths, version, own, self.export.convert)
        self._compare(written)
        return written

    def _compare(self, written: Written) -> None:
        """Raise CopyDiffers if a copy was not what the device has: its checksum in the manifest would attest a wrong weight."""
        if not self._sums:
            return
        if self.export.converts:  # the manifest has other tensors
            found = {name: facts(self._copies[name])["sum"] for name in self._sums}
        else:
            found = {name: written.tensors[name]["sum"] for name in self._sums}
        wrong = [name for name, expected in self._sums.items() if found[name] != expected]
        if wrong:
            first = wrong[0]
            raise CopyDiffers(
                f"the copies of {len(wrong)} of {len(found)} tensors in host memory differ from the device's: {first} has the checksum "
                f"{found[first]}, and {self._sums[first]} on the device"
            )

    def _appear(self, version: int, written: Future[None], keep_last: int | None, protect: Collection[int]) -> None:
        written.result()
        try:
            files.publish(self.paths, version)
            if keep_last is not None:
                files.prune(self.paths, keep_last=keep_last, protect=protect, reuse=True)
        except OSError as error:
            raise _failed(version, error) from error

    @functools.cached_property
    def _parts(self) -> list[Part]:
        """All files of a version."""
        sizes = {name: tensor.numel() * self.export.published(name, tensor).itemsize for name, tensor in self.model.named_weights()}
        together = self.export.together
        if len(self._writers.ranks) == 1:
            units = [list(sizes)] if together else [[name] for name in sizes]
        else:  # an engine that rearranges a layer once it has all of its tensors must not wait for another file
            units = by_layer(sizes) if not together or self.export.by_layer else [list(sizes)]
        return divide(units, sizes, self._writers.ranks, files.ADAPTER if self.model.adapts else "model.safetensors")


def _failed(version: int, error: Exception) -> PublishFailed:
    why = str(error) if isinstance(error, RankLost | WriterFailed) else f"{type(error).__name__}: {error}"
    other = isinstance(error, RankLost) or CopyDiffers.__name__ in why  # not the disk; of another rank, `why` has the name
    remedy = "Continue" if other else "Free some space (or lower weight_broadcast.keep_last), then continue"
    return PublishFailed(f"version {version} of the weights could not be written: {why}. {remedy} with resume=latest")
