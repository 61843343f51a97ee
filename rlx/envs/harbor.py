"""Tasks in Harbor's folders for `env=program`: `task.toml`, `instruction.md`, `environment/`, `tests/test.sh`.

    [environment]
    docker_image = "name"      or a Dockerfile in environment/, which podman and docker build

The verifier runs in the program's own box, with `tests/` at `/tests`, and leaves its score in `/logs/verifier/reward.txt`.
Format: Harbor's task folders, as of November 2026. Tasks of several services (compose) and separate verifiers are refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CLEAN = "rm -rf /tests/* /logs/verifier; mkdir -p /logs/verifier"
VERIFY = "bash /tests/test.sh"
SCORE = "/logs/verifier/reward.txt"


def is_harbor(data: str) -> bool:
    """Whether a folder holds Harbor's tasks."""
    return Path(data).is_dir() and next(Path(data).glob("*/task.toml"), None) is not None


class HarborRows(Sequence[dict[str, Any]]):
    """The tasks of a folder, in the order of their names."""

    def __init__(self, folder: str) -> None:
        self.folders = sorted(path.parent for path in Path(folder).glob("*/task.toml"))

    def __len__(self) -> int:
        return len(self.folders)

    def __getitem__(self, index: Any) -> Any:
        folder = self.folders[index]
        settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        for name, path in (("compose", "environment/docker-compose.yaml"), ("a verifier of its own", "tests/Dockerfile")):
            if (folder / path).exists():
                raise ValueError(f"{folder} needs {name} ({path}), which is not served")
        tests = {f"/tests/{path.relative_to(folder / 'tests')}": path for path in sorted((folder / "tests").rglob("*")) if path.is_file()}
        built = folder / "environment" if (folder / "environment" / "Dockerfile").exists() else None
        return {
            "question": (folder / "instruction.md").read_text(encoding="utf-8"),
            "name": folder.name,
            "image": settings.get("environment", {}).get("docker_image") or (None if built is None else str(built.absolute())),
            "workdir": _workdir(built) or ("/app" if settings.get("environment", {}).get("docker_image") else None),
            "before_test": CLEAN,
            "test": VERIFY,
            "score_file": SCORE,
            "test_files": {name: path.read_text(encoding="utf-8") for name, path in tests.items()},
        }


def _workdir(built: Path | None) -> str | None:
    """Where the image of a Dockerfile begins."""
    lines = [] if built is None else (built / "Dockerfile").read_text(encoding="utf-8").splitlines()
    return next((line.split()[1] for line in reversed(lines) if line.upper().startswith("WORKDIR ")), None)
