"""Tasks in Harbor's folders for `env=program`: `task.toml`, `instruction.md`, `environment/`, `tests/test.sh`.

    [environment]
    docker_image = "name"      or a Dockerfile in environment/, which podman and docker build

The verifier runs in the program's own box, with `tests/` at `/tests`, and leaves its score in `/logs/verifier`: `reward` in `reward.json`,
or `reward.txt`.
Format: Harbor's task folders, as of November 2026. What is not served (several services, a verifier's own box, variables) is refused.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

CLEAN = "rm -rf /tests/* /logs/verifier; mkdir -p /logs/verifier"
VERIFY = "bash /tests/test.sh"
SCORE = "/logs/verifier/reward"  # .json or .txt


def harbor_rows(data: str) -> list[dict[str, Any]]:
    """The tasks of a folder, in the order of their names; none if it holds none. Raises ValueError for one that cannot be served."""
    return [_row(path.parent) for path in sorted(Path(data).glob("*/task.toml"))]


def _row(folder: Path) -> dict[str, Any]:
    settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    needs = {
        "several services (environment/docker-compose.yaml)": (folder / "environment" / "docker-compose.yaml").exists(),
        "a box of its own for the verifier": (folder / "tests" / "Dockerfile").exists() or verifier.get("environment_mode") == "separate",
        **{f"environment.{name}": environment.get(name) for name in ("env", "healthcheck", "mcp_servers")},
        **{f"verifier.{name}": verifier.get(name) for name in ("env", "collect")},
    }
    if missing := [name for name, needed in needs.items() if needed]:
        raise ValueError(f"{folder} needs {', '.join(missing)}, which env=program does not have; verifiers' taskset `harbor` has it")
    tests = {f"/tests/{path.relative_to(folder / 'tests')}": path for path in sorted((folder / "tests").rglob("*")) if path.is_file()}
    built = folder / "environment" if (folder / "environment" / "Dockerfile").exists() else None
    return {
        "question": (folder / "instruction.md").read_text(encoding="utf-8"),
        "name": folder.name,
        "image": environment.get("docker_image") or (None if built is None else str(built.absolute())),
        "workdir": _workdir(built) or ("/app" if environment.get("docker_image") else None),
        "before_test": CLEAN,
        "test": VERIFY,
        "score_file": SCORE,
        "test_files": {name: path.read_text(encoding="utf-8") for name, path in tests.items()},
    }


def _workdir(built: Path | None) -> str | None:
    """Where the image of a Dockerfile begins."""
    lines = [] if built is None else (built / "Dockerfile").read_text(encoding="utf-8").splitlines()
    return next((line.split()[1] for line in reversed(lines) if line.upper().startswith("WORKDIR ")), None)
