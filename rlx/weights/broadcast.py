"""The trainer's policy versions on their way to the servers: over files (`publish.py`), or from its memory (`memory.py`).

    step 12 ends      gather(13)  →  the metrics of step 12 are written  →  announce(13, …)  →  offer(13)
    while waiting     serve_while: servers that call get the offered version
    within a step     serve, between two micro-batches before the weights change

Over files, `offer` and `serve` do nothing. From memory, only versions that last have files: those of checkpoints, those that are evaluated
and the last one. With `weight_broadcast.folder` the files of all others are in a folder in memory. The trainer's loop always makes the same
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from rlx.config.chat_format import template_path
from rlx.config.memory import versions_in_memory
from rlx.config.schema import Config, PlayRoot, TrainingRoot
from rlx.paths import RunPaths
from rlx.process import host_name
from rlx.waiting import Preempted
from rlx.weights import tmpfs
from rlx.weights.hub import fetch
from rlx.weights.publish import Publisher
from rlx.weights.untrained import check_begun

if TYPE_CHECKING:
    import torch

    from rlx.models.policy import PolicyModel
    from rlx.parallel.mesh import Mesh
    from rlx.weights.memory import Offers

T = TypeVar("T")
Working = Callable[..., AbstractContextManager[Any]]  # (phase, step) → the context of work that takes long: `Watch.working`


class Called(Preempted):
    """Servers wait for weights, so the trainer stops waiting. Other ranks see a `Preempted` and ask rank 0 for the reason."""


def make_room(cfg: TrainingRoot, paths: RunPaths) -> None:
    """Make the run's folder in memory, if the configuration has one. Rank 0 calls this before it loads anything.

    Deletes that of an attempt that was killed. Raises NoRoom if the versions do not fit.
    """
    tmpfs.clear(paths.weights)
    if cfg.memory_folder is not None:
        tmpfs.check(cfg.memory_folder, versions_in_memory(cfg))
        tmpfs.make(paths.weights, cfg.memory_folder)


class Broadcast:
    """The versions of one run. Every rank has this object and makes the same calls."""

    def __init__(self, publisher: Publisher, offers: Offers | None = None, working: Working = lambda *_: nullcontext()) -> None:
        """`offers` sends versions from memory; None: servers read files. `working` is entered around transfers, with the phase and step."""
        self.publisher, self.offers, self.working = publisher, offers, working
        self.mesh = publisher.mesh

    @classmethod
    def of(cls, cfg: TrainingRoot, model: PolicyModel, mesh: Mesh, paths: RunPaths, source: str, working: Working) -> Broadcast:
        """The versions of a model loaded from `source` (folder or hub name), sent as the configuration says.

        Raises ValueError if they cannot be sent from memory layer by layer, or if servers that the run starts would refuse them.
        """
        from rlx.models.load import DTYPES

        dtype = DTYPES[cfg.model.dtype]
        publisher = Publisher.of(
            *(model, mesh, paths),
            source=source,
            dtype=dtype,
            trust_remote_code=cfg.model.trust_remote_code,
            chat_template=None if cfg.model.chat_template is None else template_path(cfg.model.chat_template),
            lora=cfg.lora if cfg.lora.on else None,
            in_memory=cfg.memory_folder is not None,
        )
        if mesh.first and isinstance(cfg, PlayRoot) and cfg.num_servers:
            what = publisher.export.shapes, publisher.static.untrained, cfg.lora.rank
            check_begun(source, fetch(source, None), model.hf, *what)
        return cls(publisher, _offers_of(cfg, publisher, dtype), working)

    @property
    def times(self) -> dict[str, float]:
        """Metrics: the seconds that the last version took to be written, and those that its transfers have held the trainer."""
        return {
            "time/write_weights": self.publisher.seconds,
            "time/send_weights": self.offers.seconds if self.offers is not None else 0.0,
        }

    def gather(self, version: int, *, lasts: bool = True) -> None:
        """Copy the current weights and start writing them to files (`Publisher.gather`). Raises PublishFailed for the previous version."""
        self.publisher.gather(version, lasts=lasts)

    def announce(self, version: int, *, keep_last: int | None = None, protect: Collection[int] = ()) -> None:
        """Make the gathered version visible once its files are written. Then delete old ones (`Publisher.announce`)."""
        self.publisher.announce(version, keep_last=keep_last, protect=protect)

    def offer(self, version: int) -> None:
        """From now on, servers may have this version from memory; those that call at once get it now.

        Call it when everything that a reader of the version must find is on disk.
        """
        if self.offers is not None:
            self.offers.offer(version)
            with self.working(f"sending version {version}", version - 1):
                self.offers.send_soon()

    def serve_while(self, wait: Callable[[Callable[[], None]], T], tick: Callable[[], None]) -> T:
        """The result of `wait(tick)`, which calls `tick` while it waits.

        When servers call for the offered version, the wait is interrupted, they get the weights, and `wait` is called again. Servers that
        have called before get them first: what is waited for may be there already, and the step after it may take long.
        Raises Preempted on every rank if `tick` raises it on rank 0 and `wait` tells the other ranks, as `Mesh.read` does.
        """

        def look() -> None:
            tick()
            if self._called():
                raise Called

        asked = self.offers is not None and self.mesh.any(self._called())
        while True:
            if asked and self.offers is not None:
                version = self.offers.version
                with self.working(f"sending version {version}", version):
                    self.offers.send()
            try:
                return wait(look)
            except Preempted as why:
                asked = self.offers is not None and self.mesh.any(isinstance(why, Called))
                if not asked:
                    raise

    def serve(self) -> None:
        """Send the offered version to the servers that called, where the weights are still its own: between two micro-batches."""
        if self.offers is not None and not self.mesh.grouped and self._called():  # gathering would disturb sharded layers here
            version = self.offers.version
            with self.working(f"sending version {version}", version):
                self.offers.send()

    def _called(self) -> bool:
        return self.offers is not None and self.offers.called()

    def ensure(self, version: int) -> None:
        """Make sure that the version is on the disk. If not, publish the current weights as that version."""
        self.publisher.ensure(version)

    def leave_on_disk(self, version: int) -> None:
        """Before the trainer leaves: `ensure` a version that may be in memory alone."""
        if self.offers is not None or self.publisher.in_memory:
            with self.working(f"writing version {version}"):
                self.publisher.ensure(version)

    def check(self) -> None:
        """Raise PublishFailed if writing has failed. Cheap."""
        self.publisher.check()

    def wait(self) -> None:
        """Return when the files of every announced version have appeared. Raises PublishFailed."""
        self.publisher.wait()

    def close(self) -> None:
        """Wait for the version being written, and refuse servers from now on. Raises PublishFailed."""
        self.publisher.close()
        if self.offers is not None:
            self.offers.close()


def _offers_of(cfg: TrainingRoot, publisher: Publisher, dtype: torch.dtype) -> Offers | None:
    """What sends weights to the servers without files; None: they read files."""
    if cfg.transfer is None:
        return None
    from rlx.parallel.transfer import LOOPBACK
    from rlx.weights.memory import Offers, sender_of

    assert isinstance(cfg, Config)
    make = sender_of(cfg.transfer)
    host = host_name() if cfg.hardware.nodes > 1 else LOOPBACK
    untrained = publisher.static.untrained
    return Offers(publisher.model, publisher.mesh, publisher.paths, dtype, cfg.weight_broadcast.timeout, make, host, untrained)
