"""The environments of a Python: which there are, of which kind each is, and loading one.

    PYTHON rlx/envs/boot.py kinds          prints them as JSON: a list with the fields of `Listed`

Kinds: classic (`load_environment`), a v1 taskset (a `Taskset` in `__all__`), or one of ours. They are found from the files of packages
without importing any: an environment is a module whose text names `load_environment` or a `Taskset`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable
from importlib.metadata import Distribution
from pathlib import Path
from typing import Literal

import msgspec

from rlx.config.pythons import shipped, sources_of
from rlx.config.schema import EnvConfig
from rlx.config.signatures import OWN_KINDS, module_of
from rlx.envs.local import LocalEnvironment
from rlx.envs.wire import Settings
from rlx.process import importing

Kind = Literal["classic", "v1", "function", "program", "gateway"]


def kind_of(env_id: str) -> Kind:
    """The kind of the environment `env_id`: a module's name, or `owner/name[@version]`. Imports its module.

    A package that offers both kinds is classic, unless the installed verifiers has only v1 (from 0.4 on).
    Raises ValueError, with a sentence for people, if no such package is installed or if it is no environment, and what importing it raises.
    """
    if env_id in OWN_KINDS:
        return OWN_KINDS[env_id]  # type: ignore[return-value]
    module = module_of(env_id)
    if importlib.util.find_spec("verifiers") is None:
        what = "rlx" if shipped(module) else env_id
        raise ValueError(f"{env_id} needs verifiers, and this Python ({sys.executable}) has none. Install it: rlx env install {what}")
    # verifiers takes its own taskset before a package of the same name, which may be what the taskset imports (textarena)
    own = (_folder("verifiers") / "v1" / "tasksets" / module / "__init__.py").is_file()
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if own:
            return "v1"
        if error.name != module:
            raise
        raise ValueError(
            f"the environment {env_id!r} is not installed: there is no module {module} in this Python ({sys.executable}). "
            "Install it with rlx env install FOLDER|PACKAGE"
        ) from error
    exported = [getattr(found, name, None) for name in getattr(found, "__all__", ())]
    bases = [base for one in exported if inspect.isclass(one) for base in one.__mro__]
    v1 = own or any((base.__module__, base.__name__) == ("verifiers.v1.taskset", "Taskset") for base in bases)
    if callable(getattr(found, "load_environment", None)) and (has_classic() or not v1):
        return "classic"
    if v1:
        return "v1"
    raise ValueError(
        f"the module {module} ({found.__file__ or ', '.join(found.__path__)}) is no verifiers environment: it has no function "
        "load_environment (classic), and its __all__ names no Taskset class (v1)"
    )


@functools.cache
def version_of(env_id: str) -> str | None:
    """The version of the installed package that has the environment; None if it is no package (a file on the path)."""
    module = module_of(env_id)
    for name in (module.replace("_", "-"), *importlib.metadata.packages_distributions().get(module, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


@functools.cache
def has_classic() -> bool:
    """Whether the installed verifiers runs classic environments (0.3 does, 0.4 does not)."""
    return (_folder("verifiers") / "legacy").is_dir()


def _folder(package: str) -> Path:
    """The folder of a top-level package; an empty path's name if it is not installed."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else Path("/nonexistent")


def load_one(name: str, config: EnvConfig, settings: Settings) -> LocalEnvironment:
    """Load `config.id` in this process as the environment `name`. Call it on the main thread.

    Imports verifiers, unless it is one of rlx's own kinds. Raises ValueError or RuntimeError with a sentence for people, or what the
    environment's own `load_environment` raises.
    """
    # A job that runs a snapshot sets it for `python -m rlx…`. A script that the environment starts must find the modules beside it.
    os.environ.pop("PYTHONSAFEPATH", None)
    load: Callable[..., LocalEnvironment]
    with importing():
        kind = kind_of(config.id)
        if config.id in OWN_KINDS:
            from rlx.envs.function import load as load_own

            load = functools.partial(load_own, importlib.import_module(config.id))
        elif kind == "v1":
            from rlx.envs.verifiers_v1 import load_environment as load
        else:
            from rlx.envs.verifiers_v0 import load_environment as load
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return load(name, config, settings.sampling, settings.timeout, settings.concurrency)
    finally:
        for number, handler in handlers.items():  # verifiers installs its own
            signal.signal(number, handler)


# what is installed

CLASSIC = re.compile(r"^\s*(?:(?:async )?def |from .+ import .*|import .*)?load_environment\b", re.MULTILINE)  # defined or imported
FIRST = re.compile(r"^([A-Za-z]\w*)(?:/__init__)?\.py,", re.MULTILINE)  # modules at the top, in a package's list of files
NEVER = {"rlx", "verifiers"}


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One installed environment."""

    name: str  # for `envs.NAME.id`
    kind: str  # "classic", "v1", or "unclear" if only importing it would show
    package: str  # the distribution that brings it
    version: str
    summary: str  # one line
    source: str  # folder or file


def installed() -> list[Listed]:
    """The environments of this Python, by name."""
    packages = reversed(list(importlib.metadata.distributions()))  # of two with one module, the first is imported
    places = {module: package for package in packages for module in _modules(package)}
    return [listed for module, package in sorted(places.items()) if (listed := _listed(package, module)) is not None]


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
    print(msgspec.json.encode(installed()).decode())
