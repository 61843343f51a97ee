"""The environments that are installed in a Python, found from the files of its packages without importing any.

    PYTHON rlx/envs/boot.py catalog          prints them as JSON: a list with the fields of `Listed`

An environment is a module whose text names `load_environment` or a `Taskset`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import json
import re
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution

from rlx.config.pythons import sources_of
from rlx.envs.kinds import has_classic

SIGN = re.compile(r"\bload_environment\b|Taskset\b")  # the module of an environment has one of these, unless it computes its names
CLASSIC = re.compile(r"^\s*(?:(?:async )?def |from .+ import .*|import .*)?load_environment\b", re.MULTILINE)  # defined or imported
FIRST = re.compile(r"^([A-Za-z]\w*)(?:/__init__)?\.py,", re.MULTILINE)  # modules at the top, in a package's list of files
NEVER = {"rlx", "verifiers", "hydra_plugins"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One installed environment."""

    name: str  # for `envs.NAME.id`
    kind: str  # "classic", "v1", or "unclear" if only importing it would show
    package: str  # the distribution that brings it
    version: str
    summary: str  # one line
    source: str  # folder or file
    editable: bool = False  # installed from a folder that it stays in


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
        for_verifiers = any("verifiers" in line for line in package.requires or ())
        if not SIGN.search(text) and not (for_verifiers and "__getattr__" in text):
            return None
    except (OSError, UnicodeDecodeError, ValueError):
        return None
    classic, v1 = CLASSIC.search(text) is not None, "Taskset" in text
    if not (classic or v1 or for_verifiers):  # its docstring speaks of one
        return None
    kind = "classic" if classic and (has_classic() or not v1) else "v1" if v1 else "unclear"
    return Listed(
        name=module.replace("_", "-"),
        kind=kind,
        package=package.metadata["Name"],
        version=package.version,
        summary=first_line(text) or package.metadata["Summary"] or "",
        source=str(source),
        editable=_is_editable(package),
    )


def first_line(text: str) -> str:
    """The first sentence or line of a module's docstring; empty without one."""
    with contextlib.suppress(SyntaxError, ValueError):
        said = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].strip()
        return said if len(said) <= 120 else said[:117].rstrip() + "…"
    return ""


def _is_editable(package: Distribution) -> bool:
    with contextlib.suppress(ValueError):
        return bool(json.loads(package.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"))
    return False


def main() -> None:
    """Print the environments of this Python."""
    print(json.dumps([asdict(one) for one in installed()]))


def from_json(text: str) -> list[Listed]:
    """What `main` printed."""
    return [Listed(**one) for one in json.loads(text)]
