"""Marks of tests that need sandboxes of this machine. Where they must run (RLX_REQUIRE_SANDBOX), a machine without is a failure.

Tests of podman and docker run where these can make boxes (docker: where its daemon runs), with an image of this machine's own programs.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from rlx.agents.images import problem_of

NEEDS_BWRAP = pytest.mark.skipif(
    problem_of("bwrap") is not None and not os.environ.get("RLX_REQUIRE_SANDBOX"), reason=f"bubblewrap: {problem_of('bwrap')}"
)
# CI installs neither engine; where one is, the same tests run in its boxes.
ENGINES = [
    pytest.param(kind, marks=pytest.mark.skipif(problem_of(kind) is not None, reason=f"no boxes of {kind} here: {problem_of(kind)}"))
    for kind in ("podman", "docker")
]
PROGRAMS = "sh bash env cat mkdir rm mv ls touch chmod dirname head base64 grep sleep tail mktemp id setsid dd df python3 true tar"


@functools.cache
def image_of(kind: str) -> str | None:
    """A small image of this machine's shell, tools and Python; None for boxes without an image."""
    if kind not in ("podman", "docker"):
        return None
    name = "localhost/rlx-test:1"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        for each in ("bin", "lib", "lib64"):
            (root / "usr" / each).mkdir(parents=True)
            (root / each).symlink_to(f"usr/{each}")
        (root / "tmp").mkdir()
        python = Path("/usr/lib") / Path(shutil.which("python3", path="/usr/bin") or "").resolve().name
        shutil.copytree(python, root / python.relative_to("/"), ignore=shutil.ignore_patterns("test", "__pycache__", "idlelib"))
        for path in filter(None, (shutil.which(each, path="/usr/bin:/bin") for each in PROGRAMS.split())):
            shutil.copy(path, root / "usr/bin")
            for library in re.findall(r"(/\S+) \(", subprocess.run(["ldd", path], capture_output=True, text=True).stdout):
                (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(library, root / library[1:])
        archive = Path(folder, "root.tar")
        subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True)
        subprocess.run([kind, "import", archive, name], check=True, capture_output=True)
    atexit.register(subprocess.run, [kind, "rmi", "--force", name], capture_output=True)
    return name
