"""The folder on this disk of a model given by folder or hub name, and a trainer's wait for its initial model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.heartbeat import FETCHING, WAITING_FOR_MODEL, Heartbeat, wait_for_model
from rlx.paths import RunPaths

if TYPE_CHECKING:
    from rlx.config.schema import TrainingRoot
    from rlx.parallel.mesh import Mesh
    from rlx.train.watch import Watch

TIMEOUT = 3600.0  # seconds to wait for the initial model while nobody reports that it makes it
WANTED = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.py"]
UNWANTED = ["consolidated*", "original/*"]  # the same weights under the original names


def fetch(name: str, heartbeat: Heartbeat | None) -> Path:
    """The folder of a local path or a hub name.

    Downloads missing files from the hub, which may take an hour; `heartbeat` reports it meanwhile. If several processes want the same
    file, one downloads it and the others wait.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    with heartbeat.during(f"{FETCHING} {name}") if heartbeat else nullcontext():
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))


def initial_model(cfg: TrainingRoot, paths: RunPaths, mesh: Mesh, watch: Watch) -> str:
    """Folder or hub name of the initial model. Waits until the model exists and is on this host's disk, as long as `prepare` is at work.

    Raises Preempted if there is only one trainer process; several ranks leave later, together.
    """
    watch.beat(WAITING_FOR_MODEL)
    tick = watch.tick if mesh.world_size == 1 else watch.heartbeat  # several ranks leave together, with a checkpoint
    name = mesh.read(lambda waits: wait_for_model(paths, TIMEOUT, waits).encode(), tick).decode()
    for wanted in filter(None, (name, cfg.ref.name)):
        fetch(wanted, watch)  # on every rank, before collectives: a download may exceed their timeout
    return name
