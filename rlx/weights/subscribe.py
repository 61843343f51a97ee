"""Which policy versions there are, as records that servers load. All that those who play know of weights.

    the trainer announces or offers version 13  →  latest() is `WeightVersion(13, …)`  →  the fleet tells every server

The records say where a server finds a version: in files, or in the trainer's memory. Nothing outside `rlx.weights` and the servers looks
there.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import xxhash

from rlx.paths import COMPLETE, RunPaths, listed_with_folder
from rlx.types import InitialModel, WeightVersion
from rlx.weights import files, tmpfs
from rlx.weights.initial import read_initial
from rlx.weights.offer import read_offer


def version_at(folder: Path, version: int) -> WeightVersion:
    """What servers load: a model's folder, or adapters for the model that they started with."""
    return WeightVersion(version=version, kind="adapter" if (folder / files.ADAPTER_CONFIG).is_file() else "files", where=str(folder))


class Subscriber:
    """The versions of one run."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths

    def initial(self) -> InitialModel | None:
        """What the trainer began with; None until it says so."""
        return read_initial(self.paths)

    def latest(self) -> WeightVersion | None:
        """The newest version that appeared; None without one."""
        offer = read_offer(self.paths)  # before the files: an offer ends when its version has files
        version = files.latest_version(self.paths)
        if offer is not None and (version is None or offer.version >= version):
            return offer
        return None if version is None else self.at(version)

    def at(self, version: int) -> WeightVersion | None:
        """A version: as the trainer offers it, or from its files; None if there is neither at the moment.

        Over files the trainer keeps all versions after the servers' version. In memory it has one; those that are evaluated have files.
        """
        offer = read_offer(self.paths)
        if offer is not None and offer.version == version:
            return offer
        return version_at(tmpfs.real(self.paths.weights_of(version)), version) if self.on_disk(version) else None

    def check_offered(self, version: int) -> None:
        """Raise FileNotFoundError for a version that `at` does not find, unless the trainer offers versions from memory: over files no
        one writes it later."""
        if read_offer(self.paths) is None and self.at(version) is None:
            raise FileNotFoundError(
                f"{self.paths.weights_of(version) / COMPLETE} is missing: the servers need version {version}, and a newer one is on disk. "
                "Was it deleted? Continue with resume=latest"
            )

    def on_disk(self, version: int) -> bool:
        """Whether the version has files. Version 0 has none: it is the initial model."""
        return listed_with_folder(self.paths.weights_of(version) / COMPLETE)

    def prune(self, keep_last: int, protect: Collection[int]) -> None:
        """Delete the files of all versions except the newest `keep_last` and those in `protect`."""
        files.prune(self.paths, keep_last, protect)


def saved(weights_dir: str, version: int) -> WeightVersion:
    """A version among those in `weights_dir`, the folder of any run's weights."""
    return version_at(Path(weights_dir) / f"step_{version}", version)


def digest_at(where: str) -> str | None:
    """Tells a saved version from another with the same number and place: a digest of its manifest. None if this host cannot read it."""
    try:
        return xxhash.xxh3_64_hexdigest((Path(where) / COMPLETE).read_bytes())
    except OSError:
        return None
