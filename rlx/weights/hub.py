"""Where a model named by folder or hub name lies on this disk.

Knows the hub's client. Knows nothing of what the files hold.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from rlx.heartbeat import FETCHING, Heartbeat

WANTED = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model", "*.py"]
UNWANTED = ["consolidated*", "original/*"]  # the same weights once more, under the names of their makers


def fetch(name: str, heartbeat: Heartbeat | None) -> Path:
    """The folder of a local path or a hub name. What the disk lacks of the hub's files is fetched, which may take an hour; `heartbeat`
    says so meanwhile. Of several processes that want the same file, one fetches it and the others wait.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    with heartbeat.during(f"{FETCHING} {name}") if heartbeat else nullcontext():
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))
