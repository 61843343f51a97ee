"""How a policy version gets from the trainer to whoever serves it. Trainer and orchestrator know this, and not what a version is made of.

    trainer        gather (in the step)  →  write (beside the next step)  →  announce: the version appears
    orchestrator   latest  →  a `WeightVersion` that servers take up

`gather` copies the weights as they are now to rank 0's host memory; checksums, files and deleting old versions are a thread's work.
One version is written at a time: `gather` waits for the one before. This is the kind `files`: folders that appear under `weights/`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rlx.paths import RunPaths
from rlx.types import WeightVersion
from rlx.weights import files
from rlx.weights.files import ModelFiles, Tensors

if TYPE_CHECKING:
    import torch

    from rlx.models.policy import PolicyModel
    from rlx.parallel.mesh import Mesh


class PublishFailed(RuntimeError):
    """A version could not be written; the message says why and what to do."""


class Publisher:
    """The trainer's end. Every rank has one and makes the same calls; rank 0 writes.

    Step 12:  gather(13)  →  the metrics of step 12 are written  →  announce(13, …)  →  the folder `step_13` appears.
    """

    def __init__(self, model: PolicyModel, mesh: Mesh, paths: RunPaths, static: ModelFiles, dtype: torch.dtype) -> None:
        """`static`: what a model folder holds besides weights (rank 0's is used); `dtype`: of the published weights."""
        self.model, self.mesh, self.paths, self.static, self.dtype = model, mesh, paths, static, dtype
        self.seconds = 0.0  # in which the last version was written, beside the trainer's steps
        self._copies: Tensors = {}  # taken once: fresh memory is slower than copying
        self._thread = ThreadPoolExecutor(1, "publisher")
        self._pending: list[Future[None]] = []  # the version being written, and its appearance

    @classmethod
    def of(
        cls, model: PolicyModel, mesh: Mesh, paths: RunPaths, *, source: str, dtype: torch.dtype, trust_remote_code: bool = False
    ) -> Publisher:
        """Of a model that was loaded from `source`, a folder or a name on the hub; its configuration and tokenizer come along."""
        static = ModelFiles({})
        if mesh.first:
            static = ModelFiles.read(source, model.hf, str(dtype).removeprefix("torch."), trust_remote_code=trust_remote_code)
        return cls(model, mesh, paths, static, dtype)

    def gather(self, version: int) -> None:
        """Copy the weights as they are now, and begin to write them. Every rank calls this; raises PublishFailed for the version before."""
        self.wait()
        cuda = self.mesh.device.type == "cuda"
        for name, tensor in self.model.named_weights():
            whole = _whole(tensor.to(self.dtype) if tensor.is_floating_point() else tensor)
            if self.mesh.first:
                self._keep(name, whole, pinned=cuda)
        self.mesh.synchronize()  # the copies are there
        if self.mesh.first:
            self._pending = [self._thread.submit(self._write, version)]

    def announce(self, version: int, *, keep_last: int | None = None, protect: Collection[int] = ()) -> None:
        """Let the version that was gathered appear when it is written, then delete all but the newest `keep_last` and those in `protect`.

        Call it when everything that a reader of the version must find is in its file.
        """
        if self.mesh.first:
            (written,) = self._pending
            self._pending.append(self._thread.submit(self._appear, version, written, keep_last, frozenset(protect)))

    def check(self) -> None:
        """Raise PublishFailed when writing has failed meanwhile. Cheap: call it often, since who waits for the version waits in vain."""
        for future in self._pending:
            if future.done():
                future.result()

    def wait(self) -> None:
        """Returns when all that was announced has appeared. Raises PublishFailed."""
        for future in self._pending:
            future.result()
        self._pending = []

    def ensure(self, version: int) -> None:
        """See that the version is there; where it is not, the weights as they are now become it. Every rank calls this."""
        if self.mesh.any(self.mesh.first and version not in files.versions(self.paths)):
            self.gather(version)
            self.announce(version)
            self.wait()
        self.mesh.barrier()

    def close(self) -> None:
        """Wait for what is being written. Raises PublishFailed."""
        self.wait()
        self._thread.shutdown()

    def _keep(self, name: str, tensor: torch.Tensor, *, pinned: bool) -> None:
        import torch

        if name not in self._copies:
            self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        self._copies[name].copy_(tensor, non_blocking=pinned)

    def _write(self, version: int) -> None:
        began = time.perf_counter()
        try:
            export, together = self._export
            files.write(self.paths, version, self._copies, self.static, export, together=together)
        except Exception as error:
            files.abandon(self.paths, version)
            raise _failed(version, error) from error
        self.seconds = time.perf_counter() - began

    def _appear(self, version: int, written: Future[None], keep_last: int | None, protect: Collection[int]) -> None:
        written.result()
        try:
            files.publish(self.paths, version)
            if keep_last is not None:
                files.prune(self.paths, keep_last=keep_last, protect=protect)
        except OSError as error:
            raise _failed(version, error) from error

    @functools.cached_property
    def _export(self) -> tuple[Callable[[Tensors], Tensors], bool]:
        """What gives tensors the names and shapes of published checkpoints (transformers fuses some models' experts), and
        whether it needs all of them at once."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import revert_weight_conversion

        hf: Any = self.model.hf
        return functools.partial(revert_weight_conversion, hf), bool(get_model_conversion_mapping(hf, add_legacy=False))


class Subscriber:
    """The orchestrator's end."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths

    def latest(self) -> WeightVersion | None:
        """The newest version that appeared; None where there is none."""
        version = files.latest_version(self.paths)
        return None if version is None else WeightVersion(version=version, kind="files", where=str(self.paths.weights_of(version)))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor: every rank takes part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # a DTensor; importing the class takes seconds


def _failed(version: int, error: Exception) -> PublishFailed:
    return PublishFailed(
        f"version {version} of the weights could not be written: {type(error).__name__}: {error}. Free some space (or lower "
        "weight_broadcast.keep_last), then go on with resume=latest"
    )
