"""The environments that are installed in a Python, found from the files of its packages without importing any.

    PYTHON rlx/envs/boot.py catalog          prints them as JSON: a list with the fields of `Listed`

An environment is a module whose text names `load_environment` or a `Taskset`.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution

import msgspec

from rlx.config.pythons import sources_of
from rlx.envs.kinds import has_classic

CLASSIC = re.compile(r"^\s*(?:(?:async )?def |from .+ import .*|import .*)?load_environment\b", re.MULTILINE)  # defined or imported
FIRST = re.compile(r"^([A-Za-z]\w*)(?:/__init__)?\.py,", re.MULTILINE)  # modules at the top, in a package's list of files
NEVER = {"rlx", "verifiers"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One installed environment."""

    name: str  # for `envs.NAME.id`
    kind: str  # "classic", "v1", or "unclear" if only importing it would show
    package: str  # the distribution that brings it
    version: str
    summary: str  # one line
    source: str  # folder or file


def installed() -> list[Listed]:
    """The environments of this Python, by name."""
    found: dict[str, Listed] = {}
    for package in importlib.metadata.distributions():
        for module in _modules(package):
            if module not in found and (listed := _listed(package, module)) is not None:
                found[module] = listed
    return sorted(found.values(), key=lambda one: one.name)


def _modules(package: Distribution) -> list[str]:
    """The top-level modules that a package may bring. The list of its files is read as text: of large packages it has thousands."""
    names = {re.sub(r"[-.]+", "_", package.metadata["Name"] or "").lower()}
    top = package.read_text("top_level.txt")
    names |= set(top.split() if top is not None else FIRST.findall(package.read_text("RECORD") or ""))
    return sorted(name for name in names if name.isidentifier() and not name.startswith("_") and name not in NEVER)


def _listed(package: Distribution, module: str) -> Listed | None:
    """The environment in a module; None if it has none."""
    source = sources_of(module)
    file = source / "__init__.py" if source is not None and source.is_dir() else source
    try:
        text = file.read_text() if file is not None and file.suffix == ".py" else ""
    except (OSError, UnicodeDecodeError):
        return None
    for_verifiers = any("verifiers" in line for line in package.requires or ())
    classic, v1 = CLASSIC.search(text) is not None, "Taskset" in text
    if not (classic or v1 or (for_verifiers and ("load_environment" in text or "__getattr__" in text))):
        return None
    return Listed(
        name=module.replace("_", "-"),
        kind="classic" if classic and (has_classic() or not v1) else "v1" if v1 else "unclear",
        package=package.metadata["Name"],
        version=package.version,
        summary=package.metadata["Summary"] or "",
        source=str(source),
    )


def main() -> None:
    """Print the environments of this Python."""
    print(json.dumps([asdict(one) for one in installed()]))


def from_json(text: str) -> list[Listed]:
    """What `main` printed."""
    return msgspec.json.decode(text, type=list[Listed])
