"""Installs the packages of the public sets as their authors build them, each into a folder of its own."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


@functools.cache
def installed(package: Path) -> Path:
    """The folder into which the package in the folder `package` is installed, without what it requires.

    Its own build backend makes the wheel, so what the wheel leaves out is missing here, too. One package (`nemo_gym_weather`) asks for a
    newer Python than rlx does and runs on this one; that bound alone is not kept. Raises AssertionError if it cannot be installed.
    """
    target = Path(tempfile.mkdtemp(prefix="rlx_public_"))
    atexit.register(shutil.rmtree, target, ignore_errors=True)
    options = [
        "--quiet",
        "--python",
        sys.executable,
        "--offline",
        "--no-deps",
        "--no-build-isolation",
        "--python-version",
        "3.13",
        "--target",
        str(target),
    ]
    built = subprocess.run([sys.executable, "-m", "uv", "pip", "install", *options, str(package)], capture_output=True, text=True)
    assert built.returncode == 0, f"{package.name} is not installed: {built.stderr}"
    return target
