"""Weight sync at the trainer's end: a version reaches the servers as files (`publish.py`), or from the trainer's memory (`transfer.py`).

    step 12 ends      gather(13)  →  the metrics of step 12 are written  →  announce(13, …)  →  offer(13)
    while waiting     serve_while: servers that wait for the offered version get it
    within a step     serve, between two micro-batches before the weights change

Over files, `offer` and `serve` do nothing. With a transfer, only versions that last have files: those of checkpoints, those that are
evaluated and the last one. With `weight_broadcast.folder` the files of all others are in a folder in memory. The trainer's loop always
makes the same calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rlx.config.chat_format import template_path
from rlx.config.memory import versions_in_memory
from rlx.config.schema import Config, PlayRoot, TrainingRoot
from rlx.paths import RunPaths
from rlx.waiting import Preempted
from rlx.weights import tmpfs
from rlx.weights.hub import fetch
from rlx.weights.publish import Publisher

if TYPE_CHECKING:
    from rlx.models.policy import PolicyModel
    from rlx.parallel.mesh import Mesh
    from rlx.weights.transfer import Transfer

T = TypeVar("T")
Working = Callable[..., AbstractContextManager[Any]]  # (phase, step) → the context of work that takes long: `Watch.working`
SOON = 1.0  # seconds after a step in which the orchestrator sees the version and pauses the servers for it
POLL = 0.001  # seconds


class Wanted(Preempted):
    """Servers wait for weights, so the trainer stops waiting. Other ranks see a `Preempted` and ask rank 0 for the reason."""


def make_room(cfg: TrainingRoot, paths: RunPaths) -> None:
    """Make the run's folder in memory, if the configuration has one. Rank 0 calls this before it loads anything.

    Deletes that of an attempt that was killed. Raises OSError if the versions do not fit.
    """
    tmpfs.clear(paths.weights)
    if cfg.memory_folder is not None:
        tmpfs.make(paths.weights, cfg.memory_folder, versions_in_memory(cfg))


class Broadcast(Publisher):
    """The versions of one run. Every rank has this object and makes the same calls."""

    transfer: Transfer | None = None  # None: servers read files
    working: Working = staticmethod(lambda *_: nullcontext())  # entered around transfers, with the phase and step

    @classmethod
    def from_config(cls, cfg: TrainingRoot, model: PolicyModel, mesh: Mesh, paths: RunPaths, source: str, working: Working) -> Self:
        """The versions of a model loaded from `source` (folder or hub name), sent as the configuration says.

        Raises ValueError if they cannot be sent from memory layer by layer, or if servers that the run starts would refuse them.
        """
        from rlx.models.load import DTYPES

        found = cls.of(
            *(model, mesh, paths),
            source=source,
            dtype=DTYPES[cfg.model.dtype],
            chat_template=None if cfg.model.chat_template is None else template_path(cfg.model.chat_template),
            lora=cfg.lora if cfg.lora.on else None,
            in_memory=cfg.memory_folder is not None,
        )
        if mesh.first and isinstance(cfg, PlayRoot) and cfg.num_servers:
            found.export.check_servers(source, fetch(source, None), cfg.lora.rank)
        if isinstance(cfg, Config) and cfg.transfer is not None:
            from rlx.weights.transfer import Transfer

            found.transfer = Transfer.of(cfg, model, mesh, paths, found.export)
        found.working = working
        return found

    @property
    def times(self) -> dict[str, float]:
        """Metrics: the seconds that the last version took to be written, and those that its transfers have held the trainer."""
        return {"time/write_weights": self.seconds, "time/send_weights": self.transfer.seconds if self.transfer is not None else 0.0}

    def offer(self, version: int) -> None:
        """From now on, servers may have this version from memory; those that wait for it at once get it now.

        Call it when everything that a reader of the version must find is on disk.
        """
        if self.transfer is None:
            return
        self.transfer.offer(version)
        deadline = time.monotonic() + SOON
        while self.mesh.first and not self.transfer.wanted() and time.monotonic() < deadline:
            time.sleep(POLL)
        if self.mesh.any(self._wanted()):
            self._send()

    def serve_while(self, wait: Callable[[Callable[[], None]], T], tick: Callable[[], None]) -> T:
        """The result of `wait(tick)`, which calls `tick` while it waits.

        When servers want the offered version, the wait is interrupted, they get the weights, and `wait` is called again. Servers that
        waited before get them first: what is waited for may be there already, and the step after it may take long.
        Raises Preempted on every rank if `tick` raises it on rank 0 and `wait` tells the other ranks, as `Mesh.read` does.
        """

        def look() -> None:
            tick()
            if self._wanted():
                raise Wanted

        if self.transfer is not None and self.mesh.any(self._wanted()):
            self._send()
        while True:
            try:
                return wait(look)
            except Preempted as why:
                if self.transfer is None or not self.mesh.any(isinstance(why, Wanted)):
                    raise
            self._send()

    def serve(self) -> None:
        """Send the offered version to the servers that want it, where the weights are still its own: between two micro-batches."""
        if not self.mesh.grouped and self._wanted():  # gathering would disturb sharded layers here
            self._send()

    def _wanted(self) -> bool:
        return self.transfer is not None and self.mesh.first and self.transfer.wanted()

    def _send(self) -> None:
        assert self.transfer is not None
        with self.working(f"sending version {self.transfer.version}", self.transfer.version):
            self.transfer.send()

    def leave_on_disk(self, version: int) -> None:
        """Before the trainer leaves: `ensure` a version that may be in memory alone."""
        if self.transfer is not None or self.in_memory:
            with self.working(f"writing version {version}"):
                self.ensure(version)

    def close(self) -> None:
        """Wait for the version being written, and refuse servers from now on. Raises PublishFailed."""
        super().close()
        if self.transfer is not None:
            self.transfer.close()
