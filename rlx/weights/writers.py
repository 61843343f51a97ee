"""The ranks that write one version's files together: rank 0, and at least one of each other host of the trainer.

    rank 0          begin: the empty folder  →  its files   →  collects what the others report  →  manifest
    other writers   wait for the folder      →  their files →  report names and checksums, or the error

Reports are messages and not files, so a full disk can be reported. This happens in a thread of each writer, beside the next step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rlx.parallel.mesh import Mesh
from rlx.parallel.subgroup import Subgroup
from rlx.paths import RunPaths, listed
from rlx.waiting import wait_for
from rlx.weights import files
from rlx.weights.files import ModelFiles, Written

FOLDER_TIMEOUT = 180.0  # seconds until another host must see the folder that rank 0 has made; NFS may take 60 by default


class WriterFailed(RuntimeError):
    """Another rank could not write its files; the message names it and its error."""


class Writers:
    """The writers of a run's versions. Each of them makes the same calls, always from the same thread."""

    def __init__(self, mesh: Mesh, paths: RunPaths, ranks: Sequence[int]) -> None:
        """Every rank of the mesh calls this. `ranks`: those that write, with rank 0 first."""
        self.mesh, self.paths, self.ranks = mesh, paths, tuple(ranks)
        self._group = Subgroup(mesh, ranks)

    def write(self, version: int, write: Callable[[], Written], static: ModelFiles, *, in_memory: bool = False) -> None:
        """Write all files of a version, up to its manifest. `write` writes this rank's safetensors files into the version's folder.

        `in_memory`: that folder is in the memory of rank 0's host (`tmpfs`).

        On rank 0 it raises the error of the lowest rank that failed, after all writers have ended: WriterFailed for another rank's,
        RankLost if that rank left. On other ranks it raises their own error.
        """
        if self.mesh.first:
            self._lead(version, write, static, in_memory)
        else:
            self._follow(version, write)

    def _lead(self, version: int, write: Callable[[], Written], static: ModelFiles, in_memory: bool) -> None:
        begun = False
        try:
            files.begin(self.paths, version, in_memory=in_memory)
            begun = True
        finally:
            self._group.hear_first(begun)
        written, failures = [], []
        for rank in self.ranks:
            try:
                written.append(write() if rank == 0 else self._report_of(rank))
            except Exception as error:  # the others still write into the folder
                failures.append(error)
        if failures:
            raise failures[0]
        files.complete(self.paths, version, written, static)

    def _report_of(self, rank: int) -> Written:
        report = json.loads(self._group.receive(rank))
        if "error" in report:
            raise WriterFailed(f"rank {rank}: {report['error']}")
        return Written(**report)

    def _follow(self, version: int, write: Callable[[], Written]) -> None:
        if not self._group.hear_first():
            return  # rank 0 could not make the folder, and says why
        try:
            folder = files.hidden(self.paths, version)
            what = f"{folder}, which rank 0 has made: all hosts of the trainer must have the same run.dir ({self.paths.root})"
            wait_for(lambda: listed(folder), what, FOLDER_TIMEOUT)
            report = asdict(write())
        except Exception as error:
            self._group.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
            raise
        self._group.send(json.dumps(report).encode())
