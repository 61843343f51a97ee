"""The Pythons of environments: each installed package has one of its own, made from a lock (`rlx.preflight.env_install`).

    .pythons/my-env-3f9a2c1b/       a virtual environment, below `home()`
    …/rlx.json   {"what": "my-env", "environments": [{"name": "my-env", "kind": "v1", "source": "/…", …}]}, written last
    …/lock.txt   every package with its version; the folder's name ends with its digest

The same lock is the same Python on every machine, so a configuration has the folder's name, `envs.NAME.python=my-env-3f9a2c1b`. null
becomes the one that was installed last for the environment's name. The environments that rlx ships share one; their code is rlx's. A
package that was installed from a folder has the folder's path in its lock, so there the name belongs to the machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.config.signatures import module_of

HOME = "RLX_PYTHONS"
RECORD, LOCK = "rlx.json", "lock.txt"
ROOT = Path(__file__).resolve().parents[2]  # a checkout, or the folder that packages are installed into


@dataclass(frozen=True, slots=True)
class OwnPython:
    """One of them."""

    folder: Path
    environments: tuple[Mapping[str, Any], ...]  # with the fields of `rlx.envs.kinds.Listed`

    @property
    def path(self) -> Path:
        """The program."""
        return self.folder / "bin" / "python"

    def listed(self, env_id: str) -> Mapping[str, Any] | None:
        """What it has of an environment, a module's name or `owner/name[@version]`; None if it has none of this name."""
        return next((listed for listed in self.environments if module_of(listed["name"]) == module_of(env_id)), None)

    @property
    def lock(self) -> str:
        """Every package with its version, a line each, as uv writes requirements."""
        return (self.folder / LOCK).read_text()


def home() -> Path:
    """The folder that they are in: `RLX_PYTHONS`, else `.pythons` of the checkout, else `~/.local/share/rlx/pythons`."""
    if (chosen := os.environ.get(HOME)) or (ROOT / "pyproject.toml").is_file():
        return Path(chosen or ROOT / ".pythons")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "rlx" / "pythons"


def installed() -> list[OwnPython]:
    """All that are complete, the one that was installed last first."""
    records = sorted(home().glob(f"*/{RECORD}"), key=lambda record: (-record.stat().st_mtime_ns, record))
    return [OwnPython(record.parent, tuple(json.loads(record.read_text())["environments"])) for record in records]


def python_for(env_id: str) -> OwnPython | None:
    """The Python that was installed last for an environment; None if none was, so that the run's own Python must have it."""
    return next((one for one in installed() if one.listed(env_id) is not None), None)


def program_of(python: str) -> str:
    """The path of the Python in a configuration: the name of one below `home()`, or a path."""
    return str(home() / python / "bin" / "python") if os.sep not in python else os.path.expanduser(python)


def python_of(env_id: str, python: str | None) -> str | None:
    """The Python that an environment plays in on this host; None: this one. `python`: that of its configuration.

    A configuration names none for the environments that rlx ships, and for those of a container, whose files only its processes see.
    """
    if python is not None:
        return program_of(python)
    if shipped(module_of(env_id)) is None and importlib.util.find_spec("verifiers") is not None:
        return None
    own = python_for(env_id)
    return None if own is None else str(own.path)


def shipped(module: str) -> Path | None:
    """The folder of an environment that rlx ships; None if it is another module."""
    places = (ROOT / "environments" / module / module, ROOT / module)
    return next((place for place in places if module.startswith("rlx_") and (place / "__init__.py").is_file()), None)


def at(program: str | os.PathLike[str]) -> OwnPython | None:
    """The own Python of this program; None if it is another Python."""
    return next((one for one in installed() if one.path == Path(program)), None)


def version_in(program: str, env_id: str) -> str | None:
    """The version of an environment's package in a Python; None if `rlx env install` did not make it."""
    own = at(program)
    listed = None if own is None else own.listed(env_id)
    return None if listed is None else str(listed["version"])


def sources_of(env_id: str, program: str | None = None) -> Path | None:
    """The folder (or the single file) of an environment's package; None if it is not installed. Imports nothing.

    `program`: the Python that has it; None: this one. Of another one that `rlx env install` has not made, only the files in its
    `site-packages` are seen.
    """
    module = module_of(env_id)
    if program is not None and shipped(module) is None:
        own = at(program)
        listed = None if own is None else own.listed(env_id)
        if listed is not None:
            return Path(listed["source"])
        found = (path for end in ("", ".py") for path in Path(program).parent.parent.glob(f"lib/python*/site-packages/{module}{end}"))
        return next(found, None)
    with suppress(ImportError, ValueError):
        if spec := importlib.util.find_spec(module):
            place = next(iter(spec.submodule_search_locations or ()), spec.origin)
            return Path(place) if place not in (None, "built-in", "frozen") else None
    return None
