"""Installs environments: `rlx env install my-env` makes a Python for the package and what it needs (`rlx.config.pythons`).

    resolve (uv, with what a worker needs)  →  lock  →  a virtual environment named after the lock's digest, unless it is there

An environment's packages never meet those that the trainer and vLLM run on, so none is refused for another version of torch or mcp.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from packaging.requirements import InvalidRequirement, Requirement
from uv import find_uv_bin

from rlx.config.errors import ConfigError
from rlx.config.pythons import LOCK, RECORD, home, shipped
from rlx.config.signatures import module_of
from rlx.envs import boot
from rlx.envs.kinds import Listed
from rlx.envs.kinds import installed as here

CLASSIC = "0.3.1"  # the last verifiers with `load_environment`; it has v1 tasksets, too
HUB = "https://hub.primeintellect.ai/{owner}/simple/"  # the package index of an owner of the Environments Hub
SOURCES = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}  # pip's setting: uv's variable
OWNED = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?:@([\w.+!-]+))?")


class InstallFailed(RuntimeError):
    """The installer failed. Its own message is on the screen; this one says what it means."""


@dataclass(frozen=True)
class InstallResult:
    """What an installation did."""

    folder: Path  # of the Python
    environments: tuple[Listed, ...]  # that came with it
    new: bool  # it was made now
    packages: int  # in its lock


@dataclass(frozen=True)
class Wanted:
    """What is to be installed."""

    requirement: str  # as uv reads it
    label: str  # begins the Python's name
    index: str | None = None  # that has the package, before the others


SHIPPED = Wanted("\n".join(["datasets>=4", "math-verify>=0.8", "reasoning-gym>=0.1.23"]), "rlx")  # what these environments import
TESTED = Path(boot.__file__).with_name("constraints.txt")  # the versions that they were tried with


def wanted(what: str) -> Wanted:
    """What a user means: `rlx` for the environments that rlx ships; a folder, which stays where it is; `owner/name[@version]` of the
    Environments Hub; a package; an address."""
    if what == SHIPPED.label or shipped(module_of(what)):
        return SHIPPED
    folder = Path(what).expanduser()
    if folder.is_dir():
        return Wanted(f"-e {folder.absolute()}", folder.absolute().name)
    if folder.is_file():
        return Wanted(str(folder.absolute()), folder.name.partition("-")[0])
    if "://" in what:
        return Wanted(what, what.rpartition("/")[2].partition("@")[0].removesuffix(".git"))
    if owned := OWNED.fullmatch(what):
        owner, name, version = owned.groups()
        exact = f"=={version}" if version not in (None, "latest") else ""
        return Wanted(f"{name}{exact}", name, HUB.format(owner=owner))
    try:
        return Wanted(what, Requirement(what).name)
    except InvalidRequirement as error:
        raise ConfigError(
            f"{what!r} is neither a folder here nor the name of a package.\n"
            "  fix: a folder (./my-env), a package (my-env, my-env==1.2), owner/name, or an address (git+https://…)"
        ) from error


def install(what: str) -> InstallResult:
    """Install an environment. Raises ConfigError for arguments that cannot be meant, InstallFailed if the installer failed."""
    asked = wanted(what)
    lock = _resolved(asked)
    digest = hashlib.sha256(f"{sys.version_info[:2]} {lock}".encode()).hexdigest()[:10]
    label = re.sub(r"[^a-z0-9]+", "-", asked.label.lower()).strip("-") or "own"
    folder = home() / f"{label}-{digest}"
    new = not (folder / RECORD).exists()
    if new:
        _make(folder, lock)
    # Of a folder that stays where it is, they are those that it has now.
    found = environments_of(str(folder / "bin" / "python")) if asked != SHIPPED else [one for one in here() if shipped(module_of(one.name))]
    record = {"what": what, "environments": [msgspec.structs.asdict(one) for one in found]}
    (folder / RECORD).write_text(json.dumps(record, indent=1))  # also if it was there: it is the one that was installed last
    return InstallResult(folder, tuple(found), new, len(lock.splitlines()))


def _resolved(asked: Wanted) -> str:
    """The lock: what is asked for, what a worker needs, and verifiers, all with exact versions."""
    needed = [*boot.NEEDED, f"renderers=={importlib.metadata.version('renderers')}"]
    # Not a package of the same name and a higher version that somebody else has put elsewhere.
    index = [] if asked.index is None else ["--index", asked.index, "--index-strategy", "first-index"]
    index += ["--constraint", str(TESTED)] if asked == SHIPPED else []
    command = ["pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python", _base(), *index, "-"]
    said = ""
    for verifiers in (f"verifiers=={CLASSIC}", "verifiers"):
        done = _uv(command, "\n".join([asked.requirement, *needed, verifiers]))
        if done.returncode == 0:
            return done.stdout
        said = said or done.stderr
    print(said, file=sys.stderr)
    raise InstallFailed(f"{asked.label} was not installed; the message of uv is above.")


def _make(folder: Path, lock: str) -> None:
    """Make a virtual environment with the packages of a lock."""
    shutil.rmtree(folder, ignore_errors=True)  # of an installation that was interrupted
    folder.parent.mkdir(parents=True, exist_ok=True)
    python = str(folder / "bin" / "python")
    print(f"installing {len(lock.splitlines())} packages into {folder}", file=sys.stderr, flush=True)
    steps = ((["venv", "--python", _base(), str(folder)], ""), (["pip", "install", "--no-deps", "--python", python, "-r", "-"], lock))
    for command, given in steps:
        done = _uv(["--quiet", *command], given)
        if done.returncode != 0:
            print(done.stderr, end="", file=sys.stderr)
            raise InstallFailed(f"the Python {folder} could not be made; the message of uv is above.")
    (folder / LOCK).write_text(lock)


def _base() -> str:
    """This Python without its virtual environment."""
    return getattr(sys, "_base_executable", None) or sys.executable


def _uv(arguments: Sequence[str], given: str) -> subprocess.CompletedProcess[str]:
    """Run uv, which comes with rlx, with a text as its input."""
    return subprocess.run([find_uv_bin(), *arguments], env=_environment(), input=given, capture_output=True, text=True, check=False)


def _environment() -> dict[str, str]:
    """This process's environment, with pip's package sources for uv."""
    env = dict(_plain())
    for key, variable in SOURCES.items():
        if variable in env:
            continue
        query = [sys.executable, "-m", "pip", "config", "get", f"global.{key}"]
        found = (
            env.get("PIP_" + key.upper().replace("-", "_"))
            or subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        )
        places = [one for one in found.split() if not one.startswith("file://") or Path(one.removeprefix("file://")).is_dir()]
        if places:
            env[variable] = ("," if key == "find-links" else " ").join(places)
    env.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # as pip does: the best version of all sources
    return env


def environments_of(python: str) -> list[Listed]:
    """The environments that are installed in a Python; none if it cannot be asked."""
    command = [python, boot.__file__, "kinds"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_plain(), cwd="/")  # no folder here hides a module
    return msgspec.json.decode(done.stdout, type=list[Listed]) if done.returncode == 0 else []


def _plain() -> Mapping[str, str]:
    """This process's environment without paths of modules: only installed packages count."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
