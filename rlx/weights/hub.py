"""The folder on this disk of a model given by folder or hub name."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from rlx.heartbeat import FETCHING, Heartbeat

WANTED = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.py"]
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


def in_cache(name: str) -> tuple[Path | None, bool]:
    """The folder of a model of the hub in the cache, or `None`, and whether it has all files that `fetch` gets. Asks no hub.

    Whether it has them all is only known if the cache has the hub's list.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED, local_files_only=True)), True
    except LocalEntryNotFoundError as error:
        folder = getattr(error, "snapshot_path", None)
        return (Path(folder) if folder else None), False
